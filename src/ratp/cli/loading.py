"""Reading images for a command: its options, a bar while files are decoded, and what there is to say afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast, get_args

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ratp.data.decoded import OnBad
from ratp.errors import unknown
from ratp.stream import DataOptions, ExtraClasses, Report, Stream


def data_options(
    data: Path | None, on_bad: str, extra_classes: str, progress: Report | None
) -> tuple[DataOptions, list[str]]:
    """The options as asked for, and a sentence for each that does not exist."""
    asked = (("value of --on-bad-image:", on_bad, OnBad), ("value of --extra-classes:", extra_classes, ExtraClasses))
    problems = [unknown(name, value, get_args(kind)) for name, value, kind in asked if value not in get_args(kind)]
    return DataOptions(data, cast(OnBad, on_bad), cast(ExtraClasses, extra_classes), progress), problems


@contextmanager
def decoding(console: Console, *, quiet: bool) -> Iterator[Report | None]:
    """Shows how far the decoding of every domain has come: a bar on a terminal, a line elsewhere."""
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


def print_notes(stream: Stream, console: Console, *, brief: bool = False) -> None:
    """What the user should know about the images before training begins; in brief, only what may be amiss with them."""
    for note in image_notes(stream.notes, {} if brief else stream.origins):
        print_note(note, console)
    if stream.files and not brief:
        print_note(f"no labels, so no accuracy: {', '.join(stream.files)}", console)


def image_notes(notes: Iterable[str], origins: Mapping[str, str]) -> list[str]:
    """What there is to know about images, and which domains are not the published data."""
    return [*notes, *(f"{name} is not the published data: {origin}" for name, origin in origins.items())]


def print_note(note: str, console: Console) -> None:
    """A line that deserves a look."""
    console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)


def spread_targets(words: Sequence[str]) -> list[str]:
    """``--targets a b c`` written as ``--targets a --targets b --targets c``, which is what the parser takes."""
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
