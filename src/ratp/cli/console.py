"""Writes what commands print: results to standard output, progress and errors to standard error, files where asked.

An output file is checked before the work begins. Only a regular file is replaced, in one step; links are followed,
pipes and devices are written to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from ratp._core.files import write_text, writing
from ratp.data.cache.decoded import OnBad
from ratp.data.read.listing import escaped
from ratp.errors import ConfigError, RatpError, printable, unknown

if TYPE_CHECKING:
    import torch

    from ratp.data.catalogue.fetch import Step, StepProgress
    from ratp.executors.layout import Layout
    from ratp.streams.stream import DataOptions, Report, Stream

WIDTH_WITHOUT_TERMINAL = 100
SECONDS_BETWEEN_UPDATES, SECONDS_BETWEEN_LINES = 0.1, 10.0


class PlainConsole(Console):
    """A console that replaces control characters in names, so that they cannot command the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders, and replaces control characters in text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def stdout() -> Console:
    """Console for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """Console for progress and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = PlainConsole(stderr=stderr, highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return PlainConsole(stderr=stderr, highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    return console


def say(text: str) -> None:
    """Prints a dim line to standard error, never wrapped so that paths and commands can be copied."""
    stderr().print(text, style="dim", markup=False, soft_wrap=True)


def print_error(text: str) -> None:
    """Prints an error to standard error."""
    stderr().print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)


def print_json(data: Any) -> None:
    """Prints one JSON document to standard output."""
    print(json.dumps(data, indent=2, allow_nan=False))


def data_options(
    data: Path | None, on_bad: str, extra_classes: str, progress: Report | None
) -> tuple[DataOptions, list[str]]:
    """Returns the options as given, and a sentence for each invalid value."""
    from ratp.streams.stream import DataOptions, ExtraClasses

    asked = (("value of --on-bad-image:", on_bad, OnBad), ("value of --extra-classes:", extra_classes, ExtraClasses))
    problems = [unknown(name, value, get_args(kind)) for name, value, kind in asked if value not in get_args(kind)]
    return DataOptions(data, cast(OnBad, on_bad), cast(ExtraClasses, extra_classes), progress), problems


@contextmanager
def decoding(console: Console, *, quiet: bool) -> Iterator[Report | None]:
    """Shows the progress of decoding images: one bar per domain on a terminal, one line elsewhere."""
    if quiet:
        yield None
        return
    if not console.is_terminal:
        started: set[str] = set()

        def line(name: str, done: int, of: int) -> None:
            del done
            if name not in started:
                started.add(name)
                files = "1 file" if of == 1 else f"{of:,} files"
                console.print(f"decoding {name}: {files}", markup=False, soft_wrap=True)

        yield line
        return
    columns = (TextColumn("decoding {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, int] = {}

        def bar(name: str, done: int, of: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(escape(name), total=of)
            bars.update(tasks[name], completed=done)  # type: ignore[arg-type]

        yield bar


@contextmanager
def show_steps(title: str, *, quiet: bool) -> Iterator[StepProgress | None]:
    """Shows the progress of the steps of something: a bar on a terminal, lines elsewhere, nothing if quiet."""
    if quiet:
        yield None
        return
    console = stderr()
    current: Step | None = None
    shown_at = 0.0
    columns = TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("[dim]{task.fields[note]}[/]")
    left, is_plain = TimeRemainingColumn(compact=True), not console.is_terminal
    with Progress(*columns, left, console=console, transient=True, expand=True, disable=is_plain) as bars:
        task = bars.add_task(escape(title), total=None, note="")

        def show(step: Step, done: int, total: int | None) -> None:
            nonlocal current, shown_at
            now, begins = time.perf_counter(), step != current
            pause = SECONDS_BETWEEN_LINES if is_plain else SECONDS_BETWEEN_UPDATES
            if not begins and now - shown_at < pause and (is_plain or done != total):
                return
            current, shown_at = step, now
            name = title if step.what in title else f"{title} {step.what}"
            done_text, of = (
                size_text(number) if step.unit == "bytes" else f"{number:,} images" for number in (done, total or 0)
            )
            if begins:
                bars.reset(task, total=total, description=escape(name))
                line = name if total is None else f"{name}: {of}"
            else:
                line = f"  {done_text}, {100 * done // total} %" if total else f"  {done_text}"
            bars.update(task, completed=done, total=total, note=done_text)
            if is_plain:
                console.print(line, style="dim", markup=False, soft_wrap=True)

        yield show


@contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Ends the program on Ctrl-C in the block, with one line of advice on how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        console = stderr()
        below = "\n" if console.is_terminal else ""  # the ^C that was typed
        console.print(f"{below}[yellow]Interrupted.[/] {escape(advice)}", soft_wrap=True)
        sys.exit(130)


def size_text(number: int) -> str:
    """Formats a number of bytes with a unit."""
    if number < 1000:
        return f"{number} bytes"
    value, units = float(number), ["TiB", "GiB", "MiB", "KiB"]
    while value >= 1000 and units:
        value, unit = value / 1024, units.pop()
    return f"{value:,.1f} {unit}"


def print_notes(stream: Stream, console: Console, *, brief: bool = False) -> None:
    """Prints what to know about the images before training; in brief, only what may be wrong with them."""
    for note in image_notes(stream.notes, {} if brief else stream.origins):
        print_note(note, console)
    if stream.files and not brief:
        print_note(f"no labels, so no accuracy: {', '.join(stream.files)}", console)


def image_notes(notes: Iterable[str], origins: Mapping[str, str]) -> list[str]:
    """The notes on images, and on domains that are not the published data."""
    return [*notes, *(f"{name}: {origin}" for name, origin in origins.items())]


def print_note(note: str, console: Console) -> None:
    """Prints a note."""
    console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)


def say_layout(layout: Layout) -> None:
    """Says how runs share a GPU."""
    stderr().print(layout.text, markup=False, soft_wrap=True)


def spread_targets(words: Sequence[str]) -> list[str]:
    """Rewrites ``--targets a b c`` as ``--targets a --targets b --targets c`` for the parser."""
    result: list[str] = []
    inside = first = False
    for word in words:
        if inside and not word.startswith("-"):
            result += [word] if first else ["--targets", word]
            first = False
            continue
        first = word == "--targets"
        inside = first or word.startswith("--targets=")
        result.append(word)
    return result


_STDOUT = 1


def check_out(path: Path, printed: str = "") -> None:
    """Raises RatpError if a path cannot be written, or is standard output where ``printed`` goes already."""
    mixed = f"{printed} goes to standard output" if printed else None
    reason = mixed if _is_stdout(path) else _hindrance(path)
    if reason:
        raise RatpError(f"cannot write {path}: {reason}. Choose another file with --out.")


def write_out(path: Path, text: str) -> None:
    """Writes a text to a path; ``-`` is standard output."""
    if _is_stdout(path):
        print_text(text)
    elif _is_replaced(path):
        write_text(path, text)
    else:
        with writing(path), path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)


def print_text(text: str) -> None:
    """Prints a text to standard output, escaping what its encoding lacks and control characters on a terminal."""
    shown = escaped(text, sys.stdout.encoding or "utf-8")
    print(printable(shown) if sys.stdout.isatty() else shown, end="")


def _is_stdout(path: Path) -> bool:
    """Whether a path is the file that standard output goes to: opening it again would truncate it."""
    try:
        return str(path) == "-" or os.path.samestat(path.stat(), os.fstat(_STDOUT))
    except OSError:
        return False


def _is_replaced(path: Path) -> bool:
    """Whether a path is a regular file or does not exist yet."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _hindrance(path: Path) -> str | None:
    """Why a path cannot be written, if so."""
    try:
        if path.is_dir():
            return "it is a folder"
        if path.exists() and not os.access(path, os.W_OK):
            return "you may not write to it"
        if path.exists() and not _is_replaced(path):
            return None
    except OSError as error:
        return error.strerror or str(error)
    folder = Path(os.path.realpath(path) if path.is_symlink() else path).parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"you may not write to the folder {folder}"


def parse_jobs(jobs: str, problems: list[str]) -> int | None:
    """How many runs to execute at once, None for as many as the device takes; adds mistakes to ``problems``."""
    if jobs.strip() == "auto":
        return None
    if jobs.strip().isdecimal() and int(jobs) > 0:
        return int(jobs)
    problems.append(f"--jobs takes auto or a number of runs, 1 or more, got {jobs!r}; e.g. --jobs 4.")
    return None


def parse_devices(device: str, precision: str, problems: list[str]) -> tuple[str, tuple[torch.device, ...]]:
    """The device to plan for, and all devices if there are several; adds mistakes to ``problems``."""
    from ratp._core.environment import find_devices

    try:
        return device.partition(",")[0].strip(), find_devices(device, precision)
    except ConfigError as error:
        problems += error.problems
        return "auto", ()


def check_side_by_side(way: str, problems: list[str]) -> None:
    """Adds a mistake in ``--side-by-side`` to ``problems``."""
    from ratp.executors.layout import check_way

    if way != "auto":
        _check(check_way, way, problems)


def check_images(place: str, problems: list[str]) -> None:
    """Adds a mistake in ``--images`` to ``problems``."""
    from ratp.training.device_cache import check_placement

    if place != "auto":
        _check(check_placement, place, problems)


def _check(check: Callable[[str], None], value: str, problems: list[str]) -> None:
    try:
        check(value)
    except ConfigError as error:
        problems += error.problems
