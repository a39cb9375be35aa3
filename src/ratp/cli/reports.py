"""``ratp report``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from ratp._core.files import safe_name
from ratp.cli.console import print_json, print_note, say, stderr, stdout
from ratp.cli.options import Json, Quiet
from ratp.errors import RatpError, RunDirectoryError
from ratp.runs import DEFAULT_PRESET
from ratp.runs.record import CONTINUED, RunRecord, is_run, read_run
from ratp.streams import STREAMS
from ratp.studies.study import ABOUT, COMPARISON, REPORT

_LONGEST = 40  # characters of changed switches in a file name


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, exported results, or folders of either.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the report; default: `report` in the first folder given, or `comparison` if that is a "
            "study's."
        ),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Also write each run as one small JSON file into this folder.")
    ] = None,
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Compare runs: tables on the terminal; Markdown, CSV, LaTeX, plots and one HTML page in a folder."""
    from ratp.reports.page import write_report
    from ratp.reports.tables import print_report

    records = [record for path in runs for record in _read(path)]
    if export is not None:
        _export(records, export)
    inside = COMPARISON if (runs[0] / ABOUT).exists() else REPORT
    page = write_report(records, out or (runs[0] / inside if runs[0].is_dir() else Path(REPORT)))
    if json_:
        print_json({"runs": [record.to_json() for record in records], "report": str(page)})
    elif not quiet:
        print_report(records, stdout())
        say(f"Report: {page}")


def _read(path: Path) -> list[RunRecord]:
    """Reads the run at ``path``, or all in that folder: run directories or, if there are none, exported results."""
    from ratp.runs.plan import with_current_defaults

    if not path.is_dir() or is_run(path):
        return [with_current_defaults(read_run(path))]
    inside = sorted(filter(is_run, path.iterdir())) or sorted(path.glob("*.json"))
    if not inside:
        raise RunDirectoryError(f"{path} holds no run: no config.json, no folder with one and no exported result.")
    return [with_current_defaults(record) for record in read_whole(inside)]


def read_whole(places: Sequence[Path]) -> list[RunRecord]:
    """Reads the runs at some paths, leaving out damaged ones with a note."""
    found: list[RunRecord] = []
    damage: list[RunDirectoryError] = []
    for place in places:
        try:
            found.append(read_run(place))
        except RunDirectoryError as error:
            damage.append(error)
    if damage and not found:
        raise damage[0]
    for what in damage:
        print_note(f"left out: {what}", stderr())
    return found


def _export(records: list[RunRecord], folder: Path) -> None:
    """Writes each run to the first of NAME.json, NAME-2.json, … that does not hold another run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot create {folder}: {error.strerror}.") from error
    written: set[Path] = set()
    for record in records:
        name = _name(record)
        paths = (folder / (f"{name}-{number}.json" if number > 1 else f"{name}.json") for number in count(1))
        path = next(p for p in paths if p not in written and (not p.exists() or _holds(p, record)))
        record.export(path)
        written.add(path)


def _name(record: RunRecord) -> str:
    """Names a result after stream, method and seed, and whatever is not the default."""
    config, order = record.config, record.matrix.domains
    parts = [config["stream"], record.method, str(record.seed)]
    if config["stream"] in STREAMS and order != STREAMS[config["stream"]].orders["default"]:
        parts.append("-".join(order))
    parts += [CONTINUED] if record.is_continued else []
    parts += [config["preset"]] if config["preset"] != DEFAULT_PRESET else []
    if changed := "-".join(f"{name}={value}" for name, value in record.changed.items()):
        parts.append(changed if len(changed) <= _LONGEST else str(config.get("fingerprint", "changed"))[:12])
    return safe_name("-".join(parts))


def _holds(path: Path, record: RunRecord) -> bool:
    """Whether a file is an earlier export of the run."""
    try:
        return read_run(path).config.get("fingerprint") == record.config.get("fingerprint")
    except RatpError:
        return False
