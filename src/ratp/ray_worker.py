"""What a worker of a cluster does: it makes a run in a folder of its own, and hands out the files that change in it.

Both sides write files in an order that leaves a directory a run can go on with wherever writing stops.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch

from ratp.errors import RatpError, RunDirectoryError
from ratp.events import Event, StageFinished, StageStarted
from ratp.files import write_bytes, writing
from ratp.lock import exclusive, is_held
from ratp.midstage import LATEST as CHECKPOINT
from ratp.run import Run
from ratp.run_messages import encoded, planned, told
from ratp.side_by_side import memory_error

# What folders of workers are called, and how many seconds they get to make them and tidy up.
WORKPLACE, PATIENCE = "ratp-worker-", 5.0
# A folder is this run's whenever writing stops: the config comes first, and no result comes before its state.
_FIRST, _LAST = ("config.json",), ("weights.safetensors", "journal.jsonl", "state.safetensors", "matrix.json")


def make_run(work: Mapping[str, Any], files: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
    """Makes a run on a worker, with one thread to compute with.

    Args:
        work: The run as plain data.
        files: What its directory holds so far.

    Yields:
        For every checkpoint, and every stage that begins or ends, the files that changed; at last how it ended.
    """
    torch.set_num_threads(1)
    with _workplace() as folder:
        write_files(folder, files)
        changes = _Changes(folder)
        try:
            for event in _events(work, folder):
                if isinstance(event, StageStarted | StageFinished):
                    yield {**encoded(event), "files": changes.take()}
                elif CHECKPOINT in changes:
                    yield {"checkpoint": True, "files": changes.take()}
            answer: dict[str, Any] = {"finished": True}
        except Exception as error:
            answer = told(error)
            if "message" in answer:
                answer["message"] = answer["message"].replace(os.fspath(folder), work["folder"])
        yield {**answer, "files": changes.take()}


@contextmanager
def _workplace() -> Iterator[Path]:
    """A folder for a run, removed afterwards; and so are those of workers that could not do so."""
    for left in Path(gettempdir()).glob(f"{WORKPLACE}*"):
        with suppress(OSError):  # another worker may be quicker
            if not is_held(left) and time.time() - left.stat().st_mtime > PATIENCE:
                shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=WORKPLACE, ignore_cleanup_errors=True) as place, exclusive(Path(place)):
        folder = Path(place) / "run"
        folder.mkdir()
        yield folder


def _events(work: Mapping[str, Any], folder: Path) -> Iterator[Event]:
    run = Run(planned(work), folder, **work["options"], wait=True)
    try:
        with closing(run.events()) as events:
            yield from events
    except torch.OutOfMemoryError as error:
        raise memory_error(run, error) from error


class _Changes:
    """What changes in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._marks()

    def __contains__(self, name: str) -> bool:
        """Whether a file is there and has changed."""
        path = self._folder / name
        return path.exists() and _mark(path) != self._before.get(name)

    def take(self) -> dict[str, bytes | None]:
        """The files that have changed since this was last asked; None where there is none any more."""
        before, self._before = self._before, self._marks()
        changed = {
            name: path for name, path in files_of(self._folder).items() if self._before[name] != before.get(name)
        }
        return {**contents(changed), **dict.fromkeys(before.keys() - self._before.keys())}

    def _marks(self) -> dict[str, tuple[int, int, int]]:
        return {name: _mark(path) for name, path in files_of(self._folder).items()}


def _mark(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def files_of(folder: Path) -> dict[str, Path]:
    """All files of a run in its directory by name, in the order in which to write them."""
    try:
        names = [item.name for item in folder.iterdir() if item.is_file() and _belongs(item.name)]
    except OSError as error:
        raise RunDirectoryError(f"cannot read {folder}: {error.strerror}.") from error
    others = sorted({*names} - {*_FIRST, *_LAST})
    return {name: folder / name for name in (*_FIRST, *others, *_LAST) if name in names}


def _belongs(name: str) -> bool:
    """Whether a name is one that a run gives its files: no folder, nothing hidden, no lock, no program."""
    letters = all(sign.isalnum() or sign in "-_." for sign in name)
    return letters and not name.startswith(".") and name.endswith((".json", ".jsonl", ".safetensors", ".csv"))


def contents(files: Mapping[str, Path]) -> dict[str, bytes]:
    """What is in some files."""
    try:
        return {name: path.read_bytes() for name, path in files.items()}
    except OSError as error:
        raise RunDirectoryError(f"cannot read {error.filename}: {error.strerror}.") from error


def write_files(folder: Path, files: Mapping[str, bytes | None]) -> None:
    """Writes files, and removes those that are None."""
    for name, data in files.items():
        if not _belongs(name):
            raise RatpError(f"a worker sent a file called {name!r}, which does not belong into a run directory.")
        if data is None:
            with writing(folder / name):
                (folder / name).unlink(missing_ok=True)
        else:
            write_bytes(folder / name, data)
