"""Writes a report: one self-contained page, and its tables and figures as files."""

from __future__ import annotations

import base64
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FunctionLoader, StrictUndefined
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from ratp._core.files import write_bytes
from ratp.errors import Note, RunDirectoryError
from ratp.evaluation.matrix import METRICS, best_two, mean_of
from ratp.reports import markup
from ratp.reports.details import (
    BASELINE,
    INTERVAL,
    Confusions,
    RunDetails,
    baseline_of,
    detailed,
    interval_of,
    test_images,
    tested_on,
    with_intervals,
)
from ratp.reports.details_plots import loss_curves, reliability
from ratp.reports.features import feature_maps
from ratp.reports.plots import accuracy_curves, matrix_heatmap, sample_sheet, unfamiliar_curves
from ratp.reports.style import encode
from ratp.reports.summary import Group, Measure, Section, differing, flatten, group_runs, sections
from ratp.reports.tables import (
    MEANING,
    MISSING,
    Table,
    clean,
    comparison_table,
    domain_tables,
    duration,
    most_places,
    number,
    online_tables,
    order_text,
    with_deviation,
)
from ratp.runs.record import RunRecord, is_undone

Kind = Literal["png", "svg"]
_MOST_NAMED = 3  # methods that share a best number
_MANY = 5  # methods, beyond which tables are sorted and pictures show these and the baseline
_MOST_SECTIONS = 3  # streams and orders of a page that shows losses and what runs get wrong
_SMALL = 110  # dots per inch of pictures with many pixels

# The most domains that pictures show: there is a panel for each domain, with all domains on its axis.
MOST_DRAWN = 24
# The most domains of a report: its tables grow with their square.
MOST_DOMAINS = 200
# The guard's indicators: column heads, and names in the journal; of a pair, before and after the stage.
GUARD_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "Structure": ("structure",),
    "Recognition": ("recognition",),
    "Variety": ("variety_before", "variety"),
    "Largest class": ("largest_before", "largest"),
    "Confidence": ("confidence_before", "confidence"),
    "Source right": ("source_before", "source"),
    "Source kept": ("source_kept",),
    "Memory right": ("memory_before", "memory"),
    "Memory kept": ("memory_kept",),
    "Class spread": ("spread_before", "spread"),
}


@dataclass(frozen=True)
class Picture:
    """A figure: base name of its files, and their contents by suffix."""

    name: str
    title: str
    caption: str
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Chapter:
    """Tables and pictures that answer one question."""

    title: str
    intro: str
    items: tuple[Table | Picture, ...]


@dataclass(frozen=True)
class Preface:
    """What a study's report shows before the sections; ``files`` are further files by name."""

    title: str
    lead: str
    chapters: tuple[Chapter, ...]
    files: Mapping[str, str]

    @property
    def items(self) -> list[Table | Picture]:
        """The items of all chapters."""
        return [item for chapter in self.chapters for item in chapter.items]


class PictureWarning(Note):
    """A file that a run kept for the pictures of its report is damaged."""


