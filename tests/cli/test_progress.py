"""Progress of a run: bars on a terminal, plain lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import partialmethod
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from helpers import files_of, same_tensors, tensors_of, toy_domain, toy_plan
from ratp.cli import progress
from ratp.cli.progress import follow, follow_all, labels
from ratp.runs.events import Trained
from ratp.runs.run import Run
from ratp.training.phase import Tick

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(run, *, terminal=False, quiet=False, width=80):
    """Drives a run and returns what was written."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, width=width, highlight=False, color_system="standard", legacy_windows=False
    )
    follow(run, console, quiet=quiet)
    return file.getvalue()


class TestLines:
    """Where there is no terminal."""

    def test_line_at_stage_start_and_end(self, tmp_path):
        lines = shown(Run(toy_plan(), tmp_path / "run")).splitlines()
        assert [line.split(":")[0] for line in lines[::2]] == [
            "ratp stage 1/3 ink", "ratp stage 2/3 mud", "ratp stage 3/3 fog",
        ]  # fmt: skip
        assert lines[0].endswith("32 images, 4 steps")
        assert [" ".join(line.split()[:3]) for line in lines[1::2]] == ["ratp 1/3 ink", "ratp 2/3 mud", "ratp 3/3 fog"]
        assert all(re.search(r"ink \d+\.\d  mud \d+\.\d  fog \d+\.\d  \(\d+ s\)$", line) for line in lines[1::2])

    def test_output_is_plain_text(self, tmp_path):
        written = shown(Run(toy_plan(), tmp_path / "run"))
        assert all(character == "\n" or character.isprintable() for character in written)

    def test_one_line_per_epoch(self, tmp_path, monkeypatch):
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_UPDATES", -1)
        lines = shown(Run(toy_plan(), tmp_path / "run")).splitlines()
        assert len(lines) == 3 * (2 + 2)
        assert re.fullmatch(
            r"  source epoch 1/2: loss \d+\.\d\d, \d+\.\d steps/s, 17 % of the run, .* s left", lines[1]
        )
        pattern = r"  target epoch 2/2: loss -?\d+\.\d\d conf \d+%, \d+\.\d steps/s, 67 % of the run, .* s left"
        assert re.fullmatch(pattern, lines[6])
        assert "agree" in lines[5]

    def test_long_epoch_prints_intermediate_lines(self, tmp_path, monkeypatch):
        for name in ("SECONDS_BETWEEN_LINES", "SECONDS_WITHIN_EPOCHS"):
            monkeypatch.setattr(progress, name, 0)
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_UPDATES", -1)
        lines = shown(Run(toy_plan(), tmp_path / "run")).splitlines()
        assert len(lines) == 3 * (2 + 4)
        starts = [line.split(":")[0] for line in lines[1:5]]
        assert starts == [f"  source epoch {epoch}/2{step}" for epoch in (1, 2) for step in (" step 1/2", "")]

    def test_a_stage_without_training(self, tmp_path):
        assert "source-only stage 2/3 mud: 32 images, 0 steps" in shown(Run(toy_plan("source-only"), tmp_path / "run"))

    @pytest.mark.parametrize("width", [20, 40, 80])
    def test_names_with_newlines_stay_on_one_line(self, width, tmp_path):
        assert len(shown(Run(toy_plan(), tmp_path / "run"), width=width).splitlines()) == 6


class TestBars:
    """On a terminal."""

    @pytest.fixture
    def written(self, tmp_path, monkeypatch):
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_UPDATES", -1)
        return shown(Run(toy_plan(), tmp_path / "run"), terminal=True)

    def test_one_mark_per_stage_remains(self, written):
        lines = [ESCAPE.sub("", line).strip() for line in written.splitlines()]
        kept = [line for line in lines if "✓" in line]
        assert len(kept) == 3
        assert all(re.search(r"✓ ratp \d/3 (ink|mud|fog) +ink \d+\.\d", line) for line in kept)

    def test_it_shows_stage_and_loss(self, written):
        text = ESCAPE.sub("", written)
        assert "ratp 1/3 ink" in text
        assert "100%" in text
        assert re.search(r"loss \d+\.\d\d", text)

    def test_no_line_is_wider_than_the_terminal(self, written):
        for line in re.split(r"[\r\n]", ESCAPE.sub("", written)):
            assert len(line) <= 80

    def test_cursor_is_restored(self, written):
        assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1

    def test_cursor_is_restored_after_interrupt(self, tmp_path, monkeypatch):
        def interrupted(self):
            raise KeyboardInterrupt
            yield

        monkeypatch.setattr(Run, "events", interrupted)
        file = io.StringIO()
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            follow(Run(toy_plan(), tmp_path / "run"), Console(file=file, force_terminal=True), quiet=False)
        assert file.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_not_markup(terminal, tmp_path):
    """Methods and domains may be called anything, as folders may."""
    plan = toy_plan("source-only", [toy_domain("[/ink]"), toy_domain("[red]mud")])
    plan = replace(plan, method=type("Odd", (plan.method,), {"name": "[bold]m"}))
    written = ESCAPE.sub("", shown(Run(plan, tmp_path / "run"), terminal=terminal, width=200))
    assert re.search(r"\[bold\]m 2/2 \[red\]mud +\[/ink\] \d+\.\d  \[red\]mud \d+\.\d", written)


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_is_silent(terminal, tmp_path):
    assert shown(Run(toy_plan("source-only"), tmp_path / "run"), terminal=terminal, quiet=True) == ""
    assert (tmp_path / "run" / "weights.safetensors").exists()


