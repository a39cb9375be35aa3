"""``ratp report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratp.cli.console import print_json, say, stdout
from ratp.cli.runs import Json, Quiet
from ratp.errors import RunDirectoryError
from ratp.files import safe_name
from ratp.record import RunRecord, read_run


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, exported results, or folders of either.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; default: `report` in the first folder given.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Also write each run as one small JSON file into this folder.")
    ] = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Compare runs: tables on the terminal; Markdown, CSV, LaTeX, plots and one HTML page in a folder."""
    from ratp.report.page import write_report
    from ratp.report.terminal import print_report

    records = [record for path in runs for record in _read(path)]
    if export is not None:
        _export(records, export)
    folder = out or (runs[0] if runs[0].is_dir() else Path()) / "report"
    page = write_report(records, folder)
    if json_:
        print_json({"runs": [record.to_json() for record in records], "report": str(page)})
    elif not quiet:
        print_report(records, stdout())
        say(f"Report: {page}")


def _read(path: Path) -> list[RunRecord]:
    """The run at ``path``, or all in that folder: run directories or, if there are none, exported results."""
    if not path.is_dir() or (path / "config.json").exists():
        return [read_run(path)]
    inside = sorted(item for item in path.iterdir() if (item / "config.json").exists()) or sorted(path.glob("*.json"))
    if not inside:
        raise RunDirectoryError(f"{path} holds no run: no config.json, no folder with one and no exported result.")
    return [read_run(item) for item in inside]


def _export(records: list[RunRecord], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot make {folder}: {error.strerror}.") from error
    names = [f"{record.config['stream']}-{record.method}-{record.seed}" for record in records]
    orders = ["-".join(record.matrix.domains) for record in records]
    if len(set(zip(names, orders, strict=True))) > len(set(names)):
        names = [f"{name}-{order}" for name, order in zip(names, orders, strict=True)]
    names = [safe_name(name) for name in names]
    for number, (record, name) in enumerate(zip(records, names, strict=True)):
        repeated = names[:number].count(name)
        record.export(folder / (f"{name}-{repeated + 1}.json" if repeated else f"{name}.json"))
