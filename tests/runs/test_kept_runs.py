"""Run directories that earlier versions left behind still load, report and go on.

``tests/fixtures/runs`` has a folder for every form a run directory has had; ``make.py`` there made them.
"""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from helpers import accuracy_of, journal_of, ratp, same_tensors
from ratp._core.environment import describe_environment
from ratp._core.files import read_tensors, write_tensors
from ratp.runs.record import read_run
from ratp.runs.stage_runner import CheckpointWarning
from ratp.runs.states import CHECKPOINT_LATEST as LATEST

KEPT = Path(__file__).parents[1] / "fixtures" / "runs"
FORMS = sorted(path.name for path in KEPT.iterdir() if path.is_dir() and path.name != "__pycache__")
BARE = ("run", KEPT / "marks.toml", "--method", "shot", "--seed", "1", "--device", "cpu", "--weights", "none")
# Defaults of SHOT when they were recorded.
THEN = {"lr": 0.01, "sgd.momentum": 0.9, "sgd.weight_decay": 0.001, "sgd.schedule": "per-step", "sgd.nesterov": True}
OPTIONS = [word for name, value in THEN.items() for word in ("--set", f"{name}={value}")]
COMMAND = (*BARE, *OPTIONS)
UNFINISHED = ("between-stages", "within-a-stage")


@pytest.fixture
def folder(tmp_path, request):
    form, name = request.param
    return shutil.copytree(KEPT / form / name, tmp_path / name)


def kept(*names):
    return pytest.mark.parametrize(
        "folder", [(form, name) for form in FORMS for name in names], ids="-".join, indirect=True
    )


def expected(folder):
    """The matrix of the finished run beside a folder of fixtures; the same bits only on the same kind of machine."""
    finished = read_run(KEPT / FORMS[0] / "finished")
    now = json.loads(json.dumps(describe_environment(torch.device("cpu"))))
    same = all(now[key] == finished.environment[key] for key in ("platform", "packages"))
    return finished.matrix, same


def test_all_formats_are_covered():
    """The other tests would pass on an empty folder."""
    assert FORMS == ["unversioned", "versioned"]


@kept("finished", *UNFINISHED)
def test_kept_run_is_reported(folder):
    result = ratp("report", folder, "--out", folder.parent / "report")
    assert result.code == 0, result
    assert "shot" in result.out
    assert (folder.parent / "report" / "index.html").is_file()


@kept("finished", "between-stages")
def test_old_defaults_can_be_requested(folder):
    """Other values are usual now: the same command is refused, with the options that make it go on."""
    result = ratp(*BARE, "--out", folder, "--quiet")
    assert result.code == 2
    assert "lr: 0.01 there, 0.05 requested" in result.err
    assert f"To continue it: {' '.join(OPTIONS)}." in result.err


@kept("finished")
def test_finished_run_is_recognised(folder):
    before = read_tensors(folder / "weights.safetensors")[0]
    result = ratp(*COMMAND, "--out", folder, "--quiet")
    assert result.code == 0, result
    assert same_tensors(before, read_tensors(folder / "weights.safetensors")[0])
    assert not journal_of(folder, "run_resumed")


@kept(*UNFINISHED)
@pytest.mark.filterwarnings("ignore:this run began in another environment")
def test_unfinished_run_resumes_to_its_result(folder):
    done, half = len(accuracy_of(folder)), (folder / LATEST).exists()
    with pytest.warns(CheckpointWarning, match=r"stage 1 \(mud\) starts again") if half else nullcontext():
        result = ratp(*COMMAND, "--out", folder, "--quiet")
    assert result.code == 0, result
    (resumed,) = journal_of(folder, "run_resumed")
    assert resumed["finished_stages"] == done
    assert not journal_of(folder, "stage_resumed")  # checkpoints of their form are not restored
    matrix, is_same_machine = expected(folder)
    found = read_run(folder).matrix
    assert found.complete
    assert found.accuracy[:done] == matrix.accuracy[:done]
    if is_same_machine:  # elsewhere, the last bits of training differ, and an image may fall to the other side
        assert found == matrix


@kept("between-stages")
@pytest.mark.parametrize("name", ["config.json", "matrix.json", "environment.json"])
def test_a_later_version_is_refused(folder, name):
    data = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**data, "schema": 99}))
    result = ratp("report", folder, "--quiet")
    assert result.code == 2
    assert f"{name} has schema 99" in result.err
    assert "Update ratp" in result.err


@pytest.mark.filterwarnings("ignore::ratp.runs.run.EnvironmentWarning")  # another Python may have kept the run
@pytest.mark.parametrize("name", ["config.json", "state.safetensors", LATEST, "journal.jsonl"])
def test_later_version_is_not_overwritten(name, tmp_path):
    folder = shutil.copytree(KEPT / FORMS[0] / "within-a-stage", tmp_path / "run")
    path = folder / name
    if name == "config.json":
        path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    elif name == "journal.jsonl":
        path.write_text(json.dumps({"event": "run_started", "schema": 99}) + "\n")
    else:
        tensors, about = read_tensors(path)
        write_tensors(path, tensors, {**about, "schema": 99})
    before = path.read_bytes()
    result = ratp(*COMMAND, "--out", folder, "--quiet")
    assert (result.code, result.out) == (2, ""), result
    assert name in result.err
    assert "schema 99" in result.err
    assert "Update ratp" in result.err
    assert "Remove the folder" not in result.err
    assert path.read_bytes() == before
