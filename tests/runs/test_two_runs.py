"""Two runs in one folder, which was removed while the first one worked there."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from helpers import files_of, toy_domains, toy_plan
from ratp._core.files import write_bytes
from ratp._core.locks import LOCK_FILE, ReplacedError, exclusive
from ratp.errors import RunDirectoryError
from ratp.runs.directory import PredictionsWarning
from ratp.runs.events import StageStarted
from ratp.runs.record import read_run
from ratp.runs.run import JournalWarning, Run

NAMED = ("matrix.json", "journal.jsonl", "weights.safetensors")


def plan(seed=1):
    source, *others, last = toy_domains()
    return toy_plan("source-only", [source, *others, last.unlabelled()], seed=seed)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two runs that differ in their seed."""
    folder = tmp_path_factory.mktemp("finished")
    for seed in (1, 2):
        Run(plan(seed), folder / str(seed)).execute()
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the first."""
    return shutil.copytree(finished / "1", tmp_path / "run")


@pytest.mark.faults(21, "the first run notices this before it writes, stops, and changes no file of the second")
@pytest.mark.parametrize("stage", [1, 2])
def test_run_whose_folder_another_took_over_stops(stage, tmp_path):
    folder = tmp_path / "run"
    events = Run(plan(1), folder).events()
    while not (isinstance(event := next(events), StageStarted) and event.stage == stage):
        pass
    shutil.rmtree(folder)
    (tmp_path / "same").symlink_to(tmp_path)  # as another process would, it knows nothing of the first
    Run(plan(2), tmp_path / "same" / "run").execute()
    before = files_of(folder)
    with pytest.raises(ReplacedError, match=r"run was removed or replaced.*has stopped\. Repeat .* --out"):
        list(events)
    assert files_of(folder) == before
    assert read_run(folder).seed == 2


@pytest.mark.faults(21, "a run whose folder is removed stops and does not create it again")
def test_run_whose_folder_is_gone_stops(tmp_path):
    folder = tmp_path / "run"
    events = Run(plan(), folder).events()
    next(events)
    shutil.rmtree(folder)
    with pytest.raises(ReplacedError, match="was removed or replaced"):
        list(events)
    assert not folder.exists()
    Run(plan(), folder).execute()


@pytest.mark.parametrize("late", [False, True], ids=["before the write", "during the write"])
def test_write_into_a_replaced_folder(late, tmp_path, monkeypatch):
    folder, file = tmp_path / "run", tmp_path / "run" / "file"
    folder.mkdir()

    def replace_folder(*_):
        folder.rename(tmp_path / "old")
        folder.mkdir()
        (folder / LOCK_FILE).touch()

    with exclusive(folder):
        write_bytes(file, b"1")
        if late:
            monkeypatch.setattr(os, "fsync", replace_folder)
        else:
            replace_folder()
        with pytest.raises(ReplacedError):
            write_bytes(file, b"2")
    assert {item.name for item in folder.iterdir()} == {LOCK_FILE}
    assert (tmp_path / "old" / "file").read_bytes() == b"1"


def test_folder_whose_lock_is_lost_is_still_in_use_by_this_process(tmp_path):
    with exclusive(tmp_path):
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(RunDirectoryError, match="in use by"), exclusive(tmp_path):
            pass
    with exclusive(tmp_path):
        pass


@pytest.mark.faults(21, "ratp refuses to read the files of two runs as one")
@pytest.mark.parametrize("name", NAMED)
def test_files_of_two_runs_are_not_read_as_one(name, finished, run):
    shutil.copy(finished / "2" / name, run / name)
    with pytest.raises(RunDirectoryError, match=rf"{name} belongs to another run than config\.json: two runs"):
        read_run(run)


@pytest.mark.faults(21, "the same command replaces the files of the other run by its own")
def test_same_command_replaces_files_of_another_run(finished, run):
    for name in (*NAMED, "predictions-fog.csv"):
        shutil.copy(finished / "2" / name, run / name)
    with pytest.warns(JournalWarning, match="belongs to another run"):
        Run(plan(1), run).execute()
    for name in (*NAMED[::2], "predictions-fog.csv"):
        assert (run / name).read_bytes() == (finished / "1" / name).read_bytes()
    assert read_run(run).seed == 1


def test_files_of_earlier_versions_name_no_run(run):
    (run / "weights.safetensors").unlink()
    matrix = json.loads((run / "matrix.json").read_text())
    del matrix["fingerprint"]
    (run / "matrix.json").write_text(json.dumps(matrix))
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key != "fingerprint"} for line in lines]
    (run / "journal.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in kept if line["event"] != "predicted")
    )
    (run / "predictions-fog.csv").write_text("edited")
    before = read_run(run)
    assert Run(plan(1), run).execute().matrix == before.matrix
    assert (run / "predictions-fog.csv").read_text() == "edited"


@pytest.mark.faults(33, "the same command says how to get the predictions back, and never overwrites the file")
@pytest.mark.parametrize(
    "damage", [lambda table: "", lambda table: table[:-9], lambda table: table.replace("0.", "1.")]
)
def test_changed_predictions_are_reported(damage, run, finished):
    path = run / "predictions-fog.csv"
    path.write_text(damage(path.read_text()))
    before = path.read_bytes()
    with pytest.warns(PredictionsWarning, match=r"fog\.csv has changed since this run wrote it\. .*move it away"):
        Run(plan(1), run).execute()
    assert path.read_bytes() == before
    path.unlink()
    for _ in range(2):
        Run(plan(1), run).execute()  # without a warning
        assert path.read_bytes() == (finished / "1" / path.name).read_bytes()
