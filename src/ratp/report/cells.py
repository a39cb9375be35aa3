"""What every table shares: rows and columns, numbers as text, the best marked, the words explained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ratp.report.summary import Group, Measure, Section
from ratp.statistics import NOTHING, Summary, best_two

MISSING = "–"

MEANING: dict[Measure, tuple[str, str]] = {
    "TDG": (
        "Before a domain is learned",
        "Target domain generalisation: mean accuracy on a domain over all stages before it is trained on.",
    ),
    "TDA": (
        "Right after it is learned",
        "Target domain adaptation: accuracy on a domain at the end of the stage that trains on it.",
    ),
    "FA": (
        "Once later domains are learned",
        "Forgetting alleviation: mean accuracy on a domain over all stages after its own.",
    ),
    "Unfamiliar": (
        "While it is being learned",
        "Unfamiliar Period: area under the accuracy curve of a new domain during the stage that trains on it.",
    ),
}


@dataclass(frozen=True)
class Cell:
    """A number of a table and its rank among the lines: 1 best, 2 second best, 0 anything else."""

    spread: Summary
    rank: int = 0


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    part: Group
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class DomainTable:
    """A measure on every domain it is defined on, then its average, line by line."""

    measure: Measure
    domains: tuple[str, ...]
    rows: tuple[Row, ...]

    def across(self, order: Sequence[str]) -> list[tuple[Group, list[Cell]]]:
        """The rows with a cell for every domain of an order, empty where the measure is not defined."""
        columns = (*self.domains, None)
        found = [(row.part, dict(zip(columns, row.cells, strict=True))) for row in self.rows]
        empty = Cell(NOTHING)
        return [(part, [cells.get(domain, empty) for domain in (*order, None)]) for part, cells in found]


def comparison(section: Section) -> tuple[Row, ...]:
    """The averages of every measure, a row a line of the section."""
    return _rows(section, [[part.spread(measure) for part in section.parts] for measure in section.measures])


def domain_tables(section: Section) -> list[DomainTable]:
    """One table a measure; measures that no domain has are left out."""
    tables = []
    for measure in section.measures:
        domains = section.columns(measure)
        columns = [[part.spread(measure, domain) for part in section.parts] for domain in (*domains, None)]
        if domains:
            tables.append(DomainTable(measure, domains, _rows(section, columns)))
    return tables


def places_marked(rows: Iterable[Row]) -> int:
    """How many places are marked in some rows: 0, 1 or 2."""
    return max((cell.rank for row in rows for cell in row.cells), default=0)


def places_in(section: Section) -> int:
    """How many places are marked in all tables of a section."""
    return places_marked([*comparison(section), *(row for table in domain_tables(section) for row in table.rows)])


def number(value: float) -> str:
    """A percentage with one decimal, or a dash for NaN."""
    return MISSING if math.isnan(value) else f"{value:.1f}"


def text(spread: Summary, joint: str | None = " ± ") -> str:
    """A mean, with its standard deviation behind ``joint`` where it has one."""
    if joint is None or math.isnan(spread.deviation):
        return number(spread.mean)
    return f"{number(spread.mean)}{joint}{number(spread.deviation)}"


def places(values: Sequence[float | None]) -> list[int]:
    """1 for the best, 2 for the second best of more than two, 0 for anything else.

    Values are compared as shown: equal ones share a place, several best leave no second, and where all are equal none
    has a place.

    Args:
        values: None where a row does not compete.
    """
    rivals = {str(i): value for i, value in enumerate(values) if value is not None}
    best, second = best_two(rivals)
    if len(best) == len(rivals):
        return [0] * len(values)
    return [1 if str(i) in best else 2 if str(i) in second and len(rivals) > 2 else 0 for i in range(len(values))]


def clean(name: str) -> str:
    """A name fit for display: control characters and the like are replaced."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def clean_lines(text: str) -> str:
    """A text of several lines fit for display, likewise."""
    return "\n".join(map(clean, text.splitlines()))


def order_text(order: Sequence[str], arrow: str = " > ") -> str:
    """The order of a stream on one line."""
    return arrow.join(clean(domain) for domain in order)


def duration(seconds: float) -> str:
    """A time in the unit a person would use."""
    if math.isnan(seconds):
        return MISSING
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _rows(section: Section, columns: Sequence[Sequence[Summary]]) -> tuple[Row, ...]:
    ranked = [
        places([s.mean if part.competes and s.n else None for s, part in zip(column, section.parts, strict=True)])
        for column in columns
    ]
    return tuple(
        Row(part, tuple(Cell(column[i], ranks[i]) for column, ranks in zip(columns, ranked, strict=True)))
        for i, part in enumerate(section.parts)
    )
