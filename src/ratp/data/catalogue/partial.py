"""A partial download and the version of the file it belongs to.

The bytes that have arrived of ``NAME`` lie in ``NAME.part`` and what the server said of them in ``NAME.part.json``, so
that a later call resumes the right version. ``NAME`` itself only ever exists complete.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from email.message import Message
from pathlib import Path
from typing import BinaryIO

from ratp._core.files import sha256_of
from ratp._core.locks import try_acquire
from ratp.errors import RatpError

_CHUNK = 1 << 18


class DownloadError(RatpError):
    """A file could not be downloaded: the addresses tried, what each answered, and what to do instead."""


class TooLongError(Exception):
    """Compressed content unpacks to more bytes than allowed."""


@dataclass(frozen=True)
class Version:
    """What a server said about a file.

    ``total`` counts the bytes as they are sent, packed by ``encoding`` if the server did so.
    """

    url: str
    etag: str | None = None
    modified: str | None = None
    total: int | None = None
    encoding: str | None = None

    @staticmethod
    def of(url: str, headers: Message, total: int | None) -> Version:
        """The version that a response with these headers carries."""
        encoding = (headers.get("Content-Encoding") or "identity").strip().lower()
        return Version(
            url, headers.get("ETag"), headers.get("Last-Modified"), total, None if encoding == "identity" else encoding
        )

    @property
    def validator(self) -> str | None:
        """What ``If-Range`` may carry: a strong tag, else a date."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.modified

    def contradicts(self, other: Version) -> bool:
        """Whether the two cannot be the same bytes. Tags and dates of different servers say nothing."""
        pairs: list[tuple[object, object]] = [(self.total, other.total), (self.encoding, other.encoding)]
        if self.url == other.url:
            pairs += [(self.etag, other.etag), (self.modified, other.modified)]
        return any(a != b for a, b in pairs if a is not None and b is not None)


class Partial:
    """A ``.part`` file, held open by this process alone; an empty one has no version."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self._note = path.with_name(f"{path.name}.json")
        self.version: Version | None = None
        with suppress(OSError, ValueError, TypeError, RecursionError):
            self.version = Version(**json.loads(self._note.read_bytes()))
        if self.version is None:
            self.clear()

    @property
    def length(self) -> int:
        """Number of bytes that have arrived."""
        return self._file.seek(0, os.SEEK_END)

    def clear(self) -> None:
        """Discards what has arrived."""
        self.version = None
        self._note.unlink(missing_ok=True)
        self._file.truncate(0)

    def begin(self, version: Version) -> None:
        """Starts over with another version."""
        self.clear()
        free = shutil.disk_usage(self.path.parent).free
        if version.total is not None and version.total > free:
            raise DownloadError(
                f"{version.url} has {version.total:,} bytes, and {self.path.parent} has room for {free:,}. "
                "Free some space or choose another folder."
            )
        self._note.write_text(json.dumps(asdict(version)))
        self.version = version

    def append(self, chunk: bytes) -> None:
        """Adds bytes at the end."""
        self._file.write(chunk)

    def flush(self) -> None:
        """Hands what has arrived to the operating system."""
        self._file.flush()

    def sha256(self) -> str:
        """The hash of what has arrived."""
        self.flush()
        return sha256_of(self.path)

    def unpack(self, most: int) -> None:
        """Unpacks content that the server compressed for transfer; raises TooLongError after ``most`` bytes."""
        self.flush()
        plain = self.path.with_name(f"{self.path.name}.plain")
        try:
            with gzip.open(self.path) as packed, plain.open("wb") as file:
                while chunk := packed.read(_CHUNK):
                    file.write(chunk)
                    if file.tell() > most:
                        raise TooLongError(f"it unpacks to more than the {most:,} bytes allowed")
            self._file.truncate(0)
            with plain.open("rb") as file:
                shutil.copyfileobj(file, self._file)
        finally:
            plain.unlink(missing_ok=True)
        self.flush()

    def finish(self, target: Path) -> None:
        """Renames the complete file to ``target``."""
        self.flush()
        os.fsync(self._file.fileno())
        self.path.replace(target)
        self._note.unlink(missing_ok=True)

    def remove_if_empty(self) -> None:
        """Removes the file if nothing can be resumed."""
        if self.version is None:
            self.path.unlink(missing_ok=True)


@contextmanager
def partial_of(target: Path) -> Iterator[Partial]:
    """Opens the ``.part`` file of ``target`` for this process alone."""
    path = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = try_acquire(path.with_name(f"{path.name}.lock"))
        if lock is None:
            raise DownloadError(f"{path} is being downloaded by another process. Wait for it to end, then try again.")
        with lock, path.open("ab+") as file:
            partial = Partial(path, file)
            try:
                yield partial
            finally:
                partial.remove_if_empty()
    except OSError as error:
        raise DownloadError(
            f"cannot write {path}: {error.strerror or error}. Free some space or choose a folder you may write to, "
            "then try again: what has arrived is kept."
        ) from error
