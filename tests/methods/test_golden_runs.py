"""Every method, trained on three toy domains, reports the losses and accuracies it always did.

Rounded, so that any processor gives them; ``tools/golden.py`` compares bits. After a change that is meant to change
numbers: ``python tests/methods/test_golden_runs.py`` writes the file anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from helpers import QUICK, accuracy_of, journal_of, toy_plan
from ratp.methods import METHODS
from ratp.runs.run import Run

FILE = Path(__file__).with_name("golden_runs.json")
SIZES = {
    "epochs": 2,
    "steps": 6,
    "batch": 16,
    "lr": 0.02,
    "network.width": 0.1,
    "network.hidden": 32,
    "network.dim": 16,
}
OF_METHOD = {"ratp": {"r_con": 0.3}, "arc": {"r_con": 0.3}}  # a confidence that some images reach
OF_METHOD |= {"sar": {"margin": 1.0}, "deyo": {"margin": 1.0, "plpd": 0.0}}  # and an uncertainty


def run(method, folder):
    """The means of every epoch, to four digits, and the accuracy matrix, to one."""
    plan = toy_plan(method, changes={**SIZES, **QUICK.get(method, {}), **OF_METHOD.get(method, {})})
    Run(plan, folder, reuse_source=False).execute()
    epochs = [
        [f"{e['stage']} {e['phase']}", {name: float(f"{mean:.4g}") for name, mean in e["means"].items()}]
        for e in journal_of(folder, "epoch")
    ]
    return {"epochs": epochs, "accuracy": [[round(value, 1) for value in row] for row in accuracy_of(folder)]}


def test_every_method_has_a_golden_run():
    assert json.loads(FILE.read_text()).keys() == METHODS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_matches_the_golden_run(method, tmp_path):
    golden, found = json.loads(FILE.read_text())[method], run(method, tmp_path / "run")
    assert len(found["epochs"]) == len(golden["epochs"])
    for (where, means), (place, expected) in zip(found["epochs"], golden["epochs"], strict=True):
        assert where == place
        assert means == pytest.approx(expected, rel=0.05, abs=0.02), where
    # A few images near the boundary may fall on the other side elsewhere.
    torch.testing.assert_close(torch.tensor(found["accuracy"]), torch.tensor(golden["accuracy"]), rtol=0, atol=10)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with tempfile.TemporaryDirectory() as folder:
        runs = {method: run(method, Path(folder) / method) for method in METHODS}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in runs.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")
