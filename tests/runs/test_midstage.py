"""A run stopped in the middle of a stage goes on with the next step, and ends as if nothing had been."""

from __future__ import annotations

import json
import shutil
from unittest.mock import Mock

import pytest
import torch

import ratp.runs.states as midstage
from helpers import QUICK, each_method, journal_of, same_tensors, slow, tensors_of, toy_plan
from ratp._core.files import read_tensors, write_tensors
from ratp.runs.events import StageStarted, Trained
from ratp.runs.run import Run
from ratp.runs.stage_runner import CheckpointWarning
from ratp.runs.states import CHECKPOINT_BEFORE as BEFORE
from ratp.runs.states import CHECKPOINT_LATEST as LATEST

SIZES = {"epochs": 2, "steps": 3}


def make_plan(method="ratp", **changes):
    return toy_plan(method, changes={**SIZES, **QUICK.get(method, {}), **changes})


def cut(run, after):
    """Stops a run after so many ticks."""
    events, seen = run.events(), 0
    for event in events:
        seen += isinstance(event, Trained)
        if seen == after:
            break
    events.close()


def go_on(run):
    """Runs the rest; returns how many steps of the first stage had already run."""
    started = [event for event in run.events() if isinstance(event, StageStarted)]
    return started[0].done


def assert_same(folder, other):
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(folder, name), tensors_of(other, name))
    assert (folder / "matrix.json").read_bytes() == (other / "matrix.json").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Undisturbed runs and their numbers of ticks, run on first use."""
    cached_runs = {}

    def get(method):
        if method not in cached_runs:
            folder = tmp_path_factory.mktemp("whole") / "run"
            cached_runs[method] = folder, sum(isinstance(e, Trained) for e in Run(make_plan(method), folder).events())
        return cached_runs[method]

    return get


@pytest.mark.parametrize("where", [slow("early"), "middle", "late"])
@pytest.mark.parametrize("method", each_method())
def test_every_method_resumes_at_the_next_step(method, where, whole, tmp_path):
    undisturbed, ticks = whole(method)
    after = {"early": 2, "middle": ticks // 2, "late": ticks - 1}[where]
    cut(Run(make_plan(method), tmp_path / "run"), after)
    assert go_on(Run(make_plan(method), tmp_path / "run")) > 0
    assert_same(undisturbed, tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoint*"))


def test_ratp_can_be_stopped_repeatedly(whole, tmp_path):
    undisturbed, ticks = whole("ratp")
    for _ in range(ticks - 1):
        cut(Run(make_plan(), tmp_path / "run"), 1)
    go_on(Run(make_plan(), tmp_path / "run"))
    assert_same(undisturbed, tmp_path / "run")


def test_journal_differs_only_by_the_interruption(whole, tmp_path):
    undisturbed, _ = whole("ratp")
    cut(Run(make_plan(), tmp_path / "run"), 10)
    go_on(Run(make_plan(), tmp_path / "run"))

    def comparable_events(folder):
        events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
        kept = [e for e in events if e["event"] not in ("run_resumed", "stage_resumed")]
        return [{key: value for key, value in e.items() if key not in ("time", "seconds")} for e in kept]

    assert comparable_events(tmp_path / "run") == comparable_events(undisturbed)
    (event,) = journal_of(tmp_path / "run", "stage_resumed")
    assert (event["stage"], event["done"]) == (1, 4)


@pytest.mark.slow
def test_probes_equal_those_of_an_undisturbed_run(tmp_path):
    Run(make_plan(), tmp_path / "whole", probe=True).execute()
    total = sum(1 for _ in Run(make_plan(), tmp_path / "again", probe=True).events())
    for after in range(3, total, 4):
        folder = tmp_path / str(after)
        events = Run(make_plan(), folder, probe=True).events()
        for _ in range(after):
            next(events)
        events.close()
        Run(make_plan(), folder, probe=True).execute()
        probes = [
            [(e["stage"], e["progress"], e["accuracy"]) for e in journal_of(place, "probe")]
            for place in (tmp_path / "whole", folder)
        ]
        assert probes[0] == probes[1]
        assert_same(tmp_path / "whole", folder)


class TestFiles:
    @pytest.fixture
    def stopped(self, tmp_path):
        """A run stopped after two checkpoints in its second stage."""
        cut(Run(make_plan(), tmp_path / "run"), 8)
        cut(Run(make_plan(), tmp_path / "run"), 2)
        assert (tmp_path / "run" / LATEST).exists() and (tmp_path / "run" / BEFORE).exists()
        return tmp_path / "run"

    @pytest.mark.parametrize("damage", ["cut", "bit", "html", "gone", "text"])
    @pytest.mark.faults(2, "the run ignores a damaged checkpoint and uses the previous one")
    def test_damaged_checkpoint_falls_back_to_previous(self, damage, stopped, whole):
        path = stopped / LATEST
        content = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
        else:
            if damage == "cut":
                content = content[: len(content) // 2]
            elif damage == "bit":
                content[-3] ^= 1
            elif damage == "html":
                content = bytearray(b"<html>")
            else:
                content = content.replace(b"optimiser", b"optimisfr", 1)
            path.write_bytes(content)
        assert go_on(Run(make_plan(), stopped)) == 2
        assert_same(whole("ratp")[0], stopped)

    def test_stage_restarts_when_both_are_damaged(self, stopped, whole):
        for name in (LATEST, BEFORE):
            (stopped / name).write_bytes(b"nothing")
        assert go_on(Run(make_plan(), stopped)) == 0
        assert_same(whole("ratp")[0], stopped)

    def test_mismatched_checkpoint_is_ignored_completely(self, stopped, whole):
        """Its hash is right, so it was written by somebody who can compute one."""
        for name in (LATEST, BEFORE):
            tensors, about = read_tensors(stopped / name)
            state = json.loads(about["state"])
            state[0]["phases"][0]["nonsense"] = {"object": "os"}
            write_tensors(stopped / name, tensors, about | {"state": json.dumps(state)})
            if name == LATEST:
                copy = shutil.copytree(stopped, stopped.parent / "copy")
        with pytest.warns(CheckpointWarning, match=r"stage 1 \(mud\) starts again: its checkpoint .*nonsense"):
            assert go_on(Run(make_plan(), stopped)) == 0
        assert go_on(Run(make_plan(), copy)) == 2
        for folder in (stopped, copy):
            assert_same(whole("ratp")[0], folder)

    def test_checkpoint_of_earlier_version_is_not_restored(self, stopped, whole):
        for name in (LATEST, BEFORE):
            tensors, about = read_tensors(stopped / name)
            write_tensors(stopped / name, tensors, about | {"schema": 2})
        with pytest.warns(CheckpointWarning) as caught:
            assert go_on(Run(make_plan(), stopped)) == 0
        (text,) = {str(warning.message) for warning in caught if warning.category is CheckpointWarning}
        assert text == "stage 1 (mud) starts again: its checkpoint does not fit (an earlier version of ratp wrote it)"
        assert_same(whole("ratp")[0], stopped)

    def test_gpu_checkpoint_is_skipped_without_gpu(self, stopped, whole, monkeypatch):
        """A PyTorch without CUDA raises an error of its own wherever it is asked about GPUs."""
        for name in (LATEST, BEFORE):
            tensors, about = read_tensors(stopped / name)
            for key in [key for key in tensors if "generators" in key]:
                tensors[key] = torch.zeros(16, dtype=torch.uint8)
            about["state"] = about["state"].replace('"on": "cpu"', '"on": "cuda"')
            write_tensors(stopped / name, tensors, about)
        monkeypatch.setattr(torch.cuda, "current_device", Mock(side_effect=AssertionError("not compiled with CUDA")))
        with pytest.warns(CheckpointWarning, match=r"stage 1 \(mud\) starts again"):
            assert go_on(Run(make_plan(), stopped)) == 0
        assert_same(whole("ratp")[0], stopped)

    @pytest.mark.parametrize("what", ["fingerprint", "stage"])
    def test_checkpoint_of_other_run_or_stage_is_ignored(self, what, stopped, whole):
        for name in (LATEST, BEFORE):
            tensors, about = read_tensors(stopped / name)
            about[what] = "x" if what == "fingerprint" else about[what] + 1
            write_tensors(stopped / name, tensors, about)
        assert go_on(Run(make_plan(), stopped)) == 0
        assert_same(whole("ratp")[0], stopped)

    def test_killed_between_rename_and_write(self, stopped, whole):
        (stopped / LATEST).replace(stopped / BEFORE)
        assert go_on(Run(make_plan(), stopped)) > 0
        assert_same(whole("ratp")[0], stopped)


class TestWhen:
    def test_saved_by_elapsed_time(self, tmp_path, monkeypatch):
        now, saved = [0.0], []
        monkeypatch.setattr(midstage.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(midstage.Checkpoints, "save", _counted(midstage.Checkpoints.save, saved))
        for event in Run(make_plan(epochs=1, steps=10), tmp_path, save_every=25.0).events():
            if isinstance(event, Trained):
                now[0] += 10.0
        assert saved == [(stage, done) for stage in range(3) for done in (3, 6, 9)]

    def test_never_saved_when_disabled(self, tmp_path, whole):
        cut(Run(make_plan(), tmp_path / "run", save_every=None), 8)
        assert not list((tmp_path / "run").glob("checkpoint*"))
        assert go_on(Run(make_plan(), tmp_path / "run")) == 0
        assert_same(whole("ratp")[0], tmp_path / "run")

    def test_full_disk_keeps_previous_checkpoint(self, tmp_path, monkeypatch, whole):
        cut(Run(make_plan(), tmp_path / "run"), 8)

        def full(*args):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(midstage, "write_tensors", full)
            with pytest.raises(OSError, match="No space"):
                cut(Run(make_plan(), tmp_path / "run"), 2)
        assert go_on(Run(make_plan(), tmp_path / "run")) == 2
        assert_same(whole("ratp")[0], tmp_path / "run")


def _counted(save, saved):
    def counted(self, checkpoint):
        saved.append((checkpoint.stage, checkpoint.done))
        save(self, checkpoint)

    return counted
