"""What the commands of ``ratp data`` share: an option, progress as a bar or as lines, and the end by Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ratp.cli.console import stderr
from ratp.data.published import Step, StepProgress

Data = Annotated[
    Path | None, typer.Option("--data", metavar="FOLDER", help="The data folder; default $RATP_DATA, else ./data.")
]

SECONDS_BETWEEN_UPDATES = 0.1
SECONDS_BETWEEN_LINES = 10.0
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Ctrl-C in the block ends the program with one line that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        console = stderr()
        below = "\n" if console.is_terminal else ""  # the ^C that was typed
        console.print(f"{below}[yellow]Interrupted.[/] {escape(advice)}", soft_wrap=True)
        sys.exit(130)


@contextmanager
def shown(title: str, *, quiet: bool) -> Iterator[StepProgress | None]:
    """What to call with the progress of the steps of something; None if it is to be quiet.

    Args:
        title: What it is.
        quiet: Whether to show nothing.
    """
    console = stderr()
    if quiet:
        yield None
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("[dim]{task.fields[note]}[/]"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=console, transient=True, expand=True) as progress:
            yield _Bar(title, progress).show
    else:
        yield _Lines(title, console).show


def size_text(number: int) -> str:
    """A number of bytes, for people."""
    value, unit = float(number), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.1f} {_UNITS[unit]}" if unit else f"{number} bytes"


def _amount(step: Step, number: int) -> str:
    return size_text(number) if step.unit == "bytes" else f"{number:,} images"


def _name(title: str, step: Step) -> str:
    return title if step.what in title else f"{title} {step.what}"


class _Bar:
    """One bar, which starts anew with every step."""

    def __init__(self, title: str, progress: Progress) -> None:
        self._title, self._progress = title, progress
        self._task = progress.add_task(escape(title), total=None, note="")
        self._step: Step | None = None
        self._shown_at = 0.0

    def show(self, step: Step, done: int, total: int | None) -> None:
        now = time.perf_counter()
        if step != self._step:
            self._step = step
            self._progress.reset(self._task, total=total, description=escape(_name(self._title, step)))
        elif now - self._shown_at < SECONDS_BETWEEN_UPDATES and done != total:
            return
        self._shown_at = now
        self._progress.update(self._task, completed=done, total=total, note=_amount(step, done))


class _Lines:
    """A line at the start of every step, and one now and then."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console
        self._step: Step | None = None
        self._printed_at = 0.0

    def show(self, step: Step, done: int, total: int | None) -> None:
        if step != self._step:
            self._step = step
            self._print(f"{_name(self._title, step)}{'' if total is None else f': {_amount(step, total)}'}")
        elif time.perf_counter() - self._printed_at >= SECONDS_BETWEEN_LINES:
            share = "" if not total else f", {100 * done // total} %"
            self._print(f"  {_amount(step, done)}{share}")

    def _print(self, line: str) -> None:
        self._printed_at = time.perf_counter()
        self._console.print(line, style="dim", markup=False, soft_wrap=True)
