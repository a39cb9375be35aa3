"""Locks on files: one writer per run directory, one writer per cache entry.

The operating system releases a lock when its process ends for any reason, so no lock is ever stale.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ratp.errors import RunDirectoryError

LOCK_FILE = ".lock"
_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB


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
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock = HeldLock(path, handle, _flock(handle, how))
            if not lock.keeps_out or _is_at(path, handle):
                return lock
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last holder removed it, and another may hold a new one


def _flock(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        raise
    except OSError:  # the file system has no locks
        return False
    return True


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
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


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Holds ``folder`` for this process while the block runs; its lock file names the process.

    Raises:
        InUseError: If another process, or another thread of this one, holds the folder.
    """
    path = folder / LOCK_FILE
    try:
        lock = _hold_soon(path)
    except BlockingIOError as error:
        process, details = _holder(path)
        message = f"{folder} is in use by {process}{details}. Wait for it to end, or choose another folder with --out."
        raise InUseError(message, process) from error
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write to {folder}: {error.strerror}. Choose another folder with --out."
        ) from error
    try:
        if not lock.keeps_out:
            raise RunDirectoryError(f"cannot lock {path}. Choose a folder on another file system with --out.")
        holder = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # on a full disk, the folder is locked anyway
            os.ftruncate(lock.handle, 0)
            os.pwrite(lock.handle, json.dumps(holder).encode(), 0)
        try:
            yield
        finally:
            with suppress(OSError):
                os.ftruncate(lock.handle, 0)
    finally:
        os.close(lock.handle)


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
        data = json.loads(path.read_bytes())
        return f"process {data['pid']}", f" on {data['host']} since {data['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process", ""


def is_held(folder: Path) -> bool:
    """Whether some process holds ``folder`` now."""
    return is_locked(folder / LOCK_FILE)


def is_locked(path: Path) -> bool:
    """Whether some process has locked a file; permission to read it is enough to ask."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False
