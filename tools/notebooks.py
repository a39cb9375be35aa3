"""Executes the notebooks in docs/ and stores their outputs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials" / "notebooks"


def execute(path: Path) -> nbformat.NotebookNode:
    """Executes a notebook with this Python, on the CPU; fails if a cell fails."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}, record_timing=False, coalesce_streams=True
    )
    # as ratp sets it itself, unless torch is loaded before ratp
    quiet = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000")}
    client.execute(env={**os.environ, "PATH": programs, "CUDA_VISIBLE_DEVICES": "", **quiet})
    return notebook


def main() -> None:
    """Executes every notebook, or those that are named."""
    for path in [*map(Path, sys.argv[1:])] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