@pytest.mark.parametrize("terminal", [False, True])
def test_complete_run_is_reported_as_complete(terminal, tmp_path):
    Run(toy_plan("source-only"), tmp_path / "run").execute()
    before = files_of(tmp_path / "run")
    written = shown(Run(toy_plan("source-only"), tmp_path / "run"), terminal=terminal, width=200)
    assert "complete already; nothing to train" in ESCAPE.sub("", written)
    assert files_of(tmp_path / "run") == before


def test_resumed_run_is_not_reported_as_complete(tmp_path):
    events = Run(toy_plan(), tmp_path / "run").events()
    for _ in range(7):
        next(events)
    events.close()
    written = shown(Run(toy_plan(), tmp_path / "run"))
    assert "complete already" not in written
    assert written.startswith("ratp stage 2/3 mud")


def test_watching_changes_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_UPDATES", -1)
    shown(Run(toy_plan(), tmp_path / "watched"), terminal=True)
    Run(toy_plan(), tmp_path / "alone").execute()
    assert same_tensors(tensors_of(tmp_path / "watched"), tensors_of(tmp_path / "alone"))


def test_loss_is_read_only_when_shown(tmp_path, monkeypatch):
    """Reading one makes a GPU wait: as often as the display moves and no more."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_UPDATES", 1000)
    reads = []

    class Watched(dict):
        def __getitem__(self, name):
            reads.append(name)
            return super().__getitem__(name)

    tick = Tick(
        SimpleNamespace(name="p", epochs=1, steps=9),
        0,
        1,
        1,
        lambda: Watched(total=torch.tensor(1.0)),
        {},
        epoch_done=False,
    )
    run = SimpleNamespace(plan=toy_plan("source-only"), stream=SimpleNamespace(order=("a",)))
    display = progress._Lines(run, Console(file=io.StringIO()))
    watcher = progress._Watcher(display, run, [1.0])
    for _ in range(50):
        watcher.see(Trained(0, "a", tick))
    assert reads == []


def several(folder, seeds=(1, 2), methods=("ratp", "source-only")):
    return [Run(toy_plan(m, seed=s), folder / f"{m}-{s}") for m in methods for s in seeds]


def shown_all(runs, *, terminal=False, quiet=False, width=80):
    """Drives runs, here and in turn, and returns what was written."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, width=width, highlight=False, color_system="standard", legacy_windows=False
    )
    results = follow_all(runs, console, quiet=quiet, at_once=1)
    return results, file.getvalue()


class TestSeveral:
    def test_lines_name_their_run(self, tmp_path, monkeypatch):
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_UPDATES", -1)
        results, written = shown_all(several(tmp_path))
        lines = written.splitlines()
        assert [result.seed for result in results] == [1, 2, 1, 2]
        assert all(re.match(r"(  )?(ratp|source-only) [12] ", line) for line in lines)
        assert "ratp 1 stage 1/3 ink: 32 images, 4 steps" in lines
        assert [line for line in lines if line.startswith("  source-only 2 source epoch 2/2: loss ")]
        assert [line for line in lines if re.match(r"ratp 2 3/3 fog +ink \d+\.\d  mud ", line)]

    def test_one_bar_per_run(self, tmp_path, monkeypatch):
        update = Progress.update
        monkeypatch.setattr(Progress, "update", partialmethod(update, refresh=True))  # not by the clock
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_UPDATES", -1)
        _, written = shown_all(several(tmp_path), terminal=True)
        text = ESCAPE.sub("", written)
        assert re.search(r"ratp 1 1/3 ink .*loss \d+\.\d\d \d+\.\d/s", text)
        assert text.count("✓") == 4 * 3
        assert all(len(line) <= 80 for line in re.split(r"[\r\n]", text))
        assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1

    def test_long_names_keep_bars_on_one_line(self, tmp_path, monkeypatch):
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_UPDATES", -1)
        runs = several(tmp_path, methods=("source-only",))
        monkeypatch.setattr(progress, "labels", lambda runs: ["m" * 60 for _ in runs])
        text = ESCAPE.sub("", shown_all(runs, terminal=True)[1])
        bars = [line for line in re.split(r"[\r\n]", text) if "…" in line]
        assert bars
        assert all(len(line) <= 80 for line in bars)

    def test_failed_run_is_shown(self, tmp_path):
        runs = several(tmp_path, methods=("source-only",))
        runs[0].folder.mkdir()
        (runs[0].folder / "mine.txt").write_text("mine")
        results, written = shown_all(runs)
        assert "mine.txt" in str(results[0])
        assert results[1].matrix.complete
        assert "complete already" not in written

    def test_complete_runs_are_reported_as_complete(self, tmp_path):
        shown_all(several(tmp_path, methods=("source-only",)))
        _, written = shown_all(several(tmp_path, seeds=(1, 2, 3), methods=("source-only",)), width=200)
        assert written.count("complete already") == 2

    def test_quiet_is_silent(self, tmp_path):
        results, written = shown_all(several(tmp_path, methods=("source-only",)), quiet=True)
        assert written == ""
        assert all(result.matrix.complete for result in results)

    def test_names_are_shortened_but_distinct(self, tmp_path):
        one, other = several(tmp_path, seeds=(1,))
        assert labels([one, other]) == ["ratp", "source-only"]
        assert labels(several(tmp_path, methods=("ratp",))) == ["ratp 1", "ratp 2"]
        other.plan = replace(one.plan, order=("mud", "ink", "fog"))
        assert labels([one, other]) == ["ratp ink>mud>fog", "ratp mud>ink>fog"]
