"""The tables of a report, and how a terminal shows them: fitted to its width and readable without colour.

Every table belongs to a section, one stream in one order: numbers of different streams or orders never share a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from ratp.evaluation.matrix import Summary, best_two
from ratp.evaluation.online import ORDERS
from ratp.reports.summary import ONLINE, Group, Measure, Section, group_runs, online_scores, sections
from ratp.runs.record import RunRecord

MISSING = "–"
MEANING: dict[str, tuple[str, str]] = {
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


# The images' orders of arrival, and what the columns of a pass mean.
ARRIVAL = {"shuffled": "images shuffled", "clustered": "images mostly class by class"}
ONLINE_NOTE = (
    "Every target streamed past once before its stage. Accuracy (%) on its images 1 to 64 and so on, and on all; lost: "
    "images predicted wrong that the model after the stage (TDA) would have predicted right; T95: images until a "
    "window of 256 first reached 95 % of TDA, a dash if none did; harm: share of windows (%) in which the model from "
    "before the stage was better."
)


def number(value: float) -> str:
    """Formats a percentage with one decimal, NaN as a dash."""
    return MISSING if math.isnan(value) else f"{value:.1f}"


def with_deviation(summary: Summary) -> str:
    """Formats a mean, followed by its standard deviation if it has one."""
    value = Value.with_deviation(summary)
    return value.text + value.spread


def clean(name: str) -> str:
    """Replaces control characters and other unprintable ones."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def order_text(order: Sequence[str], arrow: str = " > ") -> str:
    """Formats the order of a stream on one line."""
    return arrow.join(clean(domain) for domain in order)


def duration(seconds: float) -> str:
    """Formats a time in the unit a person would use."""
    if math.isnan(seconds):
        return MISSING
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass(frozen=True)
class Value:
    """A number in a table; the default is an empty cell."""

    number: float = math.nan
    text: str = MISSING
    spread: str = ""  # shown after the text: a deviation or an interval
    summary: Summary | None = None  # of the values it is the mean of
    place: int = 0  # 1 best, 2 second best, 0 anything else
    is_single: bool = False  # marked as the result of a single seed

    @staticmethod
    def with_deviation(summary: Summary | None, place: int = 0, *, over_seeds: bool = False) -> Value:
        """A mean ± its standard deviation."""
        if summary is None or not summary.n:
            return Value()
        spread = "" if math.isnan(summary.deviation) else f" ± {number(summary.deviation)}"
        return Value(summary.mean, number(summary.mean), spread, summary, place, over_seeds and summary.is_single)

    @staticmethod
    def with_interval(summary: Summary | None, place: int = 0) -> Value:
        """A mean accuracy over seeds with its confidence interval, cut off at 0 and 100 %."""
        if summary is None or not summary.n:
            return Value()
        spread = "" if summary.is_single else f" [{number(max(summary.low, 0))}, {number(min(summary.high, 100))}]"
        return Value(summary.mean, number(summary.mean), spread, summary, place, summary.is_single)

    @staticmethod
    def count(value: int) -> Value:
        """A whole number."""
        return Value(value, str(value))


Entry = Value | str