def write_report(
    runs: Sequence[RunRecord], folder: Path, console: Console | None = None, preface: Preface | None = None
) -> Path:
    """Writes page, tables and figures into a folder, which is created if needed.

    Figures of a second, third, … stream or order end in ``-2``, ``-3``, ….
    """
    found = sections(group_runs(runs))
    if many := next((run for run in runs if len(run.matrix.domains) > MOST_DOMAINS), None):
        count = len(many.matrix.domains)
        raise RunDirectoryError(f"{many.path} has {count} domains: a report shows up to {MOST_DOMAINS}. Leave it out.")
    contents = {"metrics.csv": markup.csv_report(runs).encode(errors="backslashreplace")}
    if preface is None:
        contents |= {
            "report.md": markup.markdown_report(runs).encode(),
            "report.tex": markup.latex_report(runs).encode(),
        }
    else:
        tables = [item for item in preface.items if isinstance(item, Table)]
        lead = f"\\paragraph{{{markup.escape_latex(preface.title)}}} {markup.escape_latex(preface.lead)}\n"
        contents |= {
            "report.md": markup.markdown_report(runs, preface.title, _markdown(preface)).encode(),
            "report.tex": markup.latex_report(runs, "\n".join([lead, *map(markup.latex_block, tables)])).encode(),
            "tables.csv": markup.csv_tables(tables).encode(errors="backslashreplace"),
        }
        contents |= {name: words.encode(errors="backslashreplace") for name, words in preface.files.items()}
        for item in preface.items:
            if isinstance(item, Picture):
                contents |= {f"{item.name}.{kind}": data for kind, data in item.files.items()}
    pictures: list[dict[str, str]] = []
    details: list[list[RunDetails]] = []
    for place, section in enumerate(found, start=1):
        suffix = f"-{place}" if place > 1 else ""
        few = len(found) <= _MOST_SECTIONS
        about = detailed(section, MOST_DRAWN) if few else []
        drawn = _drawn(section, about, with_losses=few)
        contents |= {f"{name}{suffix}.{kind}": data for (name, kind), data in drawn.items()}
        details.append(about)
        # of a figure in both, the SVG is drawn last and shown, unless it is large
        shown = {
            name: kind
            for name, kind in drawn
            if (name, "png") not in drawn or kind == "png" or len(section.parts) <= _MANY
        }
        mime: dict[Kind, str] = {"svg": "svg+xml", "png": "png"}
        pictures.append({name: _data_url(drawn[name, kind], mime[kind]) for name, kind in shown.items()})
    contents["index.html"] = page_html(found, pictures, preface, details).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot create {folder}: {error.strerror or error}. Choose another folder.") from error
    for name, data in contents.items():
        write_bytes(folder / name, data)
        if console is not None:
            console.print(Text(f"wrote {clean(str(folder / name))}"), soft_wrap=True)
    return folder / "index.html"


def _markdown(preface: Preface) -> list[str]:
    """Lead and chapters, block by block."""
    blocks = [markup.escape_markdown(preface.lead)]
    for chapter in preface.chapters:
        blocks += [f"## {chapter.title}", markup.escape_markdown(chapter.intro)]
        for item in chapter.items:
            if isinstance(item, Table):
                blocks += markup.markdown_block(item)
            else:
                title = markup.escape_markdown(item.title)
                blocks += [f"### {title}", f"![{title}]({item.name}.svg)", markup.escape_markdown(item.caption)]
    return blocks


