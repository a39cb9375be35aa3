"""``ratp report``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from ratp.changed import by_now
from ratp.cli.console import print_json, say, stderr, stdout
from ratp.cli.loading import print_note
from ratp.cli.runs import Json, Quiet
from ratp.errors import RatpError, RunDirectoryError
from ratp.files import safe_name
from ratp.record import CONTINUED, RunRecord, is_run, read_run
from ratp.request import DEFAULT_PRESET
from ratp.streams import STREAMS
from ratp.study import ABOUT, COMPARISON, REPORT

_LONGEST = 40  # letters that changed switches may have in a file's name


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, exported results, or folders of either.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the report; default: `report` in the first folder given, or `comparison` if that is a "
            "study's, whose report stays as it is."
        ),
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
    page = write_report(records, out or _folder(runs[0]))
    if json_:
        print_json({"runs": [record.to_json() for record in records], "report": str(page)})
    elif not quiet:
        print_report(records, stdout())
        say(f"Report: {page}")


def _folder(first: Path) -> Path:
    """Where a report goes unless a folder is asked for."""
    if not first.is_dir():
        return Path(REPORT)
    return first / (COMPARISON if (first / ABOUT).exists() else REPORT)


def _read(path: Path) -> list[RunRecord]:
    """The run at ``path``, or all in that folder: run directories or, if there are none, exported results.

    Of a folder, what is damaged is left out with a word, unless it is all there is.
    """
    if not path.is_dir() or is_run(path):
        return [by_now(read_run(path))]
    inside = sorted(filter(is_run, path.iterdir())) or sorted(path.glob("*.json"))
    if not inside:
        raise RunDirectoryError(f"{path} holds no run: no config.json, no folder with one and no exported result.")
    return [by_now(record) for record in read_whole(inside)]


def read_whole(places: Sequence[Path]) -> list[RunRecord]:
    """The runs at some places; one that is damaged is left out with a word, unless all are.

    Raises:
        RunDirectoryError: If all are, with what is wrong with the first.
    """
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot make {folder}: {error.strerror}.") from error
    written: set[Path] = set()
    for record in records:
        path = _free(folder, _name(record), record, written)
        record.export(path)
        written.add(path)


def _name(record: RunRecord) -> str:
    """What a result is called: stream, method, seed; all that is not usual about it."""
    config, order = record.config, record.matrix.domains
    parts = [config["stream"], record.method, str(record.seed)]
    if config["stream"] in STREAMS and order != STREAMS[config["stream"]].orders["default"]:
        parts.append("-".join(order))
    parts += [CONTINUED] if record.is_continued else []
    parts += [config["preset"]] if config["preset"] != DEFAULT_PRESET else []
    if changed := "-".join(f"{name}={value}" for name, value in record.changed.items()):
        parts.append(changed if len(changed) <= _LONGEST else str(config.get("fingerprint", "changed"))[:12])
    return safe_name("-".join(parts))


def _free(folder: Path, name: str, record: RunRecord, taken: Container[Path]) -> Path:
    """A file of this name or, if that holds another run, of the first number behind it that does not."""
    paths = (folder / (f"{name}-{number}.json" if number > 1 else f"{name}.json") for number in count(1))
    return next(path for path in paths if path not in taken and (not path.exists() or _holds(path, record)))


def _holds(path: Path, record: RunRecord) -> bool:
    """Whether a file has an earlier export of the run; what is no result is another's."""
    try:
        return read_run(path).config.get("fingerprint") == record.config.get("fingerprint")
    except RatpError:
        return False
