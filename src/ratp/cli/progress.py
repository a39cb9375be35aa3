"""Shows runs while they are executed: bars on a terminal, plain lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from ratp.errors import RatpError
from ratp.executors.local import run_all
from ratp.reports.tables import duration
from ratp.runs.events import Event, StageFinished, StageStarted, Trained
from ratp.runs.record import RunRecord
from ratp.runs.run import Run
from ratp.studies.execute import Executor
from ratp.training.phase import Tick

# Reading a loss makes a GPU wait, so the display reads it only this often.
SECONDS_BETWEEN_UPDATES = 0.25
# Between lines, at the ends of epochs and within them.
SECONDS_BETWEEN_LINES = 10.0
SECONDS_WITHIN_EPOCHS = 60.0
LEAST_SHARE = 0.01  # of a run, to say from it how long the rest takes
WIDEST_TEXT = 80
WIDEST_LABEL = 26  # next to a bar
OnEvent = Callable[[Run, Event], None]


def follow(
    run: Run,
    console: Console,
    *,
    quiet: bool,
    weights: Sequence[float] | None = None,
    also: OnEvent | None = None,
) -> None:
    """Executes a run and shows it. Ctrl-C and SIGTERM stop it where the same command continues.

    ``weights`` says how long each stage is, relative to the others; ``also`` gets every event too.
    """
    with interruptible(console) as stop, closing(run.events()) as events:
        if quiet:
            for event in events:
                if also:
                    also(run, event)
                stop.check()
            return
        with _displays([run], console) as show:
            watcher = _Watcher(show(run, None), run, weights)
            for event in events:
                watcher.see(event)
                if also:
                    also(run, event)
                stop.check()
        if not watcher.any_event:
            _say_complete(run, console)


def follow_all(
    runs: Sequence[Run],
    console: Console,
    *,
    quiet: bool,
    at_once: int | None = None,
    on: Executor = run_all,
    also: OnEvent | None = None,
) -> list[RunRecord | RatpError]:
    """Executes runs side by side and shows them, as :func:`follow` does; the result of a failed run is its error."""
    with interruptible(console) as stop:
        if quiet:

            def check(run: Run, event: Event) -> None:
                if also:
                    also(run, event)
                stop.check()

            return on(runs, at_once=at_once, on_event=check)
        with _displays(runs, console) as show:
            watchers = {id(run): _Watcher(show(run, label), run) for run, label in zip(runs, labels(runs), strict=True)}

            def see(run: Run, event: Event) -> None:
                watchers[id(run)].see(event)
                if also:
                    also(run, event)
                stop.check()

            results = on(runs, at_once=at_once, on_event=see)
    for run, result in zip(runs, results, strict=True):
        if isinstance(result, RunRecord) and not watchers[id(run)].any_event:
            _say_complete(run, console)
    return results


@contextmanager
def shown(run: Run, console: Console, *, quiet: bool) -> Iterator[Callable[[Event], None]]:
    """Yields a function that shows the events of a run, for a caller that executes it."""
    if quiet:
        yield lambda event: None
        return
    with _displays([run], console) as show:
        yield _Watcher(show(run, None), run).see


class Stop:
    """Remembers a signal to stop. The first waits for :meth:`check` between two steps unless ``at_once``."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.signal: int | None = None
        self._at_once = at_once

    def ask(self, number: int, _frame: object) -> None:
        """Handles a signal; a second one interrupts at once."""
        at_once = self._at_once or self.signal is not None
        self.signal = self.signal or number
        if at_once:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal has arrived."""
        if self.signal is not None:
            raise KeyboardInterrupt


@contextmanager
def interruptible(
    console: Console, *, between_steps: bool = True, advice: str = "The same command continues from there."
) -> Iterator[Stop]:
    """Within the block, Ctrl-C and SIGTERM end the program between two steps, and a second one at once.

    If nothing calls :meth:`Stop.check` (``between_steps=False``), both end it at once.
    """
    stop, before = Stop(at_once=not between_steps), {}
    if threading.current_thread() is threading.main_thread():
        handled = (signal.SIGINT, signal.SIGTERM) if between_steps else (signal.SIGTERM,)
        before = {number: signal.signal(number, stop.ask) for number in handled}
    try:
        yield stop
    except KeyboardInterrupt:
        console.print(f"\n[yellow]Interrupted.[/] {advice}", soft_wrap=True)
        sys.exit(128 + (stop.signal or signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_complete(run: Run, console: Console) -> None:
    console.print(f"[dim]{escape(str(run.folder))} is complete already; nothing to train.[/]", soft_wrap=True)


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for every run: its method, then its seed and order if the runs differ in them."""
    plans = [run.plan for run in runs]
    seeds, orders = {plan.seed for plan in plans}, {plan.order for plan in plans}
    found = []
    for plan in plans:
        seed = f" {plan.seed}" if len(seeds) > 1 else ""
        order = f" {'>'.join(plan.order)}" if len(orders) > 1 else ""
        found.append(f"{plan.method.name}{seed}{order}")
    return found


