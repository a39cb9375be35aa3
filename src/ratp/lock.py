"""One writer a run directory."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ratp.errors import RunDirectoryError

LOCK_FILE = ".lock"


class InUseError(RunDirectoryError):
    """Another process has a directory.

    Attributes:
        process: Which one, in words.
    """

    def __init__(self, message: str, process: str) -> None:
        super().__init__(message)
        self.process = process


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Holds ``folder`` for this process while the block runs.

    The lock is the operating system's: it ends with the process that holds it, however that ends, so none
    is ever left behind.

    Raises:
        InUseError: If another process holds the folder.
        RunDirectoryError: If it cannot be written.
    """
    path = folder / LOCK_FILE
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write to {folder}: {error.strerror}. Choose another folder with --out."
        ) from error
    try:
        try:
            _take(handle)
        except BlockingIOError as error:
            process, details = _holder(path)
            told = f"{folder} is in use by {process}{details}. Wait for it to end, or choose another folder with --out."
            raise InUseError(told, process) from error
        except OSError as error:
            raise RunDirectoryError(
                f"cannot lock {path}: {error.strerror}. Choose a folder on another file system with --out."
            ) from error
        holder = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # a full disk: it is held all the same
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(holder).encode(), 0)
        try:
            yield
        finally:
            with suppress(OSError):
                os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def is_held(folder: Path) -> bool:
    """Whether some process holds ``folder`` now."""
    return is_locked(folder / LOCK_FILE)


def is_locked(path: Path) -> bool:
    """Whether some process has locked a file. Who may only read it can ask, too."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def _take(handle: int) -> None:
    """Locks an open file. Tries it a few times: who only asks, by :func:`is_locked`, has the lock for an instant."""
    for _ in range(9):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(path: Path) -> tuple[str, str]:
    """Which process holds a lock, and what else is known of it."""
    try:
        data = json.loads(path.read_bytes())
        return f"process {data['pid']}", f" on {data['host']} since {data['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process", ""
