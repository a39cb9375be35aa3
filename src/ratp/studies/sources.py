"""What the plans of a study depend on: its file, the files that file names, and the code of this package."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import ratp
from ratp._core.files import open_file

_SMALL = 1 << 20  # bytes; larger files are not hashed but compared by size and time


def sources_of(path: Path, weights: str, files: Iterable[str]) -> dict[str, Any]:
    """The state of everything that a study's plans depend on."""
    found = {os.path.relpath(name, path.parent): mark for name in files if (mark := _mark(Path(name)))}
    return {
        "ratp": _package(),
        "study": _mark(path),
        "weights": [weights, os.environ.get("RATP_WEIGHTS")],
        "files": dict(sorted(found.items())),
    }


def _mark(path: Path) -> str:
    """A mark that changes with a file's content or a folder's names; empty if there is neither."""
    try:
        if path.is_dir():
            return _sha256("\n".join(sorted(item.name for item in path.iterdir())).encode(errors="surrogateescape"))
        with open_file(path) as file:
            about = os.fstat(file.fileno())
            return _sha256(file.read()) if about.st_size < _SMALL else f"{about.st_size} {about.st_mtime_ns}"
    except (OSError, ValueError):
        return ""


@cache
def _package() -> str:
    """A mark that changes with this package's version or code."""
    root = Path(ratp.__file__).parent
    files = sorted((str(file), file.stat()) for file in root.rglob("*.py"))
    marks = [f"{file} {about.st_size} {about.st_mtime_ns}" for file, about in files]
    return _sha256("\n".join([ratp.__version__, *marks]).encode(errors="surrogateescape"))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