class _Watcher:
    """Passes the events of a run on to its display, but only some of its steps; measures its progress as a whole."""

    def __init__(self, display: _Display, run: Run, weights: Sequence[float] | None = None) -> None:
        self._display, self._weights = display, weights or [1.0] * len(run.plan.order)
        self._whole = max(sum(self._weights), 1e-9)
        self._begun: float | None = None
        self._stage, self._of = 0, 1
        self._started = time.perf_counter()
        self._shown_at = self._stage_started = time.perf_counter()
        self._steps = self._before = 0
        self.any_event = False

    def see(self, event: Event) -> None:
        self.any_event = True
        if isinstance(event, StageStarted):
            self._stage_started, self._steps, self._before = time.perf_counter(), event.done, event.done
            self._stage, self._of = event.stage, max(event.steps, 1)
            if self._begun is None:
                self._begun = self._done()
            self._display.start(event, self._done())
        elif isinstance(event, Trained):
            self._steps += event.tick.made
            now = time.perf_counter()
            if now - self._shown_at > SECONDS_BETWEEN_UPDATES or event.tick.epoch_done:
                self._shown_at = now
                speed = (self._steps - self._before) / max(now - self._stage_started, 1e-9)
                self._display.step(event.tick, self._done(), speed, self._left(now))
        elif isinstance(event, StageFinished):
            self._display.finish(event)

    def _done(self) -> float:
        """The share of the whole run that is done."""
        done = sum(self._weights[: self._stage]) + self._weights[self._stage] * min(self._steps / self._of, 1.0)
        return done / self._whole

    def _left(self, now: float) -> float | None:
        """The seconds left of the whole run at the speed so far; None if that is too early to say."""
        done = self._done()
        made = done - (self._begun or 0.0)
        return (now - self._started) / made * (1 - done) if made > LEAST_SHARE else None


@contextmanager
def _displays(runs: Sequence[Run], console: Console) -> Iterator[Callable[[Run, str | None], _Display]]:
    """Yields a function that creates the display of a run; with several runs, each needs a label."""
    if not console.is_terminal:
        yield lambda run, label: _Lines(run, console, label)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("[dim]{task.fields[note]}[/]"),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        yield lambda run, label: _Bar(run, console, progress, label if len(runs) > 1 else None)


class _Display:
    """Shows the stages of a run."""

    def __init__(self, run: Run, console: Console, label: str | None = None) -> None:
        self._run, self._console, self._label = run, console, label
        self._name = label or run.plan.method.name

    def start(self, event: StageStarted, done: float) -> None:
        """Shows that a stage begins, when a share ``done`` of the whole run is done."""
        raise NotImplementedError

    def step(self, tick: Tick, done: float, speed: float, left: float | None) -> None:
        """Shows the share of the run that is done, the updates per second, and the seconds left of the whole run."""
        raise NotImplementedError

    def finish(self, event: StageFinished) -> None:
        raise NotImplementedError

    def _place(self, event: StageStarted | StageFinished) -> str:
        return f"{event.stage + 1}/{len(self._run.plan.order)} {event.domain}"

    def _summary(self, event: StageFinished) -> str:
        accuracies = "  ".join(f"{name} {value:.1f}" for name, value in event.accuracy.items())
        reused = ", reused source network" if event.statistics.get("from_cache") else ""
        return f"{f'{self._name} {self._place(event)}':<22} {accuracies}  ({event.seconds:.0f} s{reused})"


