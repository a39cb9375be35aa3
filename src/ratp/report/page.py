"""The report as files: one self-contained page, and its tables and figures for use elsewhere."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FunctionLoader, StrictUndefined
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from ratp.errors import RunDirectoryError
from ratp.files import write_bytes
from ratp.notes import Note
from ratp.record import RunRecord
from ratp.report.cells import (
    MEANING,
    MISSING,
    Row,
    clean,
    clean_lines,
    comparison,
    domain_tables,
    duration,
    number,
    order_text,
    places_in,
    places_marked,
    text,
)
from ratp.report.chapters import SINGLE, Preface, preface_csv, preface_latex, preface_markdown
from ratp.report.features import feature_maps
from ratp.report.guard import COLUMNS, judged
from ratp.report.latex import latex_report
from ratp.report.plots import accuracy_curves, matrix_heatmap, sample_sheet, unfamiliar_curves
from ratp.report.settings import differing, flatten
from ratp.report.style import encode
from ratp.report.summary import Group, Measure, Section, group_runs, sections
from ratp.report.tables import csv_report, markdown_report
from ratp.statistics import NOTHING, Summary, best_two

Kind = Literal["png", "svg"]
_MOST_NAMED = 3  # methods that share a best number


@dataclass(frozen=True)
class Tile:
    """A measure in plain words and who does best at it.

    Attributes:
        measure: The measure.
        title: What it is, in short.
        meaning: What it is.
        best: The best number; NOTHING: there is none.
        who: Who has it.
        is_shared: Whether several have it.
        is_single: Whether all who have it have a single seed, and others more.
    """

    measure: Measure
    title: str
    meaning: str
    best: Summary
    who: str
    is_shared: bool
    is_single: bool


@dataclass(frozen=True)
class SettingsTable:
    """Settings that every run shares, and those that differ, a column a group."""

    shared: dict[str, str]
    heads: tuple[str, ...]
    differing: dict[str, tuple[str, ...]]


class PictureWarning(Note):
    """Of what a run has kept for the pictures of its report, something is damaged."""


def write_report(
    runs: Sequence[RunRecord], folder: Path, console: Console | None = None, preface: Preface | None = None
) -> Path:
    """Writes page, tables and figures into a folder, which is made if it is not there.

    Figures of a second, third, … stream or order end in ``-2``, ``-3``, ….

    Args:
        runs: The runs to report.
        folder: Where to write.
        console: Told of every file written.
        preface: What stands before the sections.

    Returns:
        The page, ``index.html``.

    Raises:
        RatpError: If there are no runs.
        RunDirectoryError: If the folder cannot be written or a run is damaged.
    """
    found = sections(group_runs(runs))
    contents = {"metrics.csv": csv_report(runs).encode(errors="backslashreplace")}
    if preface is None:
        contents |= {"report.md": markdown_report(runs).encode(), "report.tex": latex_report(runs).encode()}
    else:
        contents |= {
            "report.md": markdown_report(runs, preface.title, preface_markdown(preface)).encode(),
            "report.tex": latex_report(runs, preface_latex(preface)).encode(),
            "tables.csv": preface_csv(preface).encode(errors="backslashreplace"),
        }
        contents |= {name: words.encode(errors="backslashreplace") for name, words in preface.files.items()}
        for picture in preface.pictures:
            contents |= {f"{picture.name}.{kind}": data for kind, data in picture.files.items()}
    pictures: list[dict[str, str]] = []
    for number_, section in enumerate(found, start=1):
        suffix = f"-{number_}" if number_ > 1 else ""
        drawn = _drawn(section)
        contents.update({f"{name}{suffix}.{kind}": data for (name, kind), data in drawn.items()})
        pictures.append({name: _embedded(drawn, name) for name, _ in drawn})
    contents["index.html"] = page_html(found, pictures, preface).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot make {folder}: {error.strerror or error}. Choose another folder.") from error
    for name, data in contents.items():
        write_bytes(folder / name, data)
        _tell(console, folder / name)
    return folder / "index.html"


def page_html(found: Sequence[Section], pictures: Sequence[dict[str, str]], preface: Preface | None = None) -> str:
    """The page: everything inline, nothing fetched, every name escaped.

    Args:
        found: The sections to show.
        pictures: For each section, data addresses by figure name.
        preface: What stands before them.
    """
    environment = Environment(
        loader=FunctionLoader(lambda name: files("ratp.report").joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = {"clean": clean, "lines": clean_lines, "number": number, "spread": text, "duration": duration}
    environment.filters.update(shown, address=_address)
    streams = ", ".join(dict.fromkeys(clean(section.stream) for section in found))
    return environment.get_template("page.html").render(
        title=clean(preface.title) if preface else streams,
        preface=preface,
        sections=[_view(section, images) for section, images in zip(found, pictures, strict=True)],
        missing=MISSING,
        single=SINGLE,
        meaning=MEANING,
        signs=tuple(COLUMNS),
    )


def _drawn(section: Section) -> dict[tuple[str, Kind], bytes]:
    drawn: dict[tuple[str, Kind], bytes] = {}
    makers: dict[str, Callable[[Sequence[Group]], Figure | None]] = {
        "matrix": matrix_heatmap,
        "curves": accuracy_curves,
        "unfamiliar": unfamiliar_curves,
    }
    kinds: tuple[Kind, ...] = ("png", "svg")
    for name, make in makers.items():
        figure = make(section.groups)
        if figure is not None:
            drawn.update({(name, kind): encode(figure, kind) for kind in kinds})
    sampled = _sampled(section)
    kept = [("randmix", sample_sheet, sampled)] if sampled else []
    for name, show, run in [*kept, *((name, feature_maps, run) for name, run in _embedding(section).items())]:
        try:
            figure = show(run)
        except RunDirectoryError as error:  # what is kept for pictures decides nothing
            warnings.warn(f"a picture is left out: {error}", PictureWarning, stacklevel=2)
            continue
        if figure is not None:
            drawn[name, "png"] = encode(figure, "png")
    return drawn


def _sampled(section: Section) -> RunRecord | None:
    return next((run for run in section.runs if run.samples), None)


def _embedding(section: Section) -> dict[str, RunRecord]:
    """For each method the first run that kept embeddings, by the name of its figure."""
    first: dict[str, RunRecord] = {}
    for run in section.runs:
        if run.features:
            first.setdefault(run.label, run)
    return {f"features{f'-{number}' if number else ''}": run for number, run in enumerate(first.values())}


def _embedded(drawn: dict[tuple[str, Kind], bytes], name: str) -> str:
    vector = drawn.get((name, "svg"))
    return _address(vector, "svg+xml") if vector is not None else _address(drawn[name, "png"], "png")


def _address(data: bytes, kind: str) -> str:
    """A picture as an address that holds it."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _tell(console: Console | None, path: Path) -> None:
    if console is not None:
        console.print(Text(f"wrote {clean(str(path))}"), soft_wrap=True)


