"""Runs as tables: Markdown and CSV.

Every table is made per section, one stream in one order: numbers of different streams or orders
never share a table.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence

from ratp.matrix import METRICS
from ratp.record import RunRecord
from ratp.report.cells import (
    MEANING,
    MISSING,
    Cell,
    clean,
    comparison,
    domain_tables,
    number,
    order_text,
    places_in,
    places_marked,
    text,
)
from ratp.report.summary import Group, Measure, Section, by_domain, group_runs, sections

CSV_COLUMNS = ("label", "stream", "order", "seed", "complete", "metric", "stage", "domain", "value")

_MARKDOWN_SPECIAL = re.compile(r"([\\`*|\[\]~$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def markdown_report(
    runs: Sequence[RunRecord], title: str = "Continual domain shift report", preface: Sequence[str] = ()
) -> str:
    """The whole report as Markdown: comparison, metrics by domain, accuracy matrices.

    Args:
        runs: The runs to report.
        title: Its title.
        preface: Blocks of Markdown that stand before the sections, with what the comparisons would say.

    Raises:
        RatpError: If there are no runs.
    """
    blocks = [f"# {escape_markdown(title)}"]
    found = sections(group_runs(runs))
    explained: dict[Measure, None] = dict.fromkeys(m for section in found for m in section.measures)
    blocks.append("\n".join(f"- **{m}** – {MEANING[m][0].lower()}. {MEANING[m][1]}" for m in explained))
    blocks += preface
    for section in found:
        blocks.append(f"## {escape_markdown(section.stream)}: {escape_markdown(order_text(section.order))}")
        places = places_in(section)
        blocks += _notes(section, places) if preface else [_comparison(section, places)]
        blocks += _by_domain(section)
        for part in section.parts:
            blocks.append(f"### Accuracy matrix (%): {escape_markdown(part.name)}, {part.status}")
            blocks.append(_matrix(part))
    return "\n\n".join(blocks) + "\n"


def comparison_markdown(runs: Sequence[RunRecord]) -> str:
    """Only the comparison: a row a method with its seeds and averages, the best in bold.

    Raises:
        RatpError: If there are no runs.
    """
    found = sections(group_runs(runs))
    tables = [_comparison(section, places_marked(comparison(section))) for section in found]
    if len(found) == 1:
        return tables[0] + "\n"
    titled = [
        f"**{escape_markdown(section.stream)}: {escape_markdown(order_text(section.order))}**\n\n{table}"
        for section, table in zip(found, tables, strict=True)
    ]
    return "\n\n".join(titled) + "\n"


def csv_report(runs: Sequence[RunRecord]) -> str:
    """Every number of every run in long form, unrounded: one line a cell of the matrix or a metric.

    Raises:
        RatpError: If there are no runs.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for section in sections(group_runs(runs)):
        for run in section.runs:
            about = [run.label, section.stream, ">".join(section.order), run.seed, str(run.matrix.complete).lower()]
            writer.writerows([*about, *line] for line in _csv_lines(run))
    return file.getvalue()


def _csv_lines(run: RunRecord) -> Iterable[tuple[object, ...]]:
    for stage, row in enumerate(run.matrix.accuracy):
        for domain, value in zip(run.matrix.domains, row, strict=True):
            yield "accuracy", stage, domain, "" if math.isnan(value) else value
    measures: tuple[Measure, ...] = (*METRICS, "Unfamiliar")
    for measure in measures:
        values = by_domain(run, measure)
        for domain, value in values.items():
            yield measure, "", domain, value
        if values:
            yield measure, "", "average", math.fsum(values.values()) / len(values)


def _comparison(section: Section, places: int) -> str:
    head = ["Method", "Seeds", *(f"{measure} (%)" for measure in section.measures)]
    rows: list[list[str]] = []
    for row in comparison(section):
        seeds = str(len(row.part.counted)) if row.part.finished else row.part.status
        rows.append([escape_markdown(row.part.name), seeds, *_values(row.cells)])
    return "\n\n".join([markdown_grid(head, rows), *_notes(section, places)])


def _notes(section: Section, places: int) -> list[str]:
    """What to know about the tables of a section that mark so many places: one list, or none."""
    spread = [section.spread_note] if section.spread_note else []
    lines = [*spread, *mark_note(places), *map(escape_markdown, section.notes())]
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _by_domain(section: Section) -> list[str]:
    tables = domain_tables(section)
    if len(section.parts) == 1:
        lines = [[table.measure, *_values(table.across(section.order)[0][1])] for table in tables]
        return [markdown_grid(["Metric (%)", *map(escape_markdown, section.order), "average"], lines)]
    blocks = []
    for table in tables:
        head = [f"{table.measure} (%)", *map(escape_markdown, table.domains), "average"]
        blocks.append(
            markdown_grid(head, [[escape_markdown(row.part.name), *_values(row.cells)] for row in table.rows])
        )
    return blocks


def _matrix(part: Group) -> str:
    rows = []
    for stage, domain in enumerate(part.order):
        measured = part.accuracy[stage] if stage < len(part.accuracy) else None
        cells = [text(cell) for cell in measured] if measured else [MISSING] * len(part.order)
        if measured:
            cells[stage] = f"**{cells[stage]}**"
        rows.append([f"after {escape_markdown(domain)}", *cells])
    return markdown_grid(["", *map(escape_markdown, part.order)], rows)


def _values(cells: Sequence[Cell]) -> list[str]:
    return [_marked(cell) for cell in cells]


def _marked(cell: Cell) -> str:
    mean, rest = number(cell.spread.mean), text(cell.spread)
    return f"{marked_markdown(mean, cell.rank)}{rest.removeprefix(mean)}"


def marked_markdown(words: str, place: int) -> str:
    """The best in bold, the second best in italics."""
    return {1: f"**{words}**", 2: f"*{words}*"}.get(place, words)


def mark_note(places: int) -> list[str]:
    """What the marks of a table mean that marks so many places."""
    return [["Best in bold."], ["Best in bold, second best in italics."]][places - 1] if places else []


def markdown_grid(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """A table of texts that are escaped already; columns of numbers, all but the first, are aligned to the right."""
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]
    left, right = [":" + "-" * (width - 1) for width in widths], ["-" * (width - 1) + ":" for width in widths]
    count = 1 if numbers else len(head)
    lines = [_aligned(row, widths, count) for row in (head, *rows)]
    lines.insert(1, [*left[:count], *right[count:]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _aligned(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    """The cells of a row, so many of them to the left."""
    return [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]


def escape_markdown(name: str) -> str:
    """A name that is text wherever Markdown shows it."""
    safe = clean(name).replace("&", "&amp;").replace("<", "&lt;")
    return _MARKDOWN_SPECIAL.sub(r"\\\1", safe)
