"""Showing a run while it runs: bars on a terminal, plain lines elsewhere, nothing when asked to be quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ratp.method import Tick
from ratp.run import Event, Run, StageFinished, StageStarted, Trained

# Reading a loss makes a GPU wait, so the display does it only this often.
SECONDS_BETWEEN_UPDATES = 0.25
SECONDS_BETWEEN_LINES = 10.0


class Display(Protocol):
    """Something that can be shown what happens."""

    def start(self, event: StageStarted) -> None:
        """A stage begins."""

    def step(self, event: Trained, done: int, speed: float) -> None:
        """``done`` updates of the stage were made, at ``speed`` updates a second."""

    def finish(self, event: StageFinished) -> None:
        """A stage ended."""


def follow(run: Run, console: Console, *, quiet: bool) -> None:
    """Drives a run to its end and shows it. Ctrl-C ends the program with a word on how to go on."""
    try:
        _follow(run, console, quiet=quiet)
    except KeyboardInterrupt:
        console.print("\n[yellow]Interrupted.[/] The same command continues with the stage it was in.", soft_wrap=True)
        sys.exit(130)


def _follow(run: Run, console: Console, *, quiet: bool) -> None:
    if quiet:
        for _ in run.events():
            pass
        return
    with _display(run, console) as display:
        trained = _show(run.events(), display)
    if not trained:
        console.print(f"[dim]{escape(str(run.folder))} is complete already; nothing to train.[/]", soft_wrap=True)


def _show(events: Iterable[Event], display: Display) -> bool:
    """Shows events until there are no more; tells whether there was any."""
    shown_at = stage_started = time.perf_counter()
    steps, any_event = 0, False
    for event in events:
        any_event = True
        if isinstance(event, StageStarted):
            stage_started, steps = time.perf_counter(), 0
            display.start(event)
        elif isinstance(event, Trained):
            steps += 1
            now = time.perf_counter()
            if now - shown_at > SECONDS_BETWEEN_UPDATES or event.tick.epoch_done:
                shown_at = now
                display.step(event, steps, steps / max(now - stage_started, 1e-9))
        elif isinstance(event, StageFinished):
            display.finish(event)
    return any_event


@contextmanager
def _display(run: Run, console: Console) -> Iterator[Display]:
    if not console.is_terminal:
        yield _Lines(run, console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("[dim]{task.fields[note]}[/]"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        yield _Bars(run, console, progress)


class _Bars:
    """A bar for the stage under way, a line for every finished one."""

    def __init__(self, run: Run, console: Console, progress: Progress) -> None:
        self._run, self._console, self._progress = run, console, progress
        self._task = progress.add_task(f"[bold]{escape(run.plan.method.name)}[/] preparing", total=None, note="")

    def start(self, event: StageStarted) -> None:
        name = f"[bold]{escape(self._run.plan.method.name)}[/] {_place(self._run, event.stage)} {escape(event.domain)}"
        self._progress.reset(self._task, total=event.steps or None, description=name, note="")

    def step(self, event: Trained, done: int, speed: float) -> None:
        self._progress.update(self._task, completed=done, note=f"{_note(event.tick)} {speed:.1f}/s")

    def finish(self, event: StageFinished) -> None:
        self._console.print(f"[green]✓[/] {escape(_summary(self._run, event))}", soft_wrap=True)


class _Lines:
    """A line now and then, and one for every finished stage."""

    def __init__(self, run: Run, console: Console) -> None:
        self._run, self._console = run, console
        self._printed_at = time.perf_counter()
        self._steps = 0

    def start(self, event: StageStarted) -> None:
        self._steps = event.steps
        where = f"{self._run.plan.method.name} stage {_place(self._run, event.stage)} {event.domain}"
        self._print(f"{where}: {event.images} images, {event.steps} steps")

    def step(self, event: Trained, done: int, speed: float) -> None:
        if time.perf_counter() - self._printed_at < SECONDS_BETWEEN_LINES:
            return
        tick = event.tick
        left = (self._steps - done) / max(speed, 1e-9)
        self._print(
            f"  {tick.phase.name} epoch {tick.epoch + 1}/{tick.phase.epochs}: {_note(tick)}, "
            f"{speed:.1f} steps/s, {left:.0f} s left"
        )

    def finish(self, event: StageFinished) -> None:
        self._print(_summary(self._run, event))

    def _print(self, line: str) -> None:
        self._printed_at = time.perf_counter()
        self._console.print(line, markup=False, soft_wrap=True)


def _place(run: Run, stage: int) -> str:
    return f"{stage + 1}/{len(run.stream.order)}"


def _note(tick: Tick) -> str:
    """Loss and what is known of the pseudo labels."""
    parts = [f"loss {float(tick.means['total']):.2f}"] if "total" in tick.means else []
    if "confident" in tick.means:
        parts.append(f"conf {100 * float(tick.means['confident']):.0f}%")
    if "labels_as_predicted" in tick.statistics:
        parts.append(f"agree {100 * tick.statistics['labels_as_predicted']:.0f}%")
    return " ".join(parts)


def _summary(run: Run, event: StageFinished) -> str:
    accuracies = "  ".join(f"{name} {value:.1f}" for name, value in event.accuracy.items())
    place = f"{run.plan.method.name} {_place(run, event.stage)} {event.domain}"
    return f"{place:<22} {accuracies}  ({event.seconds:.0f} s)"
