"""Shows studies while their runs are executed: a bar for all of them, and a line for each that ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ratp._core.files import read_json
from ratp._core.locks import InUseError
from ratp.cli.console import image_notes, print_note
from ratp.cli.progress import interruptible
from ratp.errors import RatpError, brief
from ratp.evaluation.matrix import METRICS
from ratp.executors.local import run_all
from ratp.executors.pool import Result
from ratp.reports.tables import MISSING, duration, number
from ratp.runs.events import Event, StageFinished, StageStarted, Trained
from ratp.runs.run import Run
from ratp.studies.execute import Executor, run_study
from ratp.studies.study import Entry, Study
from ratp.training.device_cache import Placement


def follow_study(
    study: Study,
    console: Console,
    *,
    quiet: bool,
    at_once: int | None = None,
    images: Placement = "auto",
    on: Executor = run_all,
    between_steps: bool = True,
) -> None:
    """Executes the unfinished runs of a study and shows them; signals are as in :func:`interruptible`."""
    make = partial(run_study, study, at_once=at_once, images=images, on=on)
    with interruptible(console, between_steps=between_steps) as stop:
        if quiet:
            make(on_event=lambda run, event: stop.check())
            return
        todo = study.remaining()
        watcher, notes = StudyWatcher(todo), _ImageNotes(study, console)
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
        left = TextColumn("[dim]{task.fields[left]}[/]")
        is_plain = not console.is_terminal
        with Progress(*columns, left, console=console, transient=True, expand=True, disable=is_plain) as bars:
            task = bars.add_task("", total=watcher.total, left="")

            def see(run: Run, event: Event) -> None:
                notes.see(run)
                watcher.see(run, event)
                name = f"{watcher.done_runs}/{len(todo)} runs"
                bars.update(task, completed=watcher.done, description=name, left=watcher.left)
                stop.check()

            def end(entry: Entry, result: Result) -> None:
                line = watcher.ended(entry, result)
                if not is_plain:
                    in_use, failed = isinstance(result, InUseError), isinstance(result, RatpError)
                    mark = f"[dim]{MISSING}[/]" if in_use else "[red]✗[/]" if failed else "[green]✓[/]"
                    console.print(f"{mark} {escape(line)}", soft_wrap=True)
                else:
                    line = f"{line.removesuffix('.')}, {watcher.left}" if watcher.left else line
                    console.print(line, markup=False, soft_wrap=True)

            make(on_event=see, on_end=end)


class _ImageNotes:
    """Prints the notes on the images of a study's runs, each once per stream."""

    def __init__(self, study: Study, console: Console) -> None:
        self._several = len({entry.stream for entry in study.entries}) > 1
        self._console = console
        self._seen: set[int] = set()
        self._printed: set[str] = set()

    def see(self, run: Run) -> None:
        """Reads the notes from the config of a run in progress."""
        if id(run) in self._seen:
            return
        self._seen.add(id(run))
        try:
            config = read_json(run.folder / "config.json")
        except RatpError:  # the run itself will report it
            return
        notes, origins = config.get("notes"), config.get("origins")  # perhaps written by another version
        known = image_notes(notes if isinstance(notes, list) else [], origins if isinstance(origins, dict) else {})
        for note in known:
            text = f"{run.plan.spec.name}, {note}" if self._several else str(note)
            if text not in self._printed:
                self._printed.add(text)
                print_note(text, self._console)


class StudyWatcher:
    """Measures how far the runs of a study are, in stages."""

    def __init__(self, todo: Sequence[Entry]) -> None:
        self.total = sum(len(entry.order) for entry in todo)
        self.done_runs = 0
        self._runs = len(todo)
        self._several = len({(entry.stream, entry.order) for entry in todo}) > 1
        self._started = time.perf_counter()
        # By the name of a run, in stages: where it began and where it is; and the steps of its stage.
        self._begun: dict[str, float] = {}
        self._now: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._reasons: set[str] = set()

    @property
    def done(self) -> float:
        """The stages done, including parts of stages."""
        return sum(self._now.values())

    @property
    def left(self) -> str:
        """How long the rest will take at the speed so far."""
        made = self.done - sum(self._begun.values())
        if made <= 0.02 or self.done_runs == self._runs:
            return ""
        seconds = (time.perf_counter() - self._started) / made * max(self.total - self.done, 0.0)
        return f"{duration(seconds)} left"

    def see(self, run: Run, event: Event) -> None:
        """Handles an event of a run."""
        name = run.folder.name
        if isinstance(event, StageStarted):
            self._steps[name] = max(event.steps, 1)
            now = event.stage + event.done / self._steps[name]
            self._now[name] = max(now, self._begun.setdefault(name, now))  # a run may begin a stage again
        elif isinstance(event, Trained):
            self._now[name] += event.tick.made / self._steps[name]
        elif isinstance(event, StageFinished):
            self._now[name] = event.stage + 1.0

    def ended(self, entry: Entry, result: Result) -> str:
        """Counts a run as ended, and says how; names its stream and order unless all runs share them."""
        title = entry.title if self._several else f"{entry.rows[0].label}, seed {entry.seed}"
        self.done_runs += 1
        end, made = float(len(entry.order)), self._now.get(entry.name, 0.0) - self._begun.get(entry.name, 0.0)
        self._begun[entry.name], self._now[entry.name] = end - made, end  # a failed run does nothing more
        if isinstance(result, InUseError):
            return f"{title}: left to {result.process}"
        if isinstance(result, RatpError):
            reason = brief(result)
            text = "failed for the same reason" if reason in self._reasons else reason
            self._reasons.add(reason)
            return f"{title}: {text}"
        numbers = "  ".join(f"{metric} {number(result.matrix.average(metric))}" for metric in METRICS)
        return f"{title}: {numbers}  ({duration(result.seconds)})"
