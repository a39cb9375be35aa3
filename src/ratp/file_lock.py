"""A lock on a file that lies there only while somebody holds it.

The lock is the operating system's, and who lets go of it removes the file. Whoever has waited for it therefore looks
whether the file they locked still has its name: if not, another may hold a new one by now, and they try again.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class FileLock:
    """A lock that is held; as a context, within its block.

    Attributes:
        path: The file.
        handle: The file, open and locked.
        keeps_out: Whether others are kept out; False on a file system without locks.
    """

    path: Path
    handle: int
    keeps_out: bool

    def release(self) -> None:
        """Lets others go on, and removes the file: who waits for it has it open, and then finds it gone.

        Raises:
            OSError: If the file cannot be removed; others go on all the same.
        """
        try:
            self.path.unlink(missing_ok=True)
        finally:
            os.close(self.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold(path: Path) -> FileLock:
    """Locks a file, made if need be; waits for who holds it.

    Raises:
        OSError: If it cannot be written.
    """
    while (lock := _locked(path, fcntl.LOCK_EX)) is None:
        pass
    return lock


def hold_if_free(path: Path) -> FileLock | None:
    """Locks a file, made if need be; None: another holds it.

    Raises:
        OSError: If it cannot be written.
    """
    try:
        while (lock := _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
            pass
    except BlockingIOError:
        return None
    return lock


def _locked(path: Path, how: int) -> FileLock | None:
    """The lock on a file; None: who held it has removed it meanwhile.

    Raises:
        BlockingIOError: If another holds it, and there is to be no waiting.
        OSError: If it cannot be written.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock = FileLock(path, handle, _keeps_out(handle, how))
        if not lock.keeps_out or _is_there(handle, path):
            return lock
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _keeps_out(handle: int, how: int) -> bool:
    """Locks an open file; False: its file system has no locks."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _is_there(handle: int, path: Path) -> bool:
    """Whether an open file is the one of this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
