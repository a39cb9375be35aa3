"""The file to which the answers for watched images are appended; it also says which files are done."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ratp._core.files import writing
from ratp.deploy.arrivals import Arrival
from ratp.errors import RatpError, RunDirectoryError, csv_cell

FIELDS = "file", "class", "confidence", "version", "level", "time", "size", "modified", "error"
_HEADER = ",".join(FIELDS) + "\n"
_START = b'{"file": '


class Answers:
    """Appends records to a JSONL or CSV file. Every batch of records is on disk before the next images are taken.

    If an earlier process was killed while it wrote, its last, incomplete record is cut off: that file is then answered
    again.

    Attributes:
        answered: The files that were predicted when the file was opened, in the order of their records.
        count: Number of predictions in the file.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix.lower() not in (".jsonl", ".csv"):
            raise RatpError(f"{path} must end in .jsonl or .csv: choose another file with --out.")
        self.path, self._is_csv = path, path.suffix.lower() == ".csv"
        with writing(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def is_done(self, file: Arrival) -> bool:
        """Whether the file has a record already."""
        return self._key(file) in self._done

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Appends records and waits until they are on disk."""
        rows = list(records)
        self._write("".join(map(self._line, rows)))
        files = [(_file_of(row), "error" in row) for row in rows]
        self._done |= {self._key(file) for file, _ in files}
        self.count += sum(not is_bad for _, is_bad in files)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._handle)

    def _write(self, text: str) -> None:
        with writing(self.path):
            if not (self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self._handle))):
                raise RunDirectoryError(f"{self.path} was removed or replaced while answers were written to it.")
            data = text.encode("utf-8", "surrogateescape")
            while data:
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        first = _HEADER.encode() if self._is_csv else _START
        if data and not data.startswith(first[: len(data)]):
            raise self._foreign()
        rows = self._rows(whole)
        while rows is None and whole:  # a line break within a name of the incomplete record
            whole = whole[: whole.rfind(b"\n", 0, -1) + 1]
            rows = self._rows(whole)
        if len(whole) < len(data):
            with writing(self.path):
                os.ftruncate(self._handle, len(whole))
        if self._is_csv and not whole:
            self._write(_HEADER)
        files = [(_file_of(row), bool(row.get("error"))) for row in rows or ()]
        self._done = {file for file, _ in files}
        self.answered = [file for file, is_bad in files if not is_bad]
        self.count = len(self.answered)

    def _rows(self, data: bytes) -> list[dict[str, Any]] | None:
        """Parses records; None if the last one is incomplete."""
        text = data.decode("utf-8", "surrogateescape")
        try:
            if not self._is_csv:
                return [_checked(json.loads(line)) for line in text.split("\n")[:-1]]
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
        except (ValueError, TypeError, KeyError, csv.Error) as error:
            raise self._foreign() from error
        if rows and None in rows[-1].values():
            return None
        try:
            return [_checked(row) for row in rows]
        except (ValueError, TypeError, KeyError) as error:
            raise self._foreign() from error

    def _line(self, record: Mapping[str, Any]) -> str:
        if not self._is_csv:
            return json.dumps(record) + "\n"
        file = io.StringIO(newline="")
        csv.writer(file, lineterminator="\n").writerow([csv_cell(record.get(name, "")) for name in FIELDS])
        return file.getvalue()

    def _key(self, file: Arrival) -> Arrival:
        return file._replace(path=csv_cell(file.path)) if self._is_csv else file

    def _foreign(self) -> RatpError:
        return RatpError(f"{self.path} holds something other than answers: choose another file with --out.")


def _checked(row: Any) -> dict[str, Any]:
    """Returns a row that describes a file; raises ValueError."""
    if not isinstance(row, dict) or not isinstance(row.get("file"), str):
        raise ValueError("no answer")
    int(row["size"]), int(row["modified"])
    return row


def _file_of(row: Mapping[str, Any]) -> Arrival:
    return Arrival(row["file"], int(row["size"]), int(row["modified"]))
