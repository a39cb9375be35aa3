"""What ``study.json`` keeps: enough to look at a study without planning it, until anything it depends on changes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ratp.studies.sources as sources
from helpers import unreadable
from ratp.errors import ConfigError, Note, RunDirectoryError
from ratp.runs.request import RunRequest
from ratp.studies.file import read_study
from ratp.studies.saved import open_study
from tiny_study import grid, study_file

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:tiny.toml names programs")
SWEEP = "sweep = { randmix.kernel_sizes = [[3, 5], [7]] }"
GRIDS = (
    grid('title = "RandMix"\nmethods = ["ratp"]', "seeds = [1, 2]", SWEEP),
    grid('methods = ["mine.py"]', 'variant = [{ name = "v", method = "tent" }]'),
)
METHOD = (ROOT / "examples" / "self_training.py").read_text()


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study whose folder is claimed; nothing of it is run yet."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("mine.py").write_text(METHOD)
    study = read_study(study_file(Path(), *GRIDS), Path("runs"), RunRequest(), trust_methods=True)
    study.claim()
    return study


@pytest.fixture
def never_planned(monkeypatch):
    """Planning is a failure from here on."""
    monkeypatch.setattr("ratp.studies.file.read_study", lambda *_, **__: pytest.fail("planned again"))


@pytest.mark.usefixtures("never_planned")
@pytest.mark.parametrize("by_folder", [True, False])
def test_restored_as_planned(study, by_folder):
    restored = open_study("runs") if by_folder else open_study("tiny.toml", Path("runs"))
    assert restored == study
    assert restored.results() == study.results()
    assert [entry.title for entry in restored.entries] == [entry.title for entry in study.entries]
    with pytest.raises(ValueError, match="only `read_study` plans"):
        _ = restored.entries[0].plan


@pytest.mark.usefixtures("never_planned")
def test_file_and_folder_may_move_together(study, tmp_path, monkeypatch):
    shutil.move(Path.cwd(), tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    assert len(open_study("there/runs").entries) == len(study.entries)


@pytest.mark.parametrize(
    ("change", "own"),
    [
        (lambda: Path("tiny.toml").write_text(Path("tiny.toml").read_text().replace("[1, 2]", "[1, 3]")), 1),
        (lambda: Path("mine.py").write_text(METHOD + "\n"), 0),
        (lambda: Path("runs/study.json").write_text('{"study": "tiny"}'), 0),
        (lambda: Path("runs/study.json").write_text("{"), 0),
        (lambda: Path("runs/study.json").unlink(), 0),
    ],
)
def test_changed_study_is_planned_again(study, change, own):
    """The runs of its program are those recorded, as long as it is the same program."""
    change()
    with pytest.warns(Note, match=rf"programs as methods \(mine\.py\).*: {own or 'none'} of their runs are shown"):
        found = open_study("tiny.toml", Path("runs"))
    planned = read_study("tiny.toml", Path("runs"), left_out=[])
    assert found.entries[: len(planned.entries)] == planned.entries
    assert list(found.entries[len(planned.entries) :]) == [e for e in study.entries if e.title.startswith("mine")][:own]
    assert found.entries[0].plan


def test_other_weights_and_other_code_count_as_changes(study, monkeypatch):
    assert open_study("runs").entries[0].planned is None
    assert open_study("runs", weights="none").entries[0].planned
    monkeypatch.setattr(sources, "_package", lambda: "other")
    assert open_study("runs").entries[0].planned


@pytest.mark.parametrize(
    "damage",
    [
        {"plan": 5},
        {"plan": {"runs": [{}], "settings": [], "titles": {}, "usual": []}},
        {"title": None, "plan": {"runs": 5, "settings": [], "titles": {}, "usual": []}},
        {"sources": []},
    ],
)
def test_damaged_record_is_ignored(study, damage):
    path = Path("runs/study.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    assert open_study("runs").entries[0].planned


def test_no_run_lies_outside_the_folder(study):
    path = Path("runs/study.json")
    path.write_text(path.read_text().replace(study.entries[0].name, "../../secret"))
    assert open_study("runs").entries[0].name == study.entries[0].name


def test_a_folder_without_a_study(study, tmp_path):
    with pytest.raises(RunDirectoryError, match=r"holds no study: it has no study\.json"):
        open_study(tmp_path)
    Path("tiny.toml").unlink()
    with pytest.raises(RunDirectoryError, match=r"the study file of runs is not at tiny\.toml: give the file"):
        open_study("runs")
    with pytest.raises(ConfigError, match="cannot read the study"):
        open_study("nowhere.toml")


def test_unreadable_record_is_planned_again(study, monkeypatch):
    unreadable(monkeypatch, "study.json")
    assert open_study("tiny.toml", Path("runs")).entries[0].planned


@pytest.mark.usefixtures("study")
def test_status_runs_no_study_code_and_imports_no_torch():
    script = (
        "import sys\nfrom ratp.studies.saved import open_study\n"
        "study = open_study('runs')\nprint(len(study.states()), len(study.results().runs))\n"
        "print([name for name in ('torch', 'ratp.studies.file', 'ratp.runs.plan') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "8 8\n[]\n"
