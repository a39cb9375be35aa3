"""Runs as tables: terminal, Markdown, CSV and LaTeX.

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
    text,
)
from ratp.report.latex import latex_report
from ratp.report.summary import Group, Measure, Section, by_domain, group_runs, sections
from ratp.report.terminal import print_report

__all__ = ["comparison_markdown", "csv_report", "latex_report", "markdown_report", "print_report"]

CSV_COLUMNS = ("label", "stream", "order", "seed", "complete", "metric", "stage", "domain", "value")

_MARKDOWN_SPECIAL = re.compile(r"([\\`*|\[\]~$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def markdown_report(runs: Sequence[RunRecord]) -> str:
    """The whole report as Markdown: comparison, metrics by domain, accuracy matrices.

    Raises:
        RatpError: If there are no runs.
    """
    blocks = ["# Continual domain shift report"]
    found = sections(group_runs(runs))
    explained: dict[Measure, None] = dict.fromkeys(m for section in found for m in section.measures)
    blocks.append("\n".join(f"- **{m}** – {MEANING[m][0].lower()}. {MEANING[m][1]}" for m in explained))
    for section in found:
        blocks.append(f"## {_escape(section.stream)}: {_escape(order_text(section.order))}")
        blocks.append(_comparison(section))
        blocks += _by_domain(section)
        for part in section.parts:
            blocks.append(f"### Accuracy matrix (%): {_escape(part.name)}, {part.status}")
            blocks.append(_matrix(part))
    return "\n\n".join(blocks) + "\n"


def comparison_markdown(runs: Sequence[RunRecord]) -> str:
    """Only the comparison: a row a method with its seeds and averages, the best in bold.

    Raises:
        RatpError: If there are no runs.
    """
    found = sections(group_runs(runs))
    if len(found) == 1:
        return _comparison(found[0]) + "\n"
    titled = [f"**{_escape(s.stream)}: {_escape(order_text(s.order))}**\n\n{_comparison(s)}" for s in found]
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


def _comparison(section: Section) -> str:
    head = ["Method", "Seeds", *(f"{measure} (%)" for measure in section.measures)]
    rows: list[list[str]] = []
    for row in comparison(section):
        seeds = str(len(row.part.counted)) if row.part.finished else row.part.status
        rows.append([_escape(row.part.name), seeds, *_values(row.cells)])
    spread = ["Mean ± sample standard deviation over seeds."] if section.several_seeds else []
    lines = [*spread, *(_escape(note) for note in section.notes())]
    return "\n\n".join([_grid(head, rows), *(["\n".join(f"- {line}" for line in lines)] if lines else [])])


def _by_domain(section: Section) -> list[str]:
    tables = domain_tables(section)
    if len(section.parts) == 1:
        lines = [[table.measure, *_values(table.across(section.order)[0][1])] for table in tables]
        return [_grid(["Metric (%)", *map(_escape, section.order), "average"], lines)]
    blocks = []
    for table in tables:
        head = [f"{table.measure} (%)", *map(_escape, table.domains), "average"]
        blocks.append(_grid(head, [[_escape(row.part.name), *_values(row.cells)] for row in table.rows]))
    return blocks


def _matrix(part: Group) -> str:
    rows = []
    for stage, domain in enumerate(part.order):
        measured = part.accuracy[stage] if stage < len(part.accuracy) else None
        cells = [text(cell) for cell in measured] if measured else [MISSING] * len(part.order)
        if measured:
            cells[stage] = f"**{cells[stage]}**"
        rows.append([f"after {_escape(domain)}", *cells])
    return _grid(["", *map(_escape, part.order)], rows)


def _values(cells: Sequence[Cell]) -> list[str]:
    return [_marked(cell) for cell in cells]


def _marked(cell: Cell) -> str:
    if cell.rank != 1:
        return text(cell.spread)
    mean, rest = number(cell.spread.mean), text(cell.spread)
    return f"**{mean}**{rest.removeprefix(mean)}"


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [_aligned(head, widths), rule, *(_aligned(row, widths) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]


def _escape(name: str) -> str:
    safe = clean(name).replace("&", "&amp;").replace("<", "&lt;")
    return _MARKDOWN_SPECIAL.sub(r"\\\1", safe)