class _Bar(_Display):
    """A bar for the run and a line for every finished stage.

    A run among others has a label, and a bar only from its first step to its last.
    """

    def __init__(self, run: Run, console: Console, progress: Progress, label: str | None = None) -> None:
        super().__init__(run, console, label)
        self._progress = progress
        self._task: TaskID | None = None
        if label is None:
            self._task = progress.add_task(f"[bold]{escape(self._name)}[/] preparing", total=None, note="")

    def start(self, event: StageStarted, done: float) -> None:
        short = self._name
        if self._label and len(short) > WIDEST_LABEL:
            short = f"{short[: WIDEST_LABEL - 1]}…"
        name = f"[bold]{escape(short)}[/] {escape(self._place(event))}"
        if self._task is None:
            self._task = self._progress.add_task(name, note="")
        self._progress.update(self._task, total=1.0, completed=done, description=name, note="")

    def step(self, tick: Tick, done: float, speed: float, left: float | None) -> None:
        assert self._task is not None
        note = _loss(tick) if self._label else _note(tick)
        rest = "" if left is None else f"{duration(left)} left"
        parts = filter(None, (note, f"{speed:.1f}/s", rest))
        self._progress.update(self._task, completed=done, note=" ".join(parts))

    def finish(self, event: StageFinished) -> None:
        rollback = _rollback(event, self._console.width)
        mark = "[yellow]↶[/]" if rollback else "[green]✓[/]"
        self._console.print(f"{mark} {escape(self._summary(event))}", soft_wrap=True)
        if rollback:
            self._console.print(f"[yellow]{escape(rollback)}[/]", soft_wrap=True)
        if self._label and event.stage + 1 == len(self._run.plan.order) and self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


class _Lines(_Display):
    """A line from time to time, and one for every finished stage."""

    def __init__(self, run: Run, console: Console, label: str | None = None) -> None:
        super().__init__(run, console, label)
        self._printed_at = time.perf_counter()

    def start(self, event: StageStarted, done: float) -> None:
        del done
        before = f", {event.done} of them done before" if event.done else ""
        self._print(f"{self._name} stage {self._place(event)}: {event.images} images, {event.steps} steps{before}")

    def step(self, tick: Tick, done: float, speed: float, left: float | None) -> None:
        pause = SECONDS_BETWEEN_LINES if tick.epoch_done else SECONDS_WITHIN_EPOCHS
        if time.perf_counter() - self._printed_at < pause:
            return
        name = f"{self._label} {tick.phase.name}" if self._label else tick.phase.name
        step = "" if tick.epoch_done else f" step {tick.step}/{tick.phase.steps}"
        rest = "" if left is None else f", {duration(left)} left"
        numbers = filter(None, (_note(tick), f"{speed:.1f} steps/s", f"{100 * done:.0f} % of the run{rest}"))
        self._print(f"  {name} epoch {tick.epoch + 1}/{tick.phase.epochs}{step}: {', '.join(numbers)}")

    def finish(self, event: StageFinished) -> None:
        self._print(self._summary(event))
        if rollback := _rollback(event, self._console.width):
            self._print(rollback)

    def _print(self, line: str) -> None:
        self._printed_at = time.perf_counter()
        self._console.print(line, markup=False, soft_wrap=True)


def _loss(tick: Tick) -> str:
    return f"loss {float(tick.means['total']):.2f}" if "total" in tick.means else ""


def _note(tick: Tick) -> str:
    """The loss, and confidence and agreement of the pseudo-labels."""
    parts = [_loss(tick)]
    if "confident" in tick.means:
        parts.append(f"conf {100 * float(tick.means['confident']):.0f}%")
    if "labels_as_predicted" in tick.statistics:
        parts.append(f"agree {100 * tick.statistics['labels_as_predicted']:.0f}%")
    return " ".join(filter(None, parts))


def _rollback(event: StageFinished, width: int) -> str:
    """What the guard rolled back, why, and what to do, wrapped; empty if it accepted the stage."""
    if not event.guard or not event.guard["rolled_back"]:
        return ""
    text = (
        f"{event.domain} was rolled back: {'; '.join(event.guard['reasons'])}. The previous model continues. "
        "Look at the images; --guard off learns from them anyway."
    )
    room = max(min(width, WIDEST_TEXT) - 2, 20)
    return textwrap.indent(textwrap.fill(text, room, break_long_words=False, break_on_hyphens=False), "  ")
