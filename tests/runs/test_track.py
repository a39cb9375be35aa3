"""What a run logs to a tracker; its result stays the same, whatever the tracker does."""

from __future__ import annotations

import importlib.util
import sqlite3
import sys

import pytest

from helpers import accuracy_of, ratp, same_tensors, tensors_of, toy_plan
from own_images import assert_error, assert_ok, image_files, run_folders, write_files
from ratp.errors import ConfigError
from ratp.runs import track as tracking
from ratp.runs.events import StageFinished
from ratp.runs.run import Run
from ratp.runs.track import TrackerWarning, track

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def logged(folder):
    """Numbers by name, each as (step, value), and texts, from the only run in TensorBoard's folder."""
    (place,) = folder.iterdir()
    found = event_accumulator.EventAccumulator(str(place), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    numbers = {name: [(item.step, item.value) for item in found.Scalars(name)] for name in found.Tags()["scalars"]}
    texts = {name: found.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in found.Tags()["tensors"]}
    return numbers, texts


def run_to_the_end(run, *trackers):
    for _ in track(run, *trackers):
        pass


@pytest.fixture(scope="module")
def untracked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untracked") / "run"
    Run(toy_plan(), folder).execute()
    return folder


class TestTensorBoard:
    def test_losses_accuracies_metrics_verdicts_and_switches(self, tmp_path, untracked):
        run_to_the_end(Run(toy_plan(), tmp_path / "run"), f"tensorboard:{tmp_path / 'logs'}")
        numbers, texts = logged(tmp_path / "logs")
        assert [step for step, _ in numbers["1-ink/source/total"]] == [1, 2]
        assert [step for step, _ in numbers["3-fog/target/total"]] == [1, 2]
        rows = accuracy_of(tmp_path / "run")
        assert numbers["accuracy/mud"] == [(stage, pytest.approx(row[1])) for stage, row in enumerate(rows)]
        assert len(numbers["metrics/TDA"]) == 3
        assert [step for step, _ in numbers["guard/rolled_back"]] == [1, 2]
        assert texts["2-mud/guard/text_summary"]
        assert '"memory": 24' in texts["config/text_summary"]
        assert same_tensors(tensors_of(tmp_path / "run"), tensors_of(untracked))

    def test_a_resumed_run_continues_in_the_same_place(self, tmp_path):
        where = f"tensorboard:{tmp_path / 'logs'}"
        events = track(Run(toy_plan(), tmp_path / "run"), where)
        while not isinstance(next(events), StageFinished):
            pass
        events.close()
        run_to_the_end(Run(toy_plan(), tmp_path / "run"), where)
        numbers, _ = logged(tmp_path / "logs")
        assert [step for step, _ in numbers["accuracy/ink"]] == [0, 1, 2]

    def test_a_finished_run_logs_nothing(self, tmp_path, untracked):
        run_to_the_end(Run(toy_plan(), untracked), f"tensorboard:{tmp_path / 'logs'}")
        assert not (tmp_path / "logs").exists()


class Failing(tracking.Tracker):
    """Fails at the first call of one kind."""

    package = "json"
    fails = "log"

    def __init__(self, run, folder):
        self._fail("start")

    def log(self, values, step):
        self._fail("log")

    def note(self, name, text):
        self._fail("note")

    def close(self, *, finished):
        self._fail("close")

    def _fail(self, when):
        if self.fails == when:
            raise OSError("the network is down")


@pytest.mark.parametrize("when", ["start", "log", "note", "close"])
def test_a_tracker_that_fails_is_left_out(tmp_path, monkeypatch, untracked, when):
    monkeypatch.setattr(Failing, "fails", when)
    monkeypatch.setitem(tracking.TRACKERS, "mlflow", Failing)
    with pytest.warns(TrackerWarning, match="--track mlflow failed; .* the network is down") as notes:
        run_to_the_end(Run(toy_plan(), tmp_path / "run"), "mlflow", f"tensorboard:{tmp_path / 'logs'}")
    assert len(notes) == 1
    assert same_tensors(tensors_of(tmp_path / "run"), tensors_of(untracked))
    assert len(logged(tmp_path / "logs")[0]["accuracy/fog"]) == 3


class TestCommandLine:
    @pytest.mark.usefixtures("_no_processes")
    def test_several_runs_at_once(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        day, rain = (write_files(tmp_path / name, image_files(seed=k)) for k, name in enumerate(("day", "rain")))
        result = run_folders(day, rain, out="runs", more=("--seed", 1, "--seed", 2, "--track", "tensorboard"))
        assert_ok(result)
        assert "Tracked: tensorboard --logdir tensorboard" in result.err
        assert len(list((tmp_path / "tensorboard").iterdir())) == 2

    def test_a_missing_package_stops_it_before_anything_is_written(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        usual = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else usual(name))
        result = ratp("run", "demo", "--track", "mlflow", "--track", "tensorbord", "--track", "trackio:x")
        message = assert_error(result, "not installed: pip install mlflow", "Did you mean 'tensorboard'?")
        assert "$TRACKIO_DIR" in message
        assert not list(tmp_path.iterdir())

    def test_the_same_in_python(self, tmp_path):
        with pytest.raises(ConfigError, match="unknown tracker 'nonsense'"):
            next(track(Run(toy_plan(), tmp_path / "run"), "nonsense"))


def test_nothing_is_imported_without_being_asked_for(untracked):
    assert not {"mlflow", "wandb", "trackio"} & sys.modules.keys()


@pytest.mark.slow
class TestOthers:
    """The real packages, offline; skipped where they are not installed."""

    def test_mlflow(self, tmp_path):
        pytest.importorskip("mlflow")
        for _ in range(2):  # the second continues a run that was stopped
            events = track(Run(toy_plan(), tmp_path / "run"), f"mlflow:{tmp_path}")
            while not isinstance(next(events), StageFinished):
                pass
            events.close()
        run_to_the_end(Run(toy_plan(), tmp_path / "run"), f"mlflow:{tmp_path}")
        with sqlite3.connect(tmp_path / "mlflow.db") as database:
            assert database.execute("select status from runs").fetchall() == [("FINISHED",)]
            found = database.execute("select step from metrics where key = 'accuracy/fog' order by step").fetchall()
        assert found == [(0,), (1,), (2,)]

    def test_wandb(self, tmp_path, monkeypatch):
        pytest.importorskip("wandb")
        monkeypatch.delenv("WANDB_MODE", raising=False)
        run_to_the_end(Run(toy_plan(), tmp_path / "run"), f"wandb:{tmp_path}")
        assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))

    def test_trackio(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
        trackio = pytest.importorskip("trackio")
        plan = toy_plan(seed=77)
        run_to_the_end(Run(plan, tmp_path / "trackio-test"), "trackio")
        (name,) = [run.name for run in trackio.Api().runs("ratp") if run.name.startswith("trackio-test")]
        assert name