def _view(section: Section, images: dict[str, str]) -> dict[str, Any]:
    rows = comparison(section)
    sampled = _sampled(section)
    return {
        "stream": section.stream,
        "order": section.order,
        "order_text": order_text(section.order, " → "),
        "parts": section.parts,
        "methods": len(section.groups),
        "runs": section.runs,
        "measures": section.measures,
        "several_seeds": section.several_seeds,
        "spread_note": section.spread_note,
        "notes": section.notes(),
        "tiles": [_tile(section, measure, i, rows) for i, measure in enumerate(section.measures)],
        "comparison": rows,
        "places": places_marked(rows),
        "places_by_domain": places_in(section),
        "blocks": [(table.measure, table.across(section.order)) for table in domain_tables(section)],
        "images": images,
        "sampled": sampled,
        "name_of": section.name_of,
        "embeddings": [(run, images[name]) for name, run in _embedding(section).items() if name in images],
        "config": _settings(section, [flatten(run.config) for run in section.runs]),
        "environment": _settings(section, [flatten(run.environment) for run in section.runs]),
        "times": [(run, _stage_seconds(run)) for run in section.runs],
        "guarded": [item for run in section.runs for item in judged(run)],
    }


def _tile(section: Section, measure: Measure, column: int, rows: Sequence[Row]) -> Tile:
    rivals = [row for row in rows if row.part.competes] or (list(rows) if len(rows) == 1 else [])
    found = {row.part.name: row.cells[column].spread for row in rivals if row.cells[column].spread.n}
    if not found:
        return Tile(measure, *MEANING[measure], NOTHING, "", False, False)
    names = sorted(best_two({name: spread.mean for name, spread in found.items()})[0], key=list(found).index)
    best = [found[name] for name in names]
    is_single = section.unlike_seeds and all(spread.is_single for spread in best)
    return Tile(measure, *MEANING[measure], best[0], _holders(names, len(found)), len(names) > 1, is_single)


def _holders(names: Sequence[str], rivals: int) -> str:
    """Who has the best number, among so many."""
    if rivals == 1:
        return clean(names[0])
    if len(names) > _MOST_NAMED:
        return f"shared by {'all ' if len(names) == rivals else ''}{len(names)} methods"
    return f"{'shared by' if len(names) > 1 else 'best:'} {', '.join(map(clean, names))}"


def _settings(section: Section, tables: Sequence[dict[str, str]]) -> SettingsTable:
    unlike = differing(tables)
    names = [group.label for group in section.groups for _ in group.runs]
    of_group: dict[str, list[dict[str, str]]] = {}
    for name, table in zip(names, tables, strict=True):
        of_group.setdefault(name, []).append(table)
    return SettingsTable(
        {name: value for name, value in tables[0].items() if name not in unlike},
        tuple(of_group),
        {name: tuple(_joined(members, name) for members in of_group.values()) for name in unlike},
    )


def _joined(members: Sequence[dict[str, str]], name: str) -> str:
    return ", ".join(dict.fromkeys(member.get(name, MISSING) for member in members))


def _stage_seconds(run: RunRecord) -> list[float]:
    seconds = {event.get("stage"): float(event.get("seconds", "nan")) for event in run.events("stage_finished")}
    return [seconds.get(stage, float("nan")) for stage in range(len(run.matrix.domains))]
