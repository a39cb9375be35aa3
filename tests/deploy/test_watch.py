"""``ratp watch``: each image is answered once, broken files are named, stages start between windows."""

from __future__ import annotations

import csv
import io
import json
import os
from contextlib import closing, suppress
from dataclasses import replace

import pytest
import torch

from helpers import journal_of, ratp, same_tensors
from ratp._core.files import read_tensors
from ratp.deploy import watch as events
from ratp.deploy.answers import Answers
from ratp.deploy.arrivals import FolderSource, ListSource
from ratp.deploy.deployment import Deployment
from ratp.deploy.watch import FolderWatch
from ratp.errors import RatpError
from tiny_deployment import DARK, KNOWN, NEGATIVE, copy_of, make_deployment, put


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    return make_deployment(tmp_path_factory.mktemp("deployed"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(events, "SECONDS_BETWEEN_LOOKS", 0.01)


@pytest.fixture
def model(deployed, tmp_path):
    """The directory of a deployment that a test may change."""
    return copy_of(deployed, tmp_path / "model")


@pytest.fixture
def inbox(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    return folder


def records(path):
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(path.read_text(), newline="")))
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(path):
    return [row["file"].rpartition("/")[2] for row in records(path)]


def watch(model, inbox, *more):
    done = ratp("watch", inbox, "-d", model, "--once", "--device", "cpu", *more)
    assert done.code == 0, done
    return done


class Session:
    """A watch in this process, whose events a test takes one by one."""

    def __init__(self, model, source, out, adapt="ask", **how):
        self.model, self.answers = Deployment(model, device="cpu"), Answers(out)
        self.model.settings = replace(self.model.settings, adapt=adapt)
        self.events = FolderWatch(self.model, source, self.answers, **how).events()

    def __enter__(self):
        return self

    def until(self, kind, most=2000):
        for _ in range(most):
            event = next(self.events)
            if isinstance(event, kind):
                return event
        raise AssertionError(f"no {kind}")

    def __exit__(self, *_):
        self.events.close()
        self.answers.close()
        self.model.close()


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_each_image_is_answered_once(model, inbox, tmp_path, ending):
    paths = put(inbox / "camera", "a", KNOWN[:70])
    (inbox / "notes.txt").write_text("no image")
    out = tmp_path / f"answers.{ending}"
    for expected in (70, 0):
        assert json.loads(watch(model, inbox, "--out", out, "--json").out)["answered"] == expected
    with Deployment(model, device="cpu") as alone:
        labels = alone.answer(KNOWN[:70]).labels
    rows = records(out)
    assert [(row["file"], row["class"]) for row in rows] == list(zip(map(str, paths), labels, strict=True))
    assert {(str(row["version"]), row["level"]) for row in rows} == {("1", "fine")}
    assert all(0 < float(row["confidence"]) <= 1 for row in rows)


def test_a_changed_file_is_answered_again(model, inbox):
    (path,) = put(inbox, "a", KNOWN[:1])
    watch(model, inbox)
    os.utime(path, (2e9, 2e9))
    watch(model, inbox)
    assert names(model / "predictions.jsonl") == ["a-000.png"] * 2


def test_files_that_are_being_written_are_waited_for_and_broken_ones_named_once(model, inbox, tmp_path):
    out = tmp_path / "x.jsonl"
    (whole,) = put(tmp_path, "late", KNOWN[:1])
    late, broken = inbox / "late.png", inbox / "broken.png"
    late.write_bytes(whole.read_bytes()[:200])
    broken.write_bytes(b"\x89PNG what is this")
    with Session(model, FolderSource(inbox), out, latency=0, patience=0.3) as session:
        for _ in range(4):
            assert session.until(events.Waiting | events.Answered) == events.Waiting()
        late.write_bytes(whole.read_bytes())
        assert session.until(events.Answered).count == 1
        (named,) = session.until(events.Answered).broken
        assert named[0] == str(broken) and "PNG" in named[1]
    assert "broken.png" in names(out) and "error" in records(out)[-1]
    assert not watch(model, inbox, "--out", out, "--patience", 0).err.count("broken.png")


def test_a_vanished_folder_is_waited_for(model, inbox, tmp_path):
    away = tmp_path / "away"
    with Session(model, FolderSource(inbox), tmp_path / "x.jsonl", latency=0) as session:
        session.until(events.Waiting)
        inbox.rename(away)
        assert "has vanished" in session.until(events.Waiting).note
        assert session.until(events.Waiting).note == ""
        put(away, "a", KNOWN[:1])
        away.rename(inbox)
        assert "returned" in session.until(events.Waiting).note
        assert session.until(events.Answered).count == 1


def test_a_list_is_answered_in_its_order(model, tmp_path):
    paths = put(tmp_path / "in", "a", KNOWN[:5])[::-1]
    listed = [os.fsencode(path) for path in [*paths, tmp_path / "missing.png", tmp_path]]
    with (
        Session(model, ListSource(listed), tmp_path / "x.csv", latency=0, patience=0) as session,
        suppress(StopIteration),
    ):
        while True:
            next(session.events)
    assert names(tmp_path / "x.csv")[:5] == [path.name for path in paths]
    assert [row["error"] for row in records(tmp_path / "x.csv")[5:]] == [
        "cannot be read: No such file or directory",
        "is not a file",
    ]


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_an_incomplete_last_record_is_answered_again(model, inbox, tmp_path, ending):
    put(inbox, "a\nb", KNOWN[:3])
    out = tmp_path / f"x.{ending}"
    watch(model, inbox, "--out", out)
    whole = out.read_bytes()
    for length in (len(whole) - 1, len(whole) - 30, len(whole) - 75, 4, 0):
        out.write_bytes(whole[:length])
        watch(model, inbox, "--out", out)
        assert names(out) == ["a\nb-000.png", "a\nb-001.png", "a\nb-002.png"]


def test_output_that_is_something_else_is_left_alone(model, inbox, tmp_path):
    for name, text in (("a.jsonl", '{"label": 3}\n'), ("b.csv", "file,class\nx,y\n"), ("c.jsonl", "half a line")):
        (tmp_path / name).write_text(text)
        done = ratp("watch", inbox, "-d", model, "--once", "--out", tmp_path / name)
        assert done.code == 2 and "choose another file with --out" in done.err, done
        assert (tmp_path / name).read_text() == text


def test_output_that_vanishes_ends_the_watch(model, inbox, tmp_path):
    with Session(model, FolderSource(inbox), tmp_path / "x.jsonl", latency=0) as session:
        session.until(events.Waiting)
        (tmp_path / "x.jsonl").unlink()
        put(inbox, "a", KNOWN[:1])
        with pytest.raises(RatpError, match="was removed or replaced"):
            session.until(events.Answered)


def fill(inbox):
    """Known images, some that a stage would ruin the model with, and some it can adapt to."""
    put(inbox, "a", KNOWN[:128], 1e9)
    put(inbox, "b", NEGATIVE[:64], 2e9)
    put(inbox, "c", DARK[:100], 3e9)


def test_stages_start_between_windows(model, inbox):
    fill(inbox)
    done = watch(model, inbox, "--adapt", "auto")
    assert "fine → drifted" in done.err
    assert "refused: the model forgot" in done.err
    assert "accepted: version 2, adapted to 64 images" in done.err
    found = [(name[0], version) for name, version in answers_of(model)]
    assert found == [("a", 1)] * 128 + [("b", 1)] * 64 + [("c", 1)] * 64 + [("c", 2)] * 36
    assert [event["event"] for event in journal_of(model) if event["event"] != "window"] == [
        *("version", "stage", "refused", "stage", "version")
    ]


def answers_of(model):
    path = model / "predictions.jsonl"
    return [(name, row["version"]) for name, row in zip(names(path), records(path), strict=True)]


@pytest.mark.parametrize("policy", ["never", "ask"])
def test_without_auto_no_stage_starts(model, inbox, policy):
    fill(inbox)
    done = watch(model, inbox, "--adapt", policy)
    assert "drifted" in done.err
    assert ("--adapt auto" in done.err.replace("--adapt ask", "")) == (policy == "ask")
    assert {version for _, version in answers_of(model)} == {1}
    assert not journal_of(model, "stage")
    assert "accepted" in watch(model, inbox, "--adapt", "auto").err  # on the images that it saw before


def test_interrupted_at_any_place_it_comes_to_the_same_weights(deployed, inbox, tmp_path):
    fill(inbox)
    straight, broken = copy_of(deployed, tmp_path / "straight"), copy_of(deployed, tmp_path / "broken")
    watch(straight, inbox, "--adapt", "auto")
    stops = [events.Answered, events.StageStarted, events.StageStarted, events.StageEnded]
    for stop in [*stops, events.Answered, events.StageStarted, events.StageStarted]:
        with Session(broken, FolderSource(inbox), broken / "predictions.jsonl", adapt="auto", latency=0) as session:
            session.until(stop)
    watch(broken, inbox, "--adapt", "auto")
    assert answers_of(broken) == answers_of(straight)
    states = [read_tensors(folder / "versions" / "2.safetensors")[0] for folder in (straight, broken)]
    assert same_tensors(*states)


def test_images_that_are_gone_are_counted(model, inbox):
    paths = put(inbox, "a", KNOWN[:10])
    watch(model, inbox)
    paths[0].unlink()
    assert "the last 9 images again; 1 more are gone" in watch(model, inbox).err


def test_a_model_without_numbers_answers_nothing(model, inbox, monkeypatch):
    put(inbox, "a", KNOWN[:3])
    usual = Deployment._use

    def use(self, number):
        usual(self, number)
        with torch.no_grad():
            next(self._model.method.network.classifier.parameters()).fill_(float("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(Deployment, "_use", use)
        done = ratp("watch", inbox, "-d", model, "--once", "--device", "cpu")
    assert done.code == 2 and "NaN or infinity. Roll back" in done.err, done
    assert not (model / "predictions.jsonl").read_bytes()
    watch(model, inbox)
    assert len(names(model / "predictions.jsonl")) == 3


def test_only_one_process_uses_a_deployment(model, inbox):
    with closing(Deployment(model, device="cpu")):
        done = ratp("watch", inbox, "-d", model, "--once")
        assert done.code == 2 and "Only one process at a time can use a deployment" in done.err, done
        assert ratp("versions", model).code == 0  # which only reads
    assert ratp("versions", model, "--rollback", 1).code == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nowhere", "-d", "model"), "nowhere is not a folder"),
        (("in", "-d", "in"), "in is not a deployment: create one with ratp deploy"),
        (("in", "-d", "model", "--out", "x.txt"), "x.txt must end in .jsonl or .csv"),
        (("in", "-d", "model", "--adapt", "maybe"), "unknown policy 'maybe'"),
        (("in", "-d", "model", "--latency", "-1"), "--latency takes seconds, 0 or more; got -1"),
        (("in", "-d", "model", "--patience", "nan"), "--patience takes seconds"),
    ],
)
def test_bad_input(model, inbox, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    done = ratp("watch", *words, "--once")
    assert done.code == 2 and expected in done.err, done
