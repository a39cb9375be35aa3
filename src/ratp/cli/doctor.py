"""``ratp doctor``: is this machine ready, and what to do if not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from ratp.cli.console import print_json, say, stdout
from ratp.cli.doctor_folders import cache, data, disk, runs
from ratp.cli.doctor_machine import machine
from ratp.cli.findings import Finding
from ratp.cli.runs import Json
from ratp.data.cache import cache_folder


def examine(*, thorough: bool = False) -> Iterator[Finding]:
    """Looks at versions, devices, disk, data, cache and the runs below the current folder.

    Args:
        thorough: Whether to read all images and kept networks, too, which may take long.
    """
    here = Path.cwd()
    yield from machine()
    yield disk("cache", cache_folder(), "set RATP_CACHE to a folder you may write to", needed=False)
    yield from cache(thorough=thorough)
    yield disk("folder", here, "change to a folder you may write to, or use --out")
    yield from data(thorough=thorough)
    yield from runs(here)


def doctor(
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Decode every image of the benchmarks, and read every kept network.")
    ] = False,
    json_: Json = False,
) -> None:
    """Check versions, devices, memory, disk, data, cache and runs, and say what to do about each finding.

    The exit code is 1 if something keeps ratp from working.
    """
    findings = list(examine(thorough=thorough))
    blocked = any(finding.blocks and not finding.ok for finding in findings)
    if json_:
        told = [asdict(f) | {"advice": "" if f.ok else f.advice} for f in findings]
        print_json({"findings": told, "ok": not blocked})
    else:
        _print(findings)
    if blocked:
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        mark = "[green]✓[/]" if finding.ok else "[red]✗[/]" if finding.blocks else "[yellow]![/]"
        advice = "" if finding.ok else f"\n[yellow]→ {escape(finding.advice)}[/]"
        table.add_row(mark, escape(finding.what), escape(finding.found) + advice)
    stdout().print(table)
    bad = [finding for finding in findings if not finding.ok]
    blocking = sum(finding.blocks for finding in bad)
    verdict = f"{blocking} of them must be mended first." if blocking else "None keeps ratp from working."
    say(f"{len(bad)} of {len(findings)} deserve a look. {verdict}" if bad else "All is well.")
