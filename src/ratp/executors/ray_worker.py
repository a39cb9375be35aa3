"""The worker's side on a Ray cluster: executes a run in a temporary folder and sends the files that change in it.

Both sides write files in such an order that a run can continue from its directory wherever writing stops.
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

from ratp._core.files import write_bytes, writing
from ratp._core.locks import exclusive, is_held
from ratp.errors import RatpError, RunDirectoryError
from ratp.executors.protocol import encoded, encoded_error, memory_error, planned
from ratp.runs.events import Event, StageFinished, StageStarted
from ratp.runs.run import Run
from ratp.runs.states import CHECKPOINT_LATEST as CHECKPOINT

# Prefix of workers' folders, and seconds they get to create them and to clean up.
WORKPLACE, PATIENCE = "ratp-worker-", 5.0
# Order of writing: the config comes first, and results come after the state they belong to.
_FIRST = ("config.json",)
_LAST = ("weights.safetensors", "journal.jsonl", "state.safetensors", "matrix.json", "checksums.json")


def make_run(work: Mapping[str, Any], files: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
    """Executes a run on a worker, which computes with one thread.

    Yields:
        The files that changed, at every checkpoint and every start or end of a stage; finally how the run ended.
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
            answer = encoded_error(error)
            if "message" in answer:
                answer["message"] = answer["message"].replace(os.fspath(folder), work["folder"])
        yield {**answer, "files": changes.take()}


@contextmanager
def _workplace() -> Iterator[Path]:
    """A temporary folder for a run. Also removes folders that dead workers left behind."""
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
    """Tracks which files of a folder change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._marks()

    def __contains__(self, name: str) -> bool:
        """Whether a file exists and has changed."""
        path = self._folder / name
        return path.exists() and _mark(path) != self._before.get(name)

    def take(self) -> dict[str, bytes | None]:
        """The files that changed since the last call; None for those that were removed."""
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
    """All files of a run's directory by name, in the order in which to write them."""
    try:
        names = [item.name for item in folder.iterdir() if item.is_file() and _belongs(item.name)]
    except OSError as error:
        raise RunDirectoryError(f"cannot read {folder}: {error.strerror}.") from error
    others = sorted({*names} - {*_FIRST, *_LAST})
    return {name: folder / name for name in (*_FIRST, *others, *_LAST) if name in names}


def _belongs(name: str) -> bool:
    """Whether a run has files of such a name: no path, nothing hidden, no lock, no code."""
    letters = all(sign.isalnum() or sign in "-_." for sign in name)
    return letters and not name.startswith(".") and name.endswith((".json", ".jsonl", ".safetensors", ".csv"))


def contents(files: Mapping[str, Path]) -> dict[str, bytes]:
    """The contents of files."""
    try:
        return {name: path.read_bytes() for name, path in files.items()}
    except OSError as error:
        raise RunDirectoryError(f"cannot read {error.filename}: {error.strerror}.") from error


def write_files(folder: Path, files: Mapping[str, bytes | None]) -> None:
    """Writes files and removes those that are None."""
    for name, data in files.items():
        if not _belongs(name):
            raise RatpError(f"a worker sent a file called {name!r}, which does not belong in a run directory.")
        if data is None:
            with writing(folder / name):
                (folder / name).unlink(missing_ok=True)
        else:
            write_bytes(folder / name, data)
