"""The notebooks in docs/ run, and what is stored of them is complete and small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials" / "notebooks"
NAMES = ["ratp-step-by-step", "own-folders", "new-method"]
LARGEST = 300_000  # bytes


def path_of(name):
    return FOLDER / f"{name}.ipynb"


def test_these_are_all():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stored_and_small(name):
    path = path_of(name)
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any(kind.startswith("image/") for output in outputs for kind in output.get("data", {}))
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert path.stat().st_size < LARGEST


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook's kernel and its client
@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name):
    pytest.importorskip("nbclient", reason="in requirements.txt, but not installed here")
    from notebooks import execute

    assert execute(path_of(name)).cells
