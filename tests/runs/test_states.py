"""A run whose last state is damaged or missing resumes from the previous one and ends with the same result."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ratp.runs.states
from helpers import accuracy_of, files_of, journal_of, same_tensors, tensors_of, toy_domain, toy_plan, unreadable
from ratp._core.files import NewerFileError, is_whole, read_tensors, write_tensors
from ratp.errors import RunDirectoryError
from ratp.runs.events import StageFinished, StageStarted, Trained
from ratp.runs.run import Run
from ratp.runs.states import BEFORE, LATEST, States, StateWarning
from ratp.runs.states import CHECKPOINT_LATEST as CHECKPOINT
from ratp.streams.stream import LoadedDomain

FAULT = 2


def plan(seed=2022):
    return toy_plan("shot", seed=seed, changes={"epochs": 1, "steps": 3})


def stop(run, finished, steps=0):
    """Stops a run so many steps after so many finished stages."""
    events, seen = run.events(), [0, 0]
    for event in events:
        seen = [seen[0] + isinstance(event, StageFinished), (seen[1] + 1) * isinstance(event, Trained)]
        if seen == [finished, steps]:
            break
    events.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    Run(plan(), folder).execute()
    return folder


@pytest.fixture(scope="module")
def under_way(tmp_path_factory):
    """A run that was stopped with a checkpoint in its third and last stage."""
    folder = tmp_path_factory.mktemp("under-way") / "run"
    stop(Run(plan(), folder), finished=2, steps=2)
    return folder


@pytest.fixture
def stopped(under_way, tmp_path):
    return shutil.copytree(under_way, tmp_path / "run")


def damage(path, kind="bit"):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    contents = {"bit": content, "cut": content[: len(content) // 2], "page": b"<html>", "empty": b""}
    path.unlink()
    if kind != "gone":
        path.write_bytes(contents[kind])


def assert_same(folder, whole):
    assert files_of(folder).keys() == files_of(whole).keys()
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(folder, name), tensors_of(whole, name))
    assert (folder / "matrix.json").read_bytes() == (whole / "matrix.json").read_bytes()
    assert [e["stage"] for e in journal_of(folder, "stage_finished")] == [0, 1, 2]


def go_on(folder, expected):
    """Resumes after a state was lost; returns the stages that run."""
    with pytest.warns(StateWarning, match=expected):
        return [event.stage for event in Run(plan(), folder).events() if isinstance(event, StageStarted)]


def assert_error(folder, expected):
    """Resuming fails and changes nothing."""
    before = files_of(folder)
    with pytest.raises(RunDirectoryError, match=expected) as caught:
        Run(plan(), folder).execute()
    assert files_of(folder) == before
    return str(caught.value)


def rewrite(path, **values):
    """Writes other things about a state, with a right hash."""
    tensors, about = read_tensors(path)
    write_tensors(path, tensors, {**about, **values})


def test_previous_state_is_kept_until_the_end(under_way, whole):
    rows = [len(read_tensors(under_way / name)[1]["matrix"]["accuracy"]) for name in (LATEST, BEFORE)]
    assert rows == [2, 1]
    assert not (whole / BEFORE).exists()


class TestGoingBack:
    @pytest.mark.parametrize("kind", ["bit", "cut", "page", "empty", "gone"])
    @pytest.mark.faults(
        FAULT, "a run with a damaged or missing state uses the previous one and ends with the same result"
    )
    def test_lost_state_falls_back_to_previous(self, kind, stopped, whole):
        damage(stopped / LATEST, kind)
        word = "missing" if kind == "gone" else "damaged"
        expected = rf"state\.safetensors is {word}.*resumes from state-before\.safetensors, after 1 of 3 stages"
        assert go_on(stopped, expected) == [1, 2]
        assert_same(stopped, whole)
        (event,) = journal_of(stopped, "state_lost")
        assert word in event["what"]
        assert event["finished_stages"] == journal_of(stopped, "run_resumed")[-1]["finished_stages"] == 1

    def test_later_results_are_discarded(self, stopped):
        damage(stopped / LATEST)
        events = Run(plan(), stopped).events()
        with pytest.warns(StateWarning):
            assert next(events).done == 0
        events.close()
        assert len(accuracy_of(stopped)) == 1
        assert [e["stage"] for e in journal_of(stopped, "stage_finished")] == [0]
        assert not (stopped / CHECKPOINT).exists()
        assert is_whole(stopped / LATEST) and not (stopped / BEFORE).exists()

    def test_repeated_losses(self, stopped, whole):
        damage(stopped / LATEST)
        with pytest.warns(StateWarning):
            stop(Run(plan(), stopped), finished=1, steps=1)
        damage(stopped / LATEST, "cut")
        assert go_on(stopped, "after 1 of 3 stages") == [1, 2]
        assert_same(stopped, whole)

    @pytest.mark.parametrize("kind", ["bit", "gone"])
    def test_run_restarts_without_previous_state(self, kind, whole, tmp_path):
        stop(Run(plan(), tmp_path / "run"), finished=1, steps=2)
        assert not (tmp_path / "run" / BEFORE).exists()
        damage(tmp_path / "run" / LATEST, kind)
        assert go_on(tmp_path / "run", "resumes from the start") == [0, 1, 2]
        assert_same(tmp_path / "run", whole)

    def test_stage_checkpoint_is_still_used(self, under_way, whole, tmp_path):
        """Killed after the state was written and before the checkpoint was removed."""
        folder = tmp_path / "run"
        stop(Run(plan(), folder), finished=1, steps=2)
        kept = (folder / CHECKPOINT).read_bytes()
        stop(Run(plan(), folder), finished=1)
        (folder / CHECKPOINT).write_bytes(kept)
        damage(folder / LATEST)
        with pytest.warns(StateWarning):
            started = [event for event in Run(plan(), folder).events() if isinstance(event, StageStarted)]
        assert [(event.stage, event.done) for event in started] == [(1, 2), (2, 0)]
        assert_same(folder, whole)

    def test_lost_state_of_a_complete_run(self, under_way, whole, stopped):
        """Killed before the state before was removed; the weights are those of the state, whichever that is."""
        Run(plan(), stopped).execute()
        shutil.copy(under_way / LATEST, stopped / BEFORE)
        write_tensors(stopped / "weights.safetensors", {})
        damage(stopped / LATEST)
        assert go_on(stopped, "after 2 of 3 stages") == [2]
        assert_same(stopped, whole)

    def test_predictions_of_the_lost_model_are_rewritten(self, tmp_path, monkeypatch):
        source, target = toy_domain("ink", 40), toy_domain("mud", 30)
        plan = toy_plan("source-only", [source, target])
        loaded = [LoadedDomain(source), LoadedDomain(target.unlabelled())]
        plan = replace(plan, spec=replace(plan.spec, load=lambda *_: loaded))
        with monkeypatch.context() as killed:  # just before the end
            killed.setattr(States, "settle", lambda self: None)
            Run(plan, tmp_path).execute()
        (path,) = tmp_path.glob("predictions-*.csv")
        predictions = path.read_bytes()
        path.write_text("of another model")
        damage(tmp_path / LATEST)
        with pytest.warns(StateWarning):
            Run(plan, tmp_path).execute()
        assert path.read_bytes() == predictions

    def test_state_is_lost_while_needed(self, stopped, whole):
        """The file goes while the run is under way: it says so, and never takes an untrained method instead."""
        run = Run(plan(), stopped)
        events = run.events()
        next(events)
        damage(stopped / LATEST, "gone")
        with pytest.raises(RunDirectoryError, match=r"missing\. The same command resumes"):
            run._session.undo()
        events.close()
        assert go_on(stopped, "after 1 of 3 stages") == [1, 2]
        assert_same(stopped, whole)


class TestRefused:
    @pytest.mark.parametrize("kind", ["bit", "cut", "gone"])
    def test_both_are_lost(self, kind, stopped):
        for name in (LATEST, BEFORE):
            damage(stopped / name, kind)
        message = assert_error(stopped, r"state\.safetensors is .*state-before\.safetensors is .*Restore one of them")
        assert "--out" in message

    def test_unknown_extent_of_loss(self, stopped):
        for name in (LATEST, BEFORE):
            damage(stopped / name)
        (stopped / "matrix.json").unlink()
        assert_error(stopped, r"matrix\.json is missing.*--out")

    @pytest.mark.parametrize("name", [LATEST, BEFORE])
    def test_state_of_another_run(self, name, stopped):
        """To go back would hide a mistake."""
        damage(stopped / LATEST)
        shutil.copy(stopped / BEFORE, stopped / LATEST) if name == LATEST else None
        rewrite(stopped / name, fingerprint="x")
        assert_error(stopped, "another run")

    def test_state_of_a_later_version(self, stopped):
        rewrite(stopped / LATEST, schema=99)
        with pytest.raises(NewerFileError):
            Run(plan(), stopped).execute()

    def test_state_of_another_shape(self, stopped):
        tensors, about = read_tensors(stopped / LATEST)
        write_tensors(stopped / LATEST, {**tensors, "network.classifier.weight": torch.zeros(3, 3)}, about)
        assert_error(stopped, "does not fit this run")

    def test_unreadable_state(self, stopped, monkeypatch):
        unreadable(monkeypatch, LATEST)
        assert_error(stopped, r"cannot read .*state\.safetensors: Permission denied")


class TestWriting:
    @pytest.mark.parametrize("links", [True, False])
    @pytest.mark.faults(FAULT, "if a run is killed while it ends a stage, one of its two states is intact")
    def test_killed_at_any_point(self, links, stopped, whole, monkeypatch, tmp_path):
        """What a killed run leaves is what lies there at that point; where a disk knows no links too."""
        save, left = ratp.runs.states.States.save, []

        def look(usual):
            def looked(*arguments, **more):
                left.append(shutil.copytree(stopped, tmp_path / str(len(left))))
                return usual(*arguments, **more)

            return looked

        def no_link(path, target):
            raise OSError(errno.EPERM, "Operation not permitted")

        def saved(*arguments):
            with monkeypatch.context() as patch:
                if not links:
                    patch.setattr(Path, "hardlink_to", no_link)
                for place, name in ((Path, "hardlink_to"), (Path, "replace"), (Path, "unlink"), (os, "fsync")):
                    patch.setattr(place, name, look(getattr(place, name)))
                save(*arguments)
                left.append(shutil.copytree(stopped, tmp_path / str(len(left))))

        monkeypatch.setattr(ratp.runs.states.States, "save", saved)
        Run(plan(), stopped).execute()
        monkeypatch.undo()
        assert len(left) >= 7
        for folder in left:
            assert is_whole(folder / LATEST) or is_whole(folder / BEFORE)
            if is_whole(folder / LATEST):
                Run(plan(), folder).execute()
            else:
                assert not links
                go_on(folder, "missing.*after 2 of 3 stages")
            assert_same(folder, whole)
        assert_same(stopped, whole)

    @pytest.mark.faults(4, "if the disk has no space for another file name, both saved states stay intact")
    def test_no_space_for_a_directory_entry(self, stopped, whole, monkeypatch):
        def full(path, target):
            raise OSError(errno.ENOSPC, "No space left on device")

        states = {name: files_of(stopped)[name] for name in (LATEST, BEFORE)}
        with monkeypatch.context() as patch:
            patch.setattr(Path, "hardlink_to", full)
            with pytest.raises(RunDirectoryError, match=r"No space left on device\. Make room"):
                Run(plan(), stopped).execute()
        assert {name: files_of(stopped)[name] for name in states} == states
        Run(plan(), stopped).execute()
        assert_same(stopped, whole)

    def test_space_needed_is_two_states(self, stopped, whole, monkeypatch):
        """The state before the last gives way before the new one is written."""
        seen = []

        def look(path, *rest):
            seen.append({item.stat().st_ino for item in stopped.glob("*state*")})
            write_tensors(path, *rest)

        monkeypatch.setattr(ratp.runs.states, "write_tensors", look)
        Run(plan(), stopped).execute()
        assert [len(files) for files in seen] == [1]
        assert_same(stopped, whole)