def page_html(
    found: Sequence[Section],
    pictures: Sequence[dict[str, str]],
    preface: Preface | None = None,
    details: Sequence[Sequence[RunDetails]] = (),
) -> str:
    """The page: everything inline, nothing fetched, every name escaped.

    Per section, ``pictures`` holds data URLs, and ``details`` what runs get wrong.
    """
    environment = Environment(
        loader=FunctionLoader(lambda name: files("ratp.reports").joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = {"clean": clean, "number": number, "spread": with_deviation, "duration": duration, "address": _data_url}
    environment.filters.update(shown, lines=lambda text: "\n".join(map(clean, text.splitlines())))
    streams = ", ".join(dict.fromkeys(clean(section.stream) for section in found))
    return environment.get_template("page.html").render(
        title=clean(preface.title) if preface else streams,
        preface=preface,
        sections=list(map(_view, found, pictures, details or [()] * len(found))),
        missing=MISSING,
        single=markup.SINGLE,
        meaning=MEANING,
        indicators=tuple(GUARD_COLUMNS),
        interval=INTERVAL,
        is_matrix=lambda item: isinstance(item, Confusions),
    )


def _drawn(section: Section, details: Sequence[RunDetails], *, with_losses: bool) -> dict[tuple[str, Kind], bytes]:
    """The figures of a section as files, by name and kind."""
    drawn: dict[tuple[str, Kind], bytes] = {}
    groups = _pictured(section)
    if len(section.order) > MOST_DRAWN:
        what = f"{section.stream} has {len(section.order)} domains, and pictures show up to {MOST_DRAWN}"
        warnings.warn(f"pictures are left out: {what}", PictureWarning, stacklevel=2)
        return drawn
    figures: dict[str, Figure | None] = {"matrix": matrix_heatmap(groups), "curves": accuracy_curves(groups)}
    figures |= {"unfamiliar": unfamiliar_curves(groups)}
    figures |= {f"calibration-{place}": reliability(one.last) for place, one in enumerate(details) if one.last}
    for name, figure in figures.items():
        if figure is not None:
            drawn |= {(name, "png"): encode(figure, "png"), (name, "svg"): encode(figure, "svg")}
    if with_losses and (losses := loss_curves([(part.name, part.runs[0]) for part in section.parts])):
        drawn["losses", "png"] = encode(losses, "png", _SMALL)
    sampled = _sampled(section)
    kept = [("randmix", sample_sheet, sampled)] if sampled else []
    for name, show, run in [*kept, *((name, feature_maps, run) for name, run in _embedding(section).items())]:
        try:
            figure = show(run)
        except RunDirectoryError as error:  # no number depends on it
            warnings.warn(f"a picture is left out: {error}", PictureWarning, stacklevel=2)
            continue
        if figure is not None:
            drawn[name, "png"] = encode(figure, "png", _SMALL if name == "randmix" else 200, photos=name == "randmix")
    return drawn


def _pictured(section: Section) -> list[Group]:
    """The groups in heat maps and curves: of many the best by the mean of the metrics, and the baseline."""
    if len(section.parts) <= _MANY + 1:
        return list(section.groups)
    best = {section.parts[k].label: None for k in _ranking(section, METRICS)}
    labels = {*list(best)[:_MANY], BASELINE}
    return [group for group in section.groups if group.label in labels]


def _sampled(section: Section) -> RunRecord | None:
    return next((run for run in section.runs if run.samples), None)


def _embedding(section: Section) -> dict[str, RunRecord]:
    """Per method, the first run that kept embeddings, by the name of its figure."""
    first: dict[str, RunRecord] = {}
    for run in section.runs:
        if run.features:
            first.setdefault(run.label, run)
    return {f"features{f'-{number}' if number else ''}": run for number, run in enumerate(first.values())}


def _data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _view(section: Section, images: dict[str, str], details: Sequence[RunDetails]) -> dict[str, Any]:
    comparison = with_intervals(section, comparison_table(section))
    tables = [with_intervals(section, table) for table in domain_tables(section)]
    sampled = _sampled(section)
    many = len(section.parts) > _MANY
    by_mean = _ranking(section, METRICS) if many else list(range(len(section.parts)))
    lines = _by_part(section, comparison)
    config = _settings(section, [flatten(run.config) for run in section.runs])
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
        "tiles": [_tile(section, measure) for measure in section.measures],
        "comparison": [lines[k] for k in by_mean],
        "means": [_mean(section.parts[k], METRICS) for k in by_mean] if many else [],
        "sorted": {m: [lines[k] for k in _ranking(section, (m,))] for m in section.measures} if many else {},
        "places": comparison.places,
        "places_by_domain": most_places(section),
        "blocks": [
            (table.kind, [_by_part(section, table.across(section.order))[k] for k in by_mean]) for table in tables
        ],
        "test_images": test_images(section),
        "tested_on": tested_on(section),
        "has_intervals": any(value.spread.startswith(" [") for value in comparison.values),
        "details": details,
        "some_pictured": len(_pictured(section)) < len(section.groups),
        "images": images,
        "online": online_tables(section),
        "sampled": sampled,
        "name_of": section.name_of,
        "embeddings": [(run, images[name]) for name, run in _embedding(section).items() if name in images],
        "config": config,
        "environment": _settings(section, [flatten(run.environment) for run in section.runs]),
        "times": [(run, _stage_seconds(run)) for run in section.runs],
        "guarded": [item for run in section.runs for item in _guarded(run)],
    }


def _mean(part: Group, measures: Sequence[Measure]) -> float:
    return mean_of([spread.mean for measure in measures if (spread := part.spread(measure)).n])


def _ranking(section: Section, measures: Sequence[Measure]) -> list[int]:
    """The lines by the mean of some measures, the best first; unfinished ones last."""
    means = [_mean(part, measures) for part in section.parts]
    keys = [(not part.finished, math.isnan(m), -m) for part, m in zip(section.parts, means, strict=True)]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _by_part(section: Section, table: Table) -> list[tuple[Group, tuple[Any, ...]]]:
    return [(part, entries) for part, (_, entries) in zip(section.parts, table.rows, strict=True)]


def _tile(section: Section, measure: Measure) -> dict[str, Any]:
    """A measure in plain words, its best number and who has it."""
    title, meaning = MEANING[measure]
    rivals = [part for part in section.parts if part.competes] or (section.parts if len(section.parts) == 1 else [])
    found = {part.name: spread for part in rivals if (spread := part.spread(measure)).n}
    tile: dict[str, Any] = {"measure": measure, "title": title, "meaning": meaning}
    if not found:
        return tile
    names = sorted(best_two({name: spread.mean for name, spread in found.items()})[0], key=list(found).index)
    best = [found[name] for name in names]
    is_single = section.unlike_seeds and all(spread.is_single for spread in best)
    if len(names) > _MOST_NAMED:
        who = f"shared by {'all ' if len(names) == len(found) else ''}{len(names)} methods"
    else:
        prefix = "shared by " if len(names) > 1 else "best: " if len(found) > 1 else ""
        who = prefix + ", ".join(map(clean, names))
    tile |= {"best": best[0], "who": who, "is_shared": len(names) > 1, "is_single": is_single}
    part = next(part for part in rivals if part.name == names[0])
    ends = None if section.several_seeds else interval_of(part, measure)
    known = baseline_of(section, measure)
    return {**tile, "interval": ends, "baseline": known if known and known[0] not in names else None}


def _settings(section: Section, tables: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Settings that all runs share, those that differ with one column per group, and those that only one group has."""
    unlike = differing(tables)
    names = [group.label for group in section.groups for _ in group.runs]
    by_group: dict[str, list[dict[str, str]]] = {}
    for name, table in zip(names, tables, strict=True):
        by_group.setdefault(name, []).append(table)
    rows: dict[str, list[str]] = {}
    own: dict[str, dict[str, str]] = {}
    for name in unlike:
        owners = [label for label, members in by_group.items() if any(name in one for one in members)]
        values = {
            label: ", ".join(dict.fromkeys(one.get(name, MISSING) for one in members))
            for label, members in by_group.items()
        }
        if len(owners) == 1 and len(by_group) > 1:
            own.setdefault(owners[0], {})[name] = values[owners[0]]
        else:
            rows[name] = list(values.values())
    shared = {name: value for name, value in tables[0].items() if name not in unlike}
    return {"shared": shared, "heads": tuple(by_group), "differing": rows, "own": own}


def _stage_seconds(run: RunRecord) -> list[float]:
    seconds = {event.get("stage"): float(event.get("seconds", "nan")) for event in run.events("stage_finished")}
    return [seconds.get(stage, float("nan")) for stage in range(len(run.matrix.domains))]


def _guarded(run: RunRecord) -> list[dict[str, Any]]:
    """What the guard decided on every stage it judged, and its indicators as in ``GUARD_COLUMNS``."""
    found = []
    for event in run.guarded:
        guard = event["guard"]
        reasons = "; ".join(map(str, guard.get("reasons", ())))
        decision = "rolled back" if is_undone(event) else "kept, though refused" if reasons else "accepted"
        cells = []
        for names in GUARD_COLUMNS.values():
            values = [guard.get("signs", {}).get(name) for name in names]
            known = all(isinstance(value, int | float) and abs(value) < sys.maxsize for value in values)
            cells.append(" → ".join(f"{value:.2f}" for value in values) if known else MISSING)
        domain = str(event.get("domain", MISSING))
        found.append({"run": run, "domain": domain, "decision": decision, "reasons": reasons, "cells": cells})
    return found
