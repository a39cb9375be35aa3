"""A file that a command is asked to write: refused before the work begins if it cannot be, and written with care.

Only a file is replaced, in one step. Links are followed, pipes and devices are written to, and stay what they are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ratp.data.listing import escaped
from ratp.errors import RatpError
from ratp.files import write_text, writing
from ratp.notes import harmless

_STDOUT = 1


def check_out(path: Path, printed: str = "") -> None:
    """Refuses a path that cannot be written.

    Args:
        path: Where to write.
        printed: What goes to standard output, if anything does: the two would be mixed up there.

    Raises:
        RatpError: With the reason.
    """
    mixed = f"{printed} goes to standard output" if printed else None
    reason = mixed if _is_stdout(path) else _hindrance(path)
    if reason:
        raise RatpError(f"cannot write {path}: {reason}. Choose another file with --out.")


def write_out(path: Path, text: str) -> None:
    """Writes a text to where a path leads; ``-`` is standard output.

    Raises:
        RunDirectoryError: If that fails, with the reason.
    """
    if _is_stdout(path):
        print_text(text)
    elif _is_replaced(path):
        write_text(path, text)
    else:
        with writing(path), path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)


def print_text(text: str) -> None:
    """Writes a text to standard output: what that has no letters for as escapes, and no orders to a terminal."""
    shown = escaped(text, sys.stdout.encoding or "utf-8")
    print(harmless(shown) if sys.stdout.isatty() else shown, end="")


def _is_stdout(path: Path) -> bool:
    """Whether a path leads to where standard output goes, whatever that is: opened anew it would be cut off."""
    try:
        return str(path) == "-" or os.path.samestat(path.stat(), os.fstat(_STDOUT))
    except OSError:
        return False


def _is_replaced(path: Path) -> bool:
    """Whether a path is that of a file or of nothing, and no link."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _hindrance(path: Path) -> str | None:
    """Why a path cannot be written; None if nothing is known to hinder it."""
    try:
        if path.is_dir():
            return "it is a folder"
        if path.exists() and not os.access(path, os.W_OK):
            return "you may not write to it"
        if path.exists() and not _is_replaced(path):
            return None
    except OSError as error:
        return error.strerror or str(error)
    folder = Path(os.path.realpath(path) if path.is_symlink() else path).parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"you may not write to the folder {folder}"
