"""Study files of runs that take a moment each."""

from __future__ import annotations

from pathlib import Path

from helpers import TINY

SIZES = "set = { " + ", ".join(f'"{name}" = {value}' for name, value in TINY.items()) + " }"


def grid(*lines: str, stream: str = "demo") -> str:
    """A grid of tiny runs."""
    return "\n".join(["[[grid]]", f'stream = "{stream}"', SIZES, *lines, ""])


def study_file(folder: Path, *grids: str, name: str = "tiny.toml", title: str = "Tiny runs") -> Path:
    """Writes a study file."""
    path = folder / name
    path.write_text("\n".join([f'title = "{title}"', *grids]), encoding="utf-8")
    return path


def traces(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file under a folder: whether it was replaced, when it was written, and what is in it."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
