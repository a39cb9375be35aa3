"""Locks on files: one writer per run directory, one writer per cache entry.

The operating system releases a lock when its process ends for any reason, so no lock is ever stale. A lock goes with
its file, wherever that is moved, but writes go by path: :func:`check_claim` tells whether both are still one folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ratp.errors import RunDirectoryError

LOCK_FILE = ".lock"
_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB
# What a lock file of a folder says while it is held begins so, and is shorter than this.
_BEGINNING, _MOST = b'{"pid": ', 4096
# The folders that this process holds, with the lock file of each.
_CLAIMS: dict[Path, os.stat_result] = {}


@dataclass(frozen=True)
class HeldLock:
    """A held lock whose file exists only while it is held; as a context, for the block.

    ``keeps_out`` is False on a file system without locks.
    """

    path: Path
    handle: int
    keeps_out: bool

    def release(self) -> None:
        """Removes the file and releases the lock, even if removing the file raises OSError."""
        try:
            self.path.unlink(missing_ok=True)
        finally:
            os.close(self.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(path: Path, how: int = fcntl.LOCK_EX) -> HeldLock:
    """Locks a file, creating it if needed, and waits while another process holds it.

    Raises:
        BlockingIOError: If ``how`` forbids waiting and another holds it.
        OSError: If the file cannot be written.
    """
    while True:
        handle = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            lock = HeldLock(path, handle, _flock(handle, how))
            if not lock.keeps_out or _is_at(path, os.fstat(handle)):
                return lock
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last holder removed it, and another may hold a new one


def _open(path: Path, flags: int) -> int:
    """Opens a lock file; refuses what leads to something that may not be ratp's, and waits for nothing."""
    wrong = OSError(errno.EINVAL, f"its {path.name} is a link, a pipe or a device, so remove that")
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise (wrong if error.errno == errno.ELOOP else error) from None
    about = os.fstat(handle)
    if stat.S_ISREG(about.st_mode) and about.st_nlink <= 1:
        return handle
    os.close(handle)
    raise wrong


def _flock(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        raise
    except OSError:  # the file system has no locks
        return False
    return True


def _is_at(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(file, path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def try_acquire(path: Path) -> HeldLock | None:
    """Locks a file, creating it if needed; None if another process holds it."""
    try:
        return acquire(path, _NOW)
    except BlockingIOError:
        return None


class InUseError(RunDirectoryError):
    """Another process holds a directory; ``process`` names it."""

    def __init__(self, message: str, process: str) -> None:
        super().__init__(message)
        self.process = process


class ReplacedError(RunDirectoryError):
    """A folder that this process held is gone, or is now another one."""


def check_claim(path: Path) -> None:
    """Raises ReplacedError if ``path`` is, or is in, a folder that this process held and that is no longer there."""
    for folder in (path, path.parent):
        lock = _CLAIMS.get(folder)
        if lock is not None and not _is_at(folder / LOCK_FILE, lock):
            raise ReplacedError(
                f"{folder} was removed or replaced while this run worked there, so it has stopped. Repeat the "
                "command; if another run is in that folder now, choose another with --out."
            )


@contextmanager
def exclusive(folder: Path, advice: str = "Wait for it to end, or choose another folder with --out.") -> Iterator[None]:
    """Holds ``folder`` for this process while the block runs; its lock file names the process.

    Raises:
        InUseError: If another process, or another thread of this one, holds the folder.
    """
    path = folder / LOCK_FILE
    try:
        if folder in _CLAIMS:
            raise BlockingIOError
        lock = _hold_soon(path)
    except BlockingIOError as error:
        process, details = _holder(path)
        message = f"{folder} is in use by {process}{details}. {advice}"
        raise InUseError(message, process) from error
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write to {folder}: {error.strerror}. Choose another folder with --out."
        ) from error
    try:
        if not lock.keeps_out:
            raise RunDirectoryError(f"cannot lock {path}. Choose a folder on another file system with --out.")
        holder = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        _write(lock.handle, json.dumps(holder).encode())
        try:
            _CLAIMS[folder] = os.fstat(lock.handle)
            yield
        finally:
            _CLAIMS.pop(folder, None)
            _write(lock.handle, b"")
    finally:
        os.close(lock.handle)


def _write(handle: int, text: bytes) -> None:
    """Replaces what a lock file says, unless ratp did not write it; if it cannot be written, the lock holds anyway."""
    with suppress(OSError):
        size = os.fstat(handle).st_size
        if size == 0 or (size < _MOST and os.pread(handle, len(_BEGINNING), 0) == _BEGINNING):
            os.ftruncate(handle, 0)
            os.pwrite(handle, text, 0)


def _hold_soon(path: Path) -> HeldLock:
    """Tries a few times: :func:`is_locked` holds a lock for an instant."""
    for _ in range(9):
        with suppress(BlockingIOError):
            return acquire(path, _NOW)
        time.sleep(0.01)
    return acquire(path, _NOW)


def _holder(path: Path) -> tuple[str, str]:
    """Reads which process holds a lock, on which machine and since when."""
    try:
        with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
            data = json.loads(file.read(_MOST))
        return f"process {data['pid']}", f" on {data['host']} since {data['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process", ""


def is_held(folder: Path) -> bool:
    """Whether some process holds ``folder`` now."""
    return is_locked(folder / LOCK_FILE)


def is_locked(path: Path) -> bool:
    """Whether some process has locked a file; permission to read it is enough to ask."""
    try:
        with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False
