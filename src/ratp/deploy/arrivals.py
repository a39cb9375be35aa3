"""Image files that appear in a folder or on a list, decoded as soon as they are complete."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from ratp._core.environment import usable_cores
from ratp.data.decode.pixels import BadImage
from ratp.data.read.folder import list_folder, read_file
from ratp.data.read.listing import describe_unsupported
from ratp.deploy.images import decode_image
from ratp.errors import RatpError


class Arrival(NamedTuple):
    """A file as it was when it was listed; one that has changed since is another arrival."""

    path: str
    size: int
    modified: int  # in ns


class GoneError(RatpError):
    """The watched folder has vanished."""


class Source(Protocol):
    """Where files appear.

    Attributes:
        open: Whether more files may appear.
        note: What to say of files that are ignored; empty if there is nothing new to say.
    """

    open: bool
    note: str

    def list(self) -> Sequence[Arrival]:
        """Lists all files, in the order in which they should be answered; raises GoneError."""
        ...


class FolderSource:
    """The image files below a folder, the oldest first.

    Args:
        folder: The folder.
        once: Whether to list only the files that are there now.
    """

    def __init__(self, folder: Path, *, once: bool = False) -> None:
        if not folder.is_dir():
            raise RatpError(f"{folder} is not a folder. Name the folder in which images appear, or - for a list.")
        self._folder = folder.resolve()
        self._once, self._first = once, set[str]()
        self._unsupported = frozenset[str]()
        self.open, self.note = True, ""

    def list(self) -> Sequence[Arrival]:
        """Lists the image files below the folder."""
        try:
            found = list_folder(self._folder)
        except RatpError as error:
            raise GoneError(f"{self._folder} has vanished or cannot be read.") from error
        new = frozenset(found.unsupported) - self._unsupported
        self._unsupported |= new
        self.note = describe_unsupported(new) if new else ""
        files = [Arrival(str(self._folder / file.name), file.size, file.stamp) for file in found.files]
        if self._once and self.open:
            self.open, self._first = False, {file.path for file in files}
        kept = (file for file in files if not self._once or file.path in self._first)
        return sorted(kept, key=lambda file: (file.modified, file.path))


class ListSource:
    """Files whose names come one after another, in this order."""

    def __init__(self, names: Iterable[bytes]) -> None:
        self._paths: dict[str, None] = {}
        self.open, self.note = True, ""
        threading.Thread(target=self._read, args=(names,), name="list", daemon=True).start()

    def list(self) -> Sequence[Arrival]:
        """Lists the files that are named so far."""
        return [_arrival(path) for path in tuple(self._paths)]

    def _read(self, names: Iterable[bytes]) -> None:
        try:
            for name in filter(None, names):
                self._paths[str(Path(os.fsdecode(name)).absolute())] = None
        finally:
            self.open = False


def _arrival(path: str) -> Arrival:
    """Describes a file; size and time are 0 if it cannot be found."""
    try:
        about = Path(path).stat()
    except (OSError, ValueError):
        return Arrival(path, 0, 0)
    return Arrival(path, about.st_size, about.st_mtime_ns)


class Taken(NamedTuple):
    """Images that were decoded, and files that were broken for too long, each with the reason."""

    images: list[tuple[Arrival, Tensor]]
    broken: list[tuple[Arrival, str]]


class Intake:
    """Waits until files are complete, and decodes them.

    A file counts as complete if it has not changed between two looks and can be decoded. A file that cannot be
    decoded is tried again at every look until ``patience`` seconds are over.
    """

    def __init__(
        self, source: Source, is_done: Callable[[Arrival], bool], size: tuple[int, int], patience: float
    ) -> None:
        self._source, self._is_done, self._size, self._patience = source, is_done, size, patience
        self._before: dict[str, Arrival] = {}
        self._failing: dict[Arrival, float] = {}
        self._queue = deque[Arrival]()
        self._ended, self._unsettled, self._since = False, True, 0.0
        self._pool = ThreadPoolExecutor(usable_cores(), "decode")

    @property
    def finished(self) -> bool:
        """Whether no file is left and none will come."""
        return self._ended and not self._unsettled and not self._queue

    def is_due(self, count: int, latency: float) -> bool:
        """Whether to take images now: ``count`` are there, one has waited long enough, or no other will come."""
        late = time.monotonic() - self._since >= latency or (self._ended and not self._unsettled)
        return len(self._queue) >= count or (bool(self._queue) and late)

    def look(self) -> None:
        """Lists the files, and queues those that are complete; raises GoneError."""
        ended = not self._source.open  # before listing: names may come in between
        found = {file.path: file for file in self._source.list() if not self._is_done(file)}
        queued = set(self._queue)
        ready = [file for path, file in found.items() if self._before.get(path) == file and file not in queued]
        if ready and not queued:
            self._since = time.monotonic()
        self._queue.extend(ready)
        self._failing = {file: since for file, since in self._failing.items() if found.get(file.path) == file}
        self._before, self._ended = found, ended
        self._unsettled = len(found) > len(self._queue)

    def take(self, count: int) -> Taken:
        """Decodes up to ``count`` files of the queue."""
        files = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        taken, now = Taken([], []), time.monotonic()
        for file, outcome in zip(files, self.decode(files), strict=True):
            if isinstance(outcome, Tensor):
                taken.images.append((file, outcome))
            elif now - self._failing.setdefault(file, now) >= self._patience:
                taken.broken.append((file, outcome))
            else:
                self._unsettled = True  # the next look queues it again
        return taken

    def decode(self, files: Sequence[Arrival]) -> list[Tensor | str]:
        """Decodes files in parallel; returns the reason for each that cannot be decoded or has changed."""
        return list(self._pool.map(self._decode, files))

    def close(self) -> None:
        """Ends the threads that decode."""
        self._pool.shutdown(cancel_futures=True)

    def _decode(self, file: Arrival) -> Tensor | str:
        path = Path(file.path)
        try:
            if path.exists() and not path.is_file():
                return "is not a file"
            image = decode_image(read_file(path), self._size)
        except BadImage as error:
            return str(error)
        except MemoryError:
            return "too large for the memory that is free"
        return image if _arrival(file.path) == file else "has changed since it was listed"
