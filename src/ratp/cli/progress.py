"""Showing runs while they run: bars on a terminal, plain lines elsewhere, nothing when asked to be quiet."""

from __future__ import annotations

import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ratp.errors import RatpError
from ratp.events import Event, StageFinished, StageStarted, Trained
from ratp.phase import Tick
from ratp.record import RunRecord
from ratp.run import Run
from ratp.side_by_side import run_all
from ratp.study import Executor

# Reading a loss makes a GPU wait, so the display does it only this often.
SECONDS_BETWEEN_UPDATES = 0.25
# Of lines, at the ends of epochs and within them: a log is read later, and one line an epoch is enough.
SECONDS_BETWEEN_LINES = 10.0
SECONDS_WITHIN_EPOCHS = 60.0
WIDEST_TEXT = 80
# Of a name beside a bar.
WIDEST_LABEL = 26


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
    with interruptible(console) as stop:
        _follow(run, console, stop, quiet=quiet)


def follow_all(
    runs: Sequence[Run], console: Console, *, quiet: bool, at_once: int | None = None, on: Executor = run_all
) -> list[RunRecord | RatpError]:
    """Drives runs side by side and shows them, as :func:`follow` does; an error is the result of its run only."""
    with interruptible(console) as stop:
        if quiet:
            return on(runs, at_once=at_once, on_event=lambda run, event: stop.check())
        with _displays(runs, console) as show:
            watchers = {id(run): _Watcher(show(run, label)) for run, label in zip(runs, labels(runs), strict=True)}

            def see(run: Run, event: Event) -> None:
                watchers[id(run)].see(event)
                stop.check()

            results = on(runs, at_once=at_once, on_event=see)
    for run, result in zip(runs, results, strict=True):
        if isinstance(result, RunRecord) and not watchers[id(run)].any_event:
            _say_complete(run, console)
    return results


class Stop:
    """Whether somebody asked the program to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def ask(self, number: int, frame: object) -> None:
        """Takes a signal: the first is a request, the second is meant."""
        del frame
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    def now(self, number: int, frame: object) -> None:
        """Takes a signal where nobody checks.

        Raises:
            KeyboardInterrupt: At once.
        """
        del frame
        self.signal = number
        raise KeyboardInterrupt

    def check(self) -> None:
        """To be called between two steps.

        Raises:
            KeyboardInterrupt: If it is time to stop.
        """
        if self.signal is not None:
            raise KeyboardInterrupt


@contextmanager
def interruptible(console: Console, *, between_steps: bool = True) -> Iterator[Stop]:
    """Within the block, Ctrl-C and SIGTERM end the program between two steps, with a word on how to go on.

    Whoever is stopped there keeps where it was. A second Ctrl-C does not wait for the step.

    Args:
        console: Where to say so.
        between_steps: Whether somebody checks between steps; if not, both end the program at once.
    """
    stop, before = Stop(), {}
    if threading.current_thread() is threading.main_thread():
        handlers = {signal.SIGINT: stop.ask, signal.SIGTERM: stop.ask} if between_steps else {signal.SIGTERM: stop.now}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    except KeyboardInterrupt:
        console.print("\n[yellow]Interrupted.[/] The same command goes on where it was.", soft_wrap=True)
        sys.exit(128 + (stop.signal or signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(run: Run, console: Console, stop: Stop, *, quiet: bool) -> None:
    with closing(run.events()) as events:
        if quiet:
            for _ in events:
                stop.check()
            return
        with _displays([run], console) as show:
            trained = _show(events, show(run, None), stop)
    if not trained:
        _say_complete(run, console)


def _say_complete(run: Run, console: Console) -> None:
    console.print(f"[dim]{escape(str(run.folder))} is complete already; nothing to train.[/]", soft_wrap=True)


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for every run: its method, and whatever else they do not share."""
    plans = [run.plan for run in runs]
    several_seeds = len({plan.seed for plan in plans}) > 1
    orders = list(dict.fromkeys(plan.order for plan in plans))
    parts = [
        [plan.method.name]
        + ([str(plan.seed)] if several_seeds else [])
        + ([">".join(plan.order)] if len(orders) > 1 else [])
        for plan in plans
    ]
    return [" ".join(part) for part in parts]


