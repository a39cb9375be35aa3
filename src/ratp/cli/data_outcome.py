"""What became of the domains a command was asked for, one after the other."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from ratp.cli.console import print_json, say, stderr, stdout
from ratp.cli.data_progress import shown
from ratp.data.formats.canonical import ImportReport, origin
from ratp.data.place import domain_file
from ratp.data.published import StepProgress
from ratp.data.sources import DataSet, DomainSource
from ratp.errors import RatpError

Work = Callable[[DomainSource, StepProgress | None], ImportReport]
_NAMED = 20  # files a message names


@dataclass(frozen=True)
class Outcome:
    """What became of a domain.

    Attributes:
        name: ``set/domain``.
        path: Its zip or folder; None if it is not there.
        report: What was written, if anything.
        problem: Why it is not there.
    """

    name: str
    path: Path | None
    report: ImportReport | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        about = {
            "domain": self.name,
            "path": None if self.path is None else str(self.path),
            "origin": None if self.path is None else origin(self.path),
            "problem": self.problem,
        }
        if self.report is None:
            return about
        counts, notes, skipped = dict(self.report.images), list(self.report.notes), list(self.report.skipped)
        return {**about, "images": self.report.total, "classes": counts, "notes": notes, "skipped": skipped}

    def print(self) -> None:
        """The domain on a line, if it is there, and what is worth knowing about it."""
        if self.path is None:
            return
        made = f" ({made})" if (made := origin(self.path)) else ""
        if self.report is None:
            _line(f"{self.name}: there already, {self.path}{made}")
            return
        count = len(self.report.images)
        classes = "1 class" if count == 1 else f"{count} classes"
        _line(f"{self.name}: {self.report.total:,} images in {classes}, {self.path}{made}")
        skipped = self.report.skipped
        more = [f"… and {len(skipped) - _NAMED:,} more"] if len(skipped) > _NAMED else []
        for note in (*self.report.notes, *(f"Left out: {problem}" for problem in skipped[:_NAMED]), *more):
            say(f"  {note}")


def _line(text: str) -> None:
    stdout().print(text, markup=False, soft_wrap=True)


def there(folder: Path, chosen: DataSet, source: DomainSource) -> Path | None:
    """The zip or folder of a domain, if it is in the folder of its set."""
    path = domain_file(folder, chosen.name, source.name)
    return next((place for place in (path, path.with_suffix("")) if place.exists()), None)


def obtain(
    chosen: DataSet, sources: Sequence[DomainSource], folder: Path, work: Work, *, keep: bool, quiet: bool
) -> list[Outcome]:
    """Has the domains made one after the other; one that fails does not keep the others from being made.

    Args:
        chosen: The data set.
        sources: The domains.
        folder: The data folder.
        work: Makes one.
        keep: Whether a domain that is there already is left alone.
        quiet: Whether to print nothing.
    """
    outcomes = []
    for source in sources:
        name, path = f"{chosen.name}/{source.name}", there(folder, chosen, source) if keep else None
        if path is not None:
            outcome = Outcome(name, path)
        else:
            try:
                with shown(name, quiet=quiet) as show:
                    report = work(source, show)
                outcome = Outcome(name, report.path, report)
            except RatpError as error:
                folder_given = f"--data {shlex.quote(str(folder))}"
                outcome = Outcome(name, None, problem=str(error).replace("--data FOLDER", folder_given))
        outcomes.append(outcome)
        if not quiet:
            outcome.print()
    return outcomes


def finish(outcomes: Sequence[Outcome], *, json_: bool) -> None:
    """Prints what is to be printed at the end, and ends with exit code 1 if a domain is not there."""
    failed = [outcome for outcome in outcomes if outcome.problem is not None]
    if json_:
        print_json({"domains": [outcome.to_json() for outcome in outcomes], "ok": not failed})
    else:
        for problem in dict.fromkeys(outcome.problem for outcome in failed):
            names = ", ".join(outcome.name for outcome in failed if outcome.problem == problem)
            stderr().print(f"[bold red]error:[/] {escape(names)}: {escape(problem or '')}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)
