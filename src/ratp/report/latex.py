"""Runs as LaTeX tables for a paper: metrics as blocks, domains as rows, methods as columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ratp.record import RunRecord
from ratp.report.cells import Cell, clean, domain_tables, number
from ratp.report.summary import Group, Section, group_runs, sections

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "\N{REPLACEMENT CHARACTER}": "?",
}


def latex_report(runs: Sequence[RunRecord]) -> str:
    """One booktabs table a section; the best number of a row bold, the second best underlined.

    Raises:
        RatpError: If there are no runs.
    """
    tables = [_table(section) for section in sections(group_runs(runs))]
    return "% Needs \\usepackage[T1]{fontenc} and \\usepackage{booktabs}.\n" + "\n".join(tables)


def _table(section: Section) -> str:
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_caption(section)}}}",
        rf"  \begin{{tabular}}{{ll{'r' * len(section.parts)}}}",
        r"    \toprule",
        f"    & Domain & {' & '.join(_header(part) for part in section.parts)} \\\\",
    ]
    for table in domain_tables(section):
        lines.append(r"    \midrule")
        for i, domain in enumerate((*map(_escape, table.domains), "average")):
            cells = " & ".join(_cell(row.cells[i]) for row in table.rows)
            lines.append(f"    {table.measure if i == 0 else ''} & {domain} & {cells} \\\\")
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _caption(section: Section) -> str:
    order = r" $\rightarrow$ ".join(map(_escape, section.order))
    spread = " Mean $\\pm$ standard deviation over seeds." if section.several_seeds else ""
    second = ", second best underlined" if sum(part.competes for part in section.parts) > 2 else ""
    best = f" Best in bold{second}." if sum(part.competes for part in section.parts) > 1 else ""
    notes = "".join(f" {_escape(note)}" for note in section.notes())
    return f"{_escape(section.stream)} ({order}): accuracy in percent.{spread}{best}{notes}"


def _header(part: Group) -> str:
    return _escape(part.name if part.finished else f"{part.name} ({part.status})")


def _cell(cell: Cell) -> str:
    if not cell.spread.n:
        return "--"
    mean = number(cell.spread.mean)
    mean = {1: rf"\mathbf{{{mean}}}", 2: rf"\underline{{{mean}}}"}.get(cell.rank, mean)
    return f"${mean}$" if math.isnan(cell.spread.sd) else rf"${mean} \pm {number(cell.spread.sd)}$"


def _escape(name: str) -> str:
    return "".join(_SPECIAL.get(c, c) for c in clean(name))
