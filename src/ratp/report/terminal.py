"""Runs as tables in a terminal, fitted to its width and readable without colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ratp.record import RunRecord
from ratp.report.cells import (
    MEANING,
    MISSING,
    Cell,
    DomainTable,
    clean,
    comparison,
    domain_tables,
    order_text,
    text,
)
from ratp.report.summary import Group, Measure, Section, group_runs, sections
from ratp.statistics import Summary

_STYLE: dict[Measure, str] = {"TDG": "cyan", "TDA": "bold", "FA": "magenta", "Unfamiliar": ""}
_JOINTS = (" ± ", "±", None)
_BEST, _SINGLE = "*", "¹"
_ASCII = str.maketrans({"±": "+-", "×": "x", MISSING: "-", _SINGLE: "^1"})
_GAP = 2
_WIDEST_HEAD = 14

Line = tuple[str, list[Text]]


def print_report(runs: Sequence[RunRecord], console: Console) -> None:
    """Prints matrices and metrics of the runs, a section a stream and order.

    Raises:
        RatpError: If there are no runs.
    """
    found = sections(group_runs(runs))
    for section in found:
        _SectionPrinter(console, section).section()
    explain(found, console)


def print_comparison(section: Section, console: Console) -> None:
    """Prints only the averages of every method."""
    printer = _SectionPrinter(console, section)
    printer.title()
    printer.compare()
    printer.notes()


def explain(found: Sequence[Section], console: Console) -> None:
    """Says in a sentence what the measures of some sections mean."""
    measures = dict.fromkeys(measure for section in found for measure in section.measures)
    meant = [Text.assemble((m, _STYLE[m]), f" {MEANING[m][0].lower()}") for m in measures]
    console.print(Text("Accuracy: ").append_text(Text(", ").join(meant)).append("."))


class Printer:
    """Prints tables that fit the width of a console.

    Args:
        console: Where to print.
        marks_single: Whether to mark numbers from a single seed where there is no room for deviations.
    """

    def __init__(self, console: Console, *, marks_single: bool = False) -> None:
        self.console = console
        self._marks_single = marks_single
        self._printed: set[str] = set()
        self._shortened = False

    def value(self, cell: Cell, joint: str | None) -> Text:
        """A number of a table, the best marked."""
        possible = f"{_SINGLE}{_BEST}" if self._marks_single and joint is None else _BEST
        stands = {_SINGLE: cell.spread.is_single, _BEST: cell.rank == 1}
        marks = self.show("".join(mark for mark in possible if stands[mark])).ljust(len(self.show(possible)))
        style = "dim" if not cell.spread.n else "bold" if cell.rank == 1 else ""
        return Text(f"{self.show(text(cell.spread, joint))}{marks}", style=style)

    def grid(self, title: str, corner: str, heads: Sequence[str], lines: Callable[[str | None], list[Line]]) -> None:
        """Prints a table: with standard deviations if they fit, split by columns if it must be."""
        heads = [f"{self.show(head)} " for head in heads]
        width = self.console.width
        names = [self.show(name) for name, _ in lines(None)]
        first = min(max(map(cell_len, (corner, *names))), max(14, width // 3)) + _GAP
        for joint in _JOINTS:
            rows = [cells for _, cells in lines(joint)]
            widths = [_width(head, [cells[i] for cells in rows]) for i, head in enumerate(heads)]
            if first + sum(widths) <= width:
                break
        shortened = joint is None and lines(_JOINTS[0]) != lines(_JOINTS[1])
        self._shortened |= shortened
        self._printed.update(cell.plain for cells in rows for cell in cells)
        self.say(f"{title}, means only" if shortened else title, "bold")
        for chunk in _chunks(widths, width - first):
            table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
            table.add_column(Text(corner), max_width=first - _GAP, overflow="fold")
            for i in chunk:
                table.add_column(Text(heads[i]), justify="right", max_width=widths[i] - _GAP, overflow="fold")
            for name, cells in zip(names, rows, strict=True):
                table.add_row(Text(name), *(cells[i] for i in chunk))
            self.console.print(table)
            self.console.print()

    def mark_notes(self, spread: str, over: str) -> list[str]:
        """What the marks mean that stand in the tables so far.

        Args:
            spread: What to say of numbers with ±.
            over: What the deviations are over.
        """
        means = [f"Means only: no room for deviations over {over}."] if self._shortened else []
        means += [f"With {_SINGLE}: from a single seed."] if self._stands(_SINGLE) else []
        notes = [spread if self._stands("±") else "", " ".join(means)]
        notes.append(f"{_BEST} marks the best of a column." if self._stands(_BEST) else "")
        return [note for note in notes if note]

    def _stands(self, mark: str) -> bool:
        """Whether a mark stands in a table so far."""
        return any(self.show(mark) in words for words in self._printed)

    def say(self, words: str, style: str) -> None:
        """A line or a paragraph."""
        self.console.print(Text(self.show(words), style=style))

    def show(self, words: str) -> str:
        """Text the terminal can print: plain marks and question marks where its encoding is a small one."""
        if self.console.options.ascii_only:
            words = words.translate(_ASCII)
        return clean(words).encode(self.console.encoding, "replace").decode(self.console.encoding)


class _SectionPrinter(Printer):
    """Prints one section."""

    def __init__(self, console: Console, section: Section) -> None:
        super().__init__(console, marks_single=section.unlike_seeds)
        self.content = section

    def section(self) -> None:
        self.title()
        for part in self.content.parts:
            title = f"{part.name}: accuracy (%), {part.status}"
            self.grid(title, "", part.order, partial(self.matrix_lines, part))
        self.legend()
        tables = domain_tables(self.content)
        if len(self.content.parts) == 1:
            self.grid("Metrics (%)", "", [*self.content.order, "average"], partial(self.metric_lines, tables))
        else:
            for table in tables:
                title = f"{table.measure}, {MEANING[table.measure][0].lower()} (%)"
                self.grid(title, "Method", [*table.domains, "average"], partial(self.domain_lines, table))
            self.compare()
        self.notes()

    def title(self) -> None:
        self.say(f"{self.content.stream}: {order_text(self.content.order)}", "bold underline")
        self.console.print()

    def compare(self) -> None:
        heads = ["Seeds", *self.content.measures]
        self.grid("Comparison, averages over domains (%)", "Method", heads, self.comparison_lines)

    def matrix_lines(self, part: Group, joint: str | None) -> list[Line]:
        lines = []
        for stage, name in enumerate(part.order):
            row = part.accuracy[stage] if stage < len(part.accuracy) else None
            cells = [self.accuracy(row[d] if row else None, stage, d, joint) for d in range(len(part.order))]
            lines.append((f"after {name}", cells))
        return lines

    def metric_lines(self, tables: Sequence[DomainTable], joint: str | None) -> list[Line]:
        rows = [(table.measure, table.across(self.content.order)[0][1]) for table in tables]
        return [(measure, [self.value(cell, joint) for cell in cells]) for measure, cells in rows]

    def domain_lines(self, table: DomainTable, joint: str | None) -> list[Line]:
        return [(row.part.name, [self.value(cell, joint) for cell in row.cells]) for row in table.rows]

    def comparison_lines(self, joint: str | None) -> list[Line]:
        lines = []
        for row in comparison(self.content):
            seeds = str(len(row.part.counted)) if row.part.finished else row.part.status
            lines.append((row.part.name, [Text(f"{seeds} "), *(self.value(cell, joint) for cell in row.cells)]))
        return lines

    def accuracy(self, cell: Summary | None, stage: int, domain: int, joint: str | None) -> Text:
        measure: Measure = "TDA" if stage == domain else "TDG" if stage < domain else "FA"
        if cell is None or not cell.n:
            return Text(self.show(f"{MISSING} "), style="dim")
        words = text(cell, joint)
        return Text(self.show(f"[{words}]" if measure == "TDA" else f"{words} "), style=_STYLE[measure])

    def legend(self) -> None:
        legend = Text.assemble(
            ("[in brackets] TDA, the domain's own stage", _STYLE["TDA"]),
            "   ",
            ("above: TDG", _STYLE["TDG"]),
            "   ",
            ("below: FA", _STYLE["FA"]),
        )
        self.console.print(legend)
        self.console.print()

    def notes(self) -> None:
        notes = [*self.mark_notes(self.content.spread_note, "seeds"), *self.content.notes()]
        for note in notes:
            self.say(note, "dim")
        if notes:
            self.console.print()


def _width(head: str, cells: Sequence[Text]) -> int:
    return max(min(cell_len(head), _WIDEST_HEAD), *(cell.cell_len for cell in cells)) + _GAP


def _chunks(widths: Sequence[int], room: int) -> list[list[int]]:
    chunks: list[list[int]] = [[]]
    used = 0
    for i, width in enumerate(widths):
        if chunks[-1] and used + width > room:
            chunks.append([])
            used = 0
        chunks[-1].append(i)
        used += width
    return chunks
