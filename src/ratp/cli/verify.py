"""``ratp verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ratp.cli.console import print_json, stdout
from ratp.cli.options import Json, Quiet

if TYPE_CHECKING:
    from ratp.runs.verify import Check


def verify(
    places: Annotated[
        list[Path],
        typer.Argument(help="Run directories, studies, exported results, folders of these, or cache folders."),
    ],
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Read every stored byte of runs, results or a cache; say what is damaged and what to do. Exit code 1 if any is."""
    from ratp.runs.verify import check_place

    checks = [check for place in places for check in check_place(place)]
    damaged = sum(len(check.damaged) for check in checks)
    if json_:
        print_json({"intact": not damaged, "checked": [_plain(check) for check in checks]})
    elif not quiet:
        for check in checks:
            _print(check)
        files = sum(len(check.read_files) for check in checks)
        stdout().print(f"{files:,} files read, " + (f"{damaged:,} damaged." if damaged else "none damaged."))
    if damaged:
        raise typer.Exit(1)


def _plain(check: Check) -> dict[str, object]:
    damaged = [{"file": str(item.path), "problem": item.problem, "advice": item.advice} for item in check.damaged]
    return {
        "path": str(check.path),
        "kind": check.kind,
        "files": len(check.read_files),
        "damaged": damaged,
        "notes": check.notes,
    }


def _print(check: Check) -> None:
    """Prints a line for what was checked, then what is damaged, each with advice, then notes."""
    console = stdout()
    mark = "[red]✗[/]" if check.damaged else "[green]✓[/]"
    console.print(f"{mark} {check.kind} {escape(str(check.path))}", soft_wrap=True)
    for item in check.damaged:
        console.print(f"  {escape(item.problem)}", soft_wrap=True)
        console.print(f"  → {escape(item.advice)}", soft_wrap=True)
    for note in check.notes:
        console.print(f"  [dim]{escape(note)}[/]", soft_wrap=True)
