"""Runs as LaTeX tables for a paper: metrics as blocks, domains as rows, methods as columns; many methods as rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ratp.record import RunRecord
from ratp.report.cells import Cell, clean, domain_tables, number, places_in
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
    "[": "{[}",
    "*": "{*}",
    '"': r"\textquotedbl{}",
    "\N{REPLACEMENT CHARACTER}": "?",
}

_ABREAST = 6  # methods that fit beside each other, with their spread


def latex_report(runs: Sequence[RunRecord], opening: str = "") -> str:
    """One booktabs table a section; the best number of a row bold, the second best underlined.

    Args:
        runs: The runs to report.
        opening: What stands before the tables.

    Raises:
        RatpError: If there are no runs.
    """
    tables = [_table(section) for section in sections(group_runs(runs))]
    needs = "% Needs \\usepackage[T1]{fontenc} and \\usepackage{adjustbox,booktabs}.\n"
    return needs + "\n".join([opening, *tables] if opening else tables)


def latex_table(caption: str, columns: str, head: Sequence[str], blocks: Sequence[Sequence[Sequence[str]]]) -> str:
    """A booktabs table of texts that are escaped already, a rule above every block of rows; shrunk if need be."""
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{caption}}}",
        r"  \begin{adjustbox}{max width=\linewidth, max totalheight=0.8\textheight}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        _line(head),
    ]
    for rows in blocks:
        lines += [r"    \midrule", *map(_line, rows)]
    lines += [r"    \bottomrule", r"  \end{tabular}", r"  \end{adjustbox}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def marked_latex(words: str, place: int) -> str:
    """The best in bold, the second best underlined, in mathematics."""
    return {1: rf"\mathbf{{{words}}}", 2: rf"\underline{{{words}}}"}.get(place, words)


def mark_note_latex(places: int) -> str:
    """What the marks of a table mean that marks so many places."""
    return ("", "Best in bold.", "Best in bold, second best underlined.")[places]


def _table(section: Section) -> str:
    many = len(section.parts) > _ABREAST
    head, blocks = _methods_down(section) if many else _methods_across(section)
    return latex_table(_caption(section), f"ll{'r' * (len(head) - 2)}", head, blocks)


def _methods_across(section: Section) -> tuple[list[str], list[list[list[str]]]]:
    """Head and blocks of a table with a column for every method, as the paper has them."""
    blocks = [
        [
            [table.measure if i == 0 else "", domain, *(_cell(row.cells[i]) for row in table.rows)]
            for i, domain in enumerate((*map(escape_latex, table.domains), "average"))
        ]
        for table in domain_tables(section)
    ]
    return ["", "Domain", *map(_header, section.parts)], blocks


def _methods_down(section: Section) -> tuple[list[str], list[list[list[str]]]]:
    """Head and blocks of a table with a row for every method that was measured, which stays legible with many."""
    blocks = []
    for table in domain_tables(section):
        measured = [(part, cells) for part, cells in table.across(section.order) if any(c.spread.n for c in cells)]
        rows = [[_header(part), *map(_cell, cells)] for part, cells in measured]
        blocks.append([[table.measure if i == 0 else "", *row] for i, row in enumerate(rows)])
    return ["", "Method", *map(escape_latex, section.order), "average"], blocks


def _line(cells: Sequence[str]) -> str:
    return f"    {' & '.join(cells)} \\\\"


def _caption(section: Section) -> str:
    order = r" $\rightarrow$ ".join(map(escape_latex, section.order))
    spread = section.spread_note.replace("±", r"$\pm$")
    words = [spread, mark_note_latex(places_in(section)), *map(escape_latex, section.notes())]
    told = "".join(f" {text}" for text in words if text)
    return f"{escape_latex(section.stream)} ({order}): accuracy in percent.{told}"


def _header(part: Group) -> str:
    return escape_latex(part.name if part.finished else f"{part.name} ({part.status})")


def _cell(cell: Cell) -> str:
    if not cell.spread.n:
        return "--"
    mean = number(cell.spread.mean)
    mean = marked_latex(mean, cell.rank)
    return f"${mean}$" if math.isnan(cell.spread.deviation) else rf"${mean} \pm {number(cell.spread.deviation)}$"


def escape_latex(name: str) -> str:
    """A name that is text wherever LaTeX sets it."""
    return "".join(_SPECIAL.get(c, c) for c in clean(name))
