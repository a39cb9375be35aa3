"""Showing a study while it runs: how far all of it is, how long it will take, and a line for every run that ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ratp.cli.loading import image_notes, print_note
from ratp.cli.progress import interruptible
from ratp.errors import RatpError, brief
from ratp.events import Event, StageFinished, StageStarted, Trained
from ratp.files import read_json
from ratp.lock import InUseError
from ratp.matrix import METRICS
from ratp.report.cells import MISSING, duration, number
from ratp.run import Run
from ratp.side_by_side import Result, run_all
from ratp.study import Entry, Executor, Study, run_study


def follow_study(
    study: Study,
    console: Console,
    *,
    quiet: bool,
    at_once: int | None = None,
    on: Executor = run_all,
    between_steps: bool = True,
) -> None:
    """Makes all runs of a study and shows it. Ctrl-C and SIGTERM end the program with a word on how to go on.

    Args:
        study: What to run.
        console: Where to show it.
        quiet: Whether to show nothing.
        at_once: How many runs at a time.
        on: What makes them.
        between_steps: Whether that tells of steps; if not, signals wait for none.
    """
    make = partial(run_study, study, at_once=at_once, on=on)
    with interruptible(console, between_steps=between_steps) as stop:
        if quiet:
            make(on_event=lambda run, event: stop.check())
            return
        todo = [entry for entry in study.entries if study.state(entry) not in ("finished", "running")]
        watcher = _Watcher(todo)
        runs = "run" if len(study.entries) == 1 else "runs"
        console.print(f"{escape(study.title)}: {len(todo)} of {len(study.entries)} {runs} to make", soft_wrap=True)
        images = _Images(study, console)
        if not console.is_terminal:

            def tell(entry: Entry, result: Result) -> None:
                line = watcher.ended(entry, result)
                console.print(
                    f"{line.removesuffix('.')}, {watcher.left}" if watcher.left else line, markup=False, soft_wrap=True
                )

            def see(run: Run, event: Event) -> None:
                images.see(run)
                watcher.see(run, event)
                stop.check()

            make(on_event=see, on_end=tell)
            return
        columns = TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn()
        with Progress(
            *columns, TextColumn("[dim]{task.fields[left]}[/]"), console=console, transient=True, expand=True
        ) as bars:
            task = bars.add_task("", total=watcher.total, left="")

            def show(run: Run, event: Event) -> None:
                images.see(run)
                watcher.see(run, event)
                name = f"{watcher.done_runs}/{len(todo)} runs"
                bars.update(task, completed=watcher.done, description=name, left=watcher.left)
                stop.check()

            def end(entry: Entry, result: Result) -> None:
                console.print(f"{_mark(result)} {escape(watcher.ended(entry, result))}", soft_wrap=True)

            make(on_event=show, on_end=end)


def _mark(result: Result) -> str:
    """What stands before the line of a run that ended: done, failed, or another process's."""
    if isinstance(result, InUseError):
        return f"[dim]{MISSING}[/]"
    return "[red]✗[/]" if isinstance(result, RatpError) else "[green]✓[/]"


class _Images:
    """What the user should know about the images of a study's runs, told when the first of a stream begins."""

    def __init__(self, study: Study, console: Console) -> None:
        self._several = len({entry.plan.spec.name for entry in study.entries}) > 1
        self._console = console
        self._looked_at: set[int] = set()
        self._said: set[str] = set()

    def see(self, run: Run) -> None:
        """Takes a run that is under way: by then its config says what was found."""
        if id(run) in self._looked_at:
            return
        self._looked_at.add(id(run))
        try:
            config = read_json(run.folder / "config.json")
        except RatpError:  # whatever is wrong with it, the run will tell
            return
        notes, origins = config.get("notes"), config.get("origins")  # of another version, perhaps
        known = image_notes(notes if isinstance(notes, list) else [], origins if isinstance(origins, dict) else {})
        for note in known:
            text = f"{run.plan.spec.name}, {note}" if self._several else str(note)
            if text not in self._said:
                self._said.add(text)
                print_note(text, self._console)


@dataclass
class _Stages:
    """Stages of a run: those it need not make, those it made, and how far it is in the one it is at."""

    missed: float = 0
    whole: float = 0
    steps: int = 0
    steps_made: int = 0

    @property
    def made(self) -> float:
        return self.whole + self.steps_made / max(self.steps, 1)


class _Watcher:
    """How far the runs of a study are, in stages.

    Attributes:
        total: Stages of all runs to make.
        done: Stages made so far, parts of one included.
        done_runs: Runs that ended.
    """

    def __init__(self, todo: list[Entry]) -> None:
        self.total = sum(len(entry.plan.order) for entry in todo)
        self._started = time.perf_counter()
        self._stages: dict[str, _Stages] = {}
        self._runs = len(todo)
        self._reasons: set[str] = set()
        self._several = len({(entry.plan.spec.name, entry.plan.order) for entry in todo}) > 1
        self.done_runs = 0

    @property
    def done(self) -> float:
        return sum(stages.missed + stages.made for stages in self._stages.values())

    @property
    def left(self) -> str:
        """How long the rest will take, if all goes on as it has."""
        made = sum(stages.made for stages in self._stages.values())
        if made <= 0.02 or self.done_runs == self._runs:
            return ""
        seconds = (time.perf_counter() - self._started) / made * max(self.total - self.done, 0.0)
        return f"{duration(seconds)} left"

    def see(self, run: Run, event: Event) -> None:
        """Takes an event of a run."""
        if isinstance(event, StageStarted):
            before = event.stage + event.done / max(event.steps, 1)
            stages = self._stages.setdefault(run.folder.name, _Stages(missed=before))
            stages.whole = max(before - stages.missed, 0.0)  # a run whose process ended may begin a stage again
            stages.steps, stages.steps_made = event.steps, 0
        elif isinstance(event, Trained):
            self._stages[run.folder.name].steps_made += event.tick.made
        elif isinstance(event, StageFinished):
            stages = self._stages[run.folder.name]
            stages.whole, stages.steps_made = event.stage + 1 - stages.missed, 0

    def ended(self, entry: Entry, result: Result) -> str:
        """A line about a run that ended; stream and order are in it if not all have the same."""
        title = entry.title if self._several else f"{entry.rows[0].label}, seed {entry.plan.seed}"
        self.done_runs += 1
        stages = self._stages.setdefault(entry.name, _Stages())
        stages.missed = len(entry.plan.order) - stages.made  # where it failed, none of the rest is to come
        if isinstance(result, InUseError):
            return f"{title}: left to {result.process}"
        if isinstance(result, RatpError):
            reason = brief(result)
            told = "failed as others did" if reason in self._reasons else reason
            self._reasons.add(reason)
            return f"{title}: {told}"
        numbers = "  ".join(f"{metric} {number(result.matrix.average(metric))}" for metric in METRICS)
        return f"{title}: {numbers}  ({duration(result.seconds)})"