@dataclass(frozen=True)
class Table:
    """A table that terminal, Markdown, LaTeX, HTML and CSV render alike."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]
    kind: str = ""  # one word, for CSV
    notes: tuple[str, ...] = ()
    stream: str = ""
    order: str = ""
    spelled: Mapping[str, str] = field(default_factory=dict)  # abbreviated heads written out

    @property
    def values(self) -> list[Value]:
        """All its numbers."""
        return [entry for _, entries in self.rows for entry in entries if isinstance(entry, Value)]

    @property
    def places(self) -> int:
        """How many places it marks: 0, 1 or 2."""
        return max((value.place for value in self.values), default=0)

    @property
    def has_single(self) -> bool:
        """Whether it marks a number as the result of a single seed."""
        return any(value.is_single for value in self.values)

    def across(self, order: Sequence[str]) -> Table:
        """The same table with a column for every domain of an order, empty where the measure is undefined."""
        heads = (self.heads[0], *order, self.heads[-1])
        found = [(name, dict(zip(self.heads[1:], entries, strict=True))) for name, entries in self.rows]
        rows = ((name, tuple(entries.get(head, Value()) for head in heads[1:])) for name, entries in found)
        return replace(self, heads=heads, rows=tuple(rows))


def places(values: Sequence[float | None]) -> list[int]:
    """1 for the best value, 2 for the second best of more than two, 0 for the rest.

    Values are compared as shown: equal ones share a place, several best leave no second, and if all are equal, none
    is marked. ``None`` does not compete.
    """
    rivals = {str(i): value for i, value in enumerate(values) if value is not None}
    best, second = best_two(rivals)
    if len(best) == len(rivals):
        return [0] * len(values)
    return [1 if str(i) in best else 2 if str(i) in second and len(rivals) > 2 else 0 for i in range(len(values))]


def comparison_table(section: Section) -> Table:
    """The averages of every measure, one row per method."""
    columns = [_column(section, measure) for measure in section.measures]
    seeds = [str(len(part.counted)) if part.finished else part.status for part in section.parts]
    heads = ("Method", "Seeds", *section.measures)
    return Table("Comparison, averages over domains (%)", heads, _rows(section, [seeds, *columns]), "comparison")


def domain_tables(section: Section) -> list[Table]:
    """One table per measure: its values on every domain that has any, then their average."""
    tables = []
    for measure in section.measures:
        if domains := section.columns(measure):
            columns = [_column(section, measure, domain) for domain in (*domains, None)]
            title = f"{measure}, {MEANING[measure][0].lower()} (%)"
            tables.append(Table(title, ("Method", *domains, "average"), _rows(section, columns), measure))
    return tables


def metrics_table(section: Section) -> Table:
    """All measures of a single run on every domain, one row per measure."""
    rows = ((table.kind, table.across(section.order).rows[0][1]) for table in domain_tables(section))
    return Table("Metrics (%)", ("", *section.order, "average"), tuple(rows))


def online_tables(section: Section) -> list[Table]:
    """Per order of arrival, what the passes over new domains were like; of a single run, domain by domain."""
    tables = []
    for order in ORDERS:
        parts = [part for part in section.parts if any(order in online_scores(run) for run in part.counted)]
        if not parts:
            continue
        if len(section.parts) == 1:
            domains = dict.fromkeys(name for run in parts[0].counted for name in online_scores(run)[order])
            rows = [(name, _pass(parts[0], order, name)) for name in domains]
            rows += [("average", _pass(parts[0], order))] if len(domains) > 1 else []
            corner, over = "Domain", ""
        else:
            rows = [(part.name, _pass(part, order)) for part in parts]
            corner, over = "Method", ", averages over domains"
        title = f"Before its stage, {ARRIVAL[order]}{over}"
        tables.append(Table(title, (corner, *ONLINE), tuple(rows), f"online {order}", (ONLINE_NOTE,)))
    return tables


def _pass(part: Group, order: str, domain: str | None = None) -> tuple[Entry, ...]:
    found = {column: Value.with_deviation(part.online(order, column, domain)) for column in ONLINE}
    if found["T95"].summary:
        found["T95"] = replace(found["T95"], text=f"{found['T95'].number:.0f}")
    return tuple(found.values())


def matrix_table(part: Group) -> Table:
    """The accuracy on every domain after every stage."""
    known: list[tuple[Entry, ...]] = [tuple(map(Value.with_deviation, row)) for row in part.accuracy]
    missing: list[tuple[Entry, ...]] = [(Value(),) * len(part.order)] * (len(part.order) - len(known))
    rows = tuple((f"after {name}", cells) for name, cells in zip(part.order, known + missing, strict=True))
    return Table(f"{part.name}: accuracy (%), {part.status}", ("", *part.order), rows)


def most_places(section: Section) -> int:
    """How many places any table of a section marks."""
    return max(table.places for table in (comparison_table(section), *domain_tables(section)))


def _column(section: Section, measure: Measure, domain: str | None = None) -> list[Value]:
    found = [(part.spread(measure, domain), part.competes) for part in section.parts]
    marks = places([summary.mean if competes and summary.n else None for summary, competes in found])
    return [Value.with_deviation(summary, place) for (summary, _), place in zip(found, marks, strict=True)]


def _rows(section: Section, columns: Sequence[Sequence[Entry]]) -> tuple[tuple[str, tuple[Entry, ...]], ...]:
    return tuple(zip((part.name for part in section.parts), zip(*columns, strict=True), strict=True))


_STYLE = {"TDG": "cyan", "TDA": "bold", "FA": "magenta", "Unfamiliar": ""}
_JOINTS = (" ± ", "±", None)
_BEST, _SINGLE = "*", "¹"
_ASCII = str.maketrans({"±": "+-", "×": "x", MISSING: "-", _SINGLE: "^1"})
_GAP = 2
_WIDEST_HEAD = 14

Show = Callable[[Entry, str | None, int, int], Text]


def print_report(runs: Sequence[RunRecord], console: Console) -> None:
    """Prints matrices and metrics, one section per stream and order."""
    found = sections(group_runs(runs))
    for section in found:
        printer = Printer(console, marks_single=section.unlike_seeds)
        printer.heading(section)
        for part in section.parts:
            printer.table(matrix_table(part), printer.accuracy)
        printer.legend()
        if len(section.parts) == 1:
            printer.table(metrics_table(section))
        else:
            for table in (*domain_tables(section), comparison_table(section)):
                printer.table(table)
        if streamed := online_tables(section):
            for table in streamed:
                printer.table(table)
            printer.say(ONLINE_NOTE, "dim")
            console.print()
        printer.notes(section)
    explain(found, console)


def print_comparison(section: Section, console: Console) -> None:
    """Prints only the averages of every method."""
    printer = Printer(console, marks_single=section.unlike_seeds)
    printer.heading(section)
    printer.table(comparison_table(section))
    printer.notes(section)


def explain(found: Sequence[Section], console: Console) -> None:
    """Prints one sentence on what the measures of these sections mean."""
    measures = dict.fromkeys(measure for section in found for measure in section.measures)
    meant = [Text.assemble((m, _STYLE[m]), f" {MEANING[m][0].lower()}") for m in measures]
    console.print(Text("Accuracy: ").append_text(Text(", ").join(meant)).append("."))


class Printer:
    """Prints tables that fit a console; ``marks_single`` marks results of a single seed where deviations don't fit."""

    def __init__(self, console: Console, *, marks_single: bool = False) -> None:
        self.console = console
        self._marks_single = marks_single
        self._printed: set[str] = set()
        self._shortened = False

    def table(self, table: Table, show: Show | None = None) -> None:
        """Prints a table: with standard deviations if they fit, split by columns if it must be."""
        show = show or self.value
        corner, heads = table.heads[0], [f"{self.show(head)} " for head in table.heads[1:]]
        names = [self.show(name) for name, _ in table.rows]
        width = self.console.width
        first = min(max(map(cell_len, (corner, *names))), max(14, width // 3)) + _GAP
        for joint in _JOINTS:
            rows = [
                [show(entry, joint, i, j) for j, entry in enumerate(entries)]
                for i, (_, entries) in enumerate(table.rows)
            ]
            widths = [
                max(min(cell_len(head), _WIDEST_HEAD), *(cells[i].cell_len for cells in rows)) + _GAP
                for i, head in enumerate(heads)
            ]
            if first + sum(widths) <= width:
                break
        shortened = joint is None and any(value.spread for value in table.values)
        self._shortened |= shortened
        self._printed.update(cell.plain for cells in rows for cell in cells)
        self.say(f"{table.title}, means only" if shortened else table.title, "bold")
        for chunk in _chunks(widths, width - first):
            grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
            grid.add_column(Text(corner), max_width=first - _GAP, overflow="fold")
            for i in chunk:
                grid.add_column(Text(heads[i]), justify="right", max_width=widths[i] - _GAP, overflow="fold")
            for name, cells in zip(names, rows, strict=True):
                grid.add_row(Text(name), *(cells[i] for i in chunk))
            self.console.print(grid)
            self.console.print()

    def value(self, entry: Entry, joint: str | None, _row: int = 0, _column: int = 0) -> Text:
        """A cell of a table, the best number marked."""
        if isinstance(entry, str):
            return Text(self.show(f"{entry} "))
        possible = f"{_SINGLE}{_BEST}" if self._marks_single and joint is None else _BEST
        applies = {_SINGLE: entry.summary is not None and entry.summary.is_single, _BEST: entry.place == 1}
        marks = self.show("".join(mark for mark in possible if applies[mark])).ljust(len(self.show(possible)))
        style = "dim" if entry.summary is None else "bold" if entry.place == 1 else ""
        return Text(f"{self.show(_joined(entry, joint))}{marks}", style=style)

    def accuracy(self, entry: Entry, joint: str | None, stage: int, domain: int) -> Text:
        """A cell of an accuracy matrix, its diagonal in brackets."""
        assert isinstance(entry, Value)
        if entry.summary is None:
            return Text(self.show(f"{MISSING} "), style="dim")
        measure = "TDA" if stage == domain else "TDG" if stage < domain else "FA"
        words = _joined(entry, joint)
        return Text(self.show(f"[{words}]" if measure == "TDA" else f"{words} "), style=_STYLE[measure])

    def heading(self, section: Section) -> None:
        """Prints stream and order."""
        self.say(f"{section.stream}: {order_text(section.order)}", "bold underline")
        self.console.print()

    def legend(self) -> None:
        """Prints which part of an accuracy matrix is which measure."""
        diagonal = ("[in brackets] TDA, the domain's own stage", _STYLE["TDA"])
        sides = ("above: TDG", _STYLE["TDG"]), "   ", ("below: FA", _STYLE["FA"])
        self.console.print(Text.assemble(diagonal, "   ", *sides))
        self.console.print()

    def notes(self, section: Section) -> None:
        """Prints what to know about the tables of a section."""
        notes = [*self.mark_notes(section.spread_note, "seeds"), *section.notes()]
        for note in notes:
            self.say(note, "dim")
        if notes:
            self.console.print()

    def mark_notes(self, spread: str, over: str) -> list[str]:
        """Explains the marks printed so far; ``spread`` explains ±, and deviations are over ``over``."""
        means = [f"Means only: no room for deviations over {over}."] if self._shortened else []
        means += [f"With {_SINGLE}: from a single seed."] if self._has_printed(_SINGLE) else []
        notes = [spread if self._has_printed("±") else "", " ".join(means)]
        notes.append(f"{_BEST} marks the best of a column." if self._has_printed(_BEST) else "")
        return [note for note in notes if note]

    def _has_printed(self, mark: str) -> bool:
        return any(self.show(mark) in words for words in self._printed)

    def say(self, words: str, style: str) -> None:
        """Prints a line or a paragraph."""
        self.console.print(Text(self.show(words), style=style))

    def show(self, words: str) -> str:
        """Replaces what the terminal's encoding lacks by plain marks and question marks."""
        if self.console.options.ascii_only:
            words = words.translate(_ASCII)
        return clean(words).encode(self.console.encoding, "replace").decode(self.console.encoding)


def _joined(value: Value, joint: str | None) -> str:
    return value.text if joint is None else value.text + value.spread.replace(_JOINTS[0], joint)


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