def _show(events: Iterable[Event], display: Display, stop: Stop) -> bool:
    """Shows events until there are no more; tells whether there was any."""
    watcher = _Watcher(display)
    for event in events:
        watcher.see(event)
        stop.check()
    return watcher.any_event


class _Watcher:
    """Passes the events of a run on to its display, the steps only now and then."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._shown_at = self._stage_started = time.perf_counter()
        self._steps = self._before = 0
        self.any_event = False

    def see(self, event: Event) -> None:
        """Takes the next event."""
        self.any_event = True
        if isinstance(event, StageStarted):
            self._stage_started, self._steps, self._before = time.perf_counter(), event.done, event.done
            self._display.start(event)
        elif isinstance(event, Trained):
            self._steps += event.tick.made
            now = time.perf_counter()
            if now - self._shown_at > SECONDS_BETWEEN_UPDATES or event.tick.epoch_done:
                self._shown_at = now
                speed = (self._steps - self._before) / max(now - self._stage_started, 1e-9)
                self._display.step(event, self._steps, speed)
        elif isinstance(event, StageFinished):
            self._display.finish(event)


@contextmanager
def _displays(runs: Sequence[Run], console: Console) -> Iterator[Callable[[Run, str | None], Display]]:
    """What makes a display for a run; its name is needed where there are several."""
    if not console.is_terminal:
        yield lambda run, label: _Lines(run, console, label)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("[dim]{task.fields[note]}[/]"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        if len(runs) == 1:
            yield lambda run, label: _Bars(run, console, progress)
        else:
            yield lambda run, label: _OneOfMany(run, console, progress, label or run.plan.method.name)


class _Bars:
    """A bar for the stage under way, a line for every finished one."""

    def __init__(self, run: Run, console: Console, progress: Progress) -> None:
        self._run, self._console, self._progress = run, console, progress
        self._task = progress.add_task(f"[bold]{escape(run.plan.method.name)}[/] preparing", total=None, note="")

    def start(self, event: StageStarted) -> None:
        name = f"[bold]{escape(self._run.plan.method.name)}[/] {_place(self._run, event.stage)} {escape(event.domain)}"
        self._progress.reset(self._task, total=event.steps or None, completed=event.done, description=name, note="")

    def step(self, event: Trained, done: int, speed: float) -> None:
        self._progress.update(self._task, completed=done, note=f"{_note(event.tick)} {speed:.1f}/s")

    def finish(self, event: StageFinished) -> None:
        _print_finished(self._console, event, _summary(self._run, event))


class _OneOfMany:
    """A bar of a run among others, from its first step to its last; a line for every finished stage."""

    def __init__(self, run: Run, console: Console, progress: Progress, label: str) -> None:
        self._run, self._console, self._progress, self._label = run, console, progress, label
        self._task: TaskID | None = None

    def start(self, event: StageStarted) -> None:
        name = f"[bold]{escape(_shortened(self._label))}[/] {_place(self._run, event.stage)} {escape(event.domain)}"
        if self._task is None:
            self._task = self._progress.add_task(name, total=event.steps or None, completed=event.done, note="")
        else:
            self._progress.reset(self._task, total=event.steps or None, completed=event.done, description=name, note="")

    def step(self, event: Trained, done: int, speed: float) -> None:
        assert self._task is not None
        loss = f"loss {float(event.tick.means['total']):.2f} " if "total" in event.tick.means else ""
        self._progress.update(self._task, completed=done, note=f"{loss}{speed:.1f}/s")

    def finish(self, event: StageFinished) -> None:
        _print_finished(self._console, event, _summary(self._run, event, self._label))
        if event.stage + 1 == len(self._run.plan.order) and self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


def _shortened(label: str) -> str:
    """A name that leaves room for a bar."""
    return label if len(label) <= WIDEST_LABEL else f"{label[: WIDEST_LABEL - 1]}…"


class _Lines:
    """A line now and then, and one for every finished stage."""

    def __init__(self, run: Run, console: Console, label: str | None = None) -> None:
        self._run, self._console, self._label = run, console, label
        self._printed_at = time.perf_counter()
        self._steps = 0

    def start(self, event: StageStarted) -> None:
        self._steps = event.steps
        where = f"{self._label or self._run.plan.method.name} stage {_place(self._run, event.stage)} {event.domain}"
        before = f", {event.done} of them made before" if event.done else ""
        self._print(f"{where}: {event.images} images, {event.steps} steps{before}")

    def step(self, event: Trained, done: int, speed: float) -> None:
        tick = event.tick
        apart = SECONDS_BETWEEN_LINES if tick.epoch_done else SECONDS_WITHIN_EPOCHS
        if time.perf_counter() - self._printed_at < apart:
            return
        left = (self._steps - done) / max(speed, 1e-9)
        name = f"{self._label} {tick.phase.name}" if self._label else tick.phase.name
        step = "" if tick.epoch_done else f" step {tick.step}/{tick.phase.steps}"
        self._print(
            f"  {name} epoch {tick.epoch + 1}/{tick.phase.epochs}{step}: {_note(tick)}, "
            f"{speed:.1f} steps/s, {left:.0f} s left"
        )

    def finish(self, event: StageFinished) -> None:
        self._print(_summary(self._run, event, self._label))
        if told := _rollback(event, self._console.width):
            self._print(told)

    def _print(self, line: str) -> None:
        self._printed_at = time.perf_counter()
        self._console.print(line, markup=False, soft_wrap=True)


def _place(run: Run, stage: int) -> str:
    return f"{stage + 1}/{len(run.plan.order)}"


def _note(tick: Tick) -> str:
    """Loss and what is known of the pseudo labels."""
    parts = [f"loss {float(tick.means['total']):.2f}"] if "total" in tick.means else []
    if "confident" in tick.means:
        parts.append(f"conf {100 * float(tick.means['confident']):.0f}%")
    if "labels_as_predicted" in tick.statistics:
        parts.append(f"agree {100 * tick.statistics['labels_as_predicted']:.0f}%")
    return " ".join(parts)


def _print_finished(console: Console, event: StageFinished, summary: str) -> None:
    """A line about a finished stage, and a paragraph if the guard undid it."""
    told = _rollback(event, console.width)
    console.print(f"{'[yellow]↶[/]' if told else '[green]✓[/]'} {escape(summary)}", soft_wrap=True)
    if told:
        console.print(f"[yellow]{escape(told)}[/]", soft_wrap=True)


def _rollback(event: StageFinished, width: int) -> str:
    """What was undone, why, and what to do, in lines no longer than they are read; nothing if the stage counts."""
    if not event.guard or not event.guard["rolled_back"]:
        return ""
    told = (
        f"{event.domain} was rolled back: {'; '.join(event.guard['reasons'])}. The model before it goes on. "
        "Look at the images; --guard off learns from them anyway."
    )
    room = max(min(width, WIDEST_TEXT) - 2, 20)
    return textwrap.indent(textwrap.fill(told, room, break_long_words=False, break_on_hyphens=False), "  ")


def _summary(run: Run, event: StageFinished, label: str | None = None) -> str:
    accuracies = "  ".join(f"{name} {value:.1f}" for name, value in event.accuracy.items())
    place = f"{label or run.plan.method.name} {_place(run, event.stage)} {event.domain}"
    kept = ", source network of an earlier run" if event.statistics.get("from_cache") else ""
    return f"{place:<22} {accuracies}  ({event.seconds:.0f} s{kept})"
