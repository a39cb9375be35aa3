"""What stands before the sections of a report: chapters of tables and pictures, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ratp.report.cells import MISSING, number
from ratp.report.latex import escape_latex, latex_table, mark_note_latex, marked_latex
from ratp.report.tables import escape_markdown, mark_note, markdown_grid, marked_markdown
from ratp.statistics import Summary

CSV_COLUMNS = ("table", "stream", "order", "row", "column", "value", "n", "deviation", "low", "high")
SINGLE = "from a single seed."
_SHORT = 24  # letters of a text that need not be broken


@dataclass(frozen=True)
class Value:
    """A number of a table.

    Attributes:
        number: Unrounded; NaN: there is none.
        text: As shown.
        spread: What is shown behind it.
        summary: The values it stands for, where it is their mean.
        place: 1 best, 2 second best, 0 anything else.
        is_single: Whether it is from a single seed.
    """

    number: float = math.nan
    text: str = MISSING
    spread: str = ""
    summary: Summary | None = None
    place: int = 0
    is_single: bool = False

    @staticmethod
    def with_deviation(summary: Summary | None, place: int = 0, *, over_seeds: bool = False) -> Value:
        """A mean ± its standard deviation, over the seeds or over something else."""
        if summary is None:
            return Value()
        spread = "" if summary.is_single else f" ± {number(summary.deviation)}"
        return Value(summary.mean, number(summary.mean), spread, summary, place, over_seeds and summary.is_single)

    @staticmethod
    def with_interval(summary: Summary | None, place: int = 0) -> Value:
        """A mean accuracy over the seeds and its confidence interval, as far as accuracies go."""
        if summary is None:
            return Value()
        spread = "" if summary.is_single else f" [{number(max(summary.low, 0))}, {number(min(summary.high, 100))}]"
        return Value(summary.mean, number(summary.mean), spread, summary, place, summary.is_single)


Entry = Value | str


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        kind: What kind of table it is, in a word.
        title: What it shows.
        heads: Heads of its columns, the names' first.
        rows: Name and entries of every row.
        notes: What to know about it.
        stream: Stream that it is about.
        order: Order that it is about, if it is about one.
        spelled: What heads stand for that are too short to say it.
    """

    kind: str
    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]
    notes: tuple[str, ...] = ()
    stream: str = ""
    order: str = ""
    spelled: Mapping[str, str] = field(default_factory=dict)

    @property
    def values(self) -> list[Value]:
        """All its numbers."""
        return [entry for _, entries in self.rows for entry in entries if isinstance(entry, Value)]

    @property
    def places(self) -> int:
        """How many places are marked in it: 0, 1 or 2."""
        return max((value.place for value in self.values), default=0)

    @property
    def has_single(self) -> bool:
        """Whether a number in it is from a single seed."""
        return any(value.is_single for value in self.values)


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        name: Name of its files, without the ending.
        title: What it shows.
        caption: What to know about it.
        files: Its files by their ending.
    """

    name: str
    title: str
    caption: str
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Chapter:
    """Tables and pictures on one matter."""

    title: str
    intro: str
    items: tuple[Table | Picture, ...]


@dataclass(frozen=True)
class Preface:
    """What stands before the sections of a report.

    Attributes:
        title: Title of the report.
        lead: What to know first.
        chapters: The rest.
        files: Further files by name.
    """

    title: str
    lead: str
    chapters: tuple[Chapter, ...]
    files: Mapping[str, str]

    @property
    def tables(self) -> list[Table]:
        """All its tables."""
        return [item for chapter in self.chapters for item in chapter.items if isinstance(item, Table)]

    @property
    def pictures(self) -> list[Picture]:
        """All its pictures."""
        return [item for chapter in self.chapters for item in chapter.items if isinstance(item, Picture)]


def preface_markdown(preface: Preface) -> list[str]:
    """Lead and chapters, block by block; pictures by the names of their files."""
    blocks = [escape_markdown(preface.lead)]
    for chapter in preface.chapters:
        blocks += [f"## {chapter.title}", escape_markdown(chapter.intro)]
        for item in chapter.items:
            blocks.append(f"### {escape_markdown(item.title)}")
            blocks += _markdown_table(item) if isinstance(item, Table) else _markdown_picture(item)
    return blocks


def preface_latex(preface: Preface) -> str:
    """The lead and all tables."""
    lead = f"\\paragraph{{{escape_latex(preface.title)}}} {escape_latex(preface.lead)}\n"
    return "\n".join([lead, *map(_latex_table, preface.tables)])


def preface_csv(preface: Preface) -> str:
    """Every number of every table in long form, unrounded; tables of words are left out."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in preface.tables:
        for name, entries in table.rows:
            for head, entry in zip(table.heads[1:], entries, strict=True):
                if isinstance(entry, Value):
                    column = table.spelled.get(head, head)
                    writer.writerow([table.kind, table.stream, table.order, name, column, *_csv_entry(entry)])
    return file.getvalue()


def _markdown_table(table: Table) -> list[str]:
    rows = [[escape_markdown(name), *map(_markdown_entry, entries)] for name, entries in table.rows]
    notes = [*map(escape_markdown, table.notes), *mark_note(table.places)]
    notes += [f"¹ {SINGLE}"] if table.has_single else []
    listed = ["\n".join(f"- {note}" for note in notes)] if notes else []
    heads = [escape_markdown(head) for head in table.heads]
    return [markdown_grid(heads, rows, numbers=bool(table.values)), *listed]


def _markdown_picture(picture: Picture) -> list[str]:
    return [f"![{escape_markdown(picture.title)}]({picture.name}.svg)", escape_markdown(picture.caption)]


def _markdown_entry(entry: Entry) -> str:
    if isinstance(entry, str):
        return escape_markdown(entry)
    mark = "¹" if entry.is_single else ""
    return f"{marked_markdown(entry.text, entry.place)}{mark}{entry.spread}"


def _latex_table(table: Table) -> str:
    rows = [[escape_latex(name), *map(_latex_entry, entries)] for name, entries in table.rows]
    single = f"$^{{1}}$ {SINGLE}" if table.has_single else ""
    words = [escape_latex(f"{table.title}."), *map(escape_latex, table.notes), mark_note_latex(table.places), single]
    columns = "r" * (len(table.heads) - 1) if table.values else _text_columns(table)
    return latex_table(" ".join(filter(None, words)), f"l{columns}", [*map(escape_latex, table.heads)], [rows])


def _text_columns(table: Table) -> str:
    """LaTeX's columns for texts, but for the names: long texts are broken, and share what short ones leave."""
    columns = zip(*(entries for _, entries in table.rows), strict=True)
    longest = [max(len(entry) if isinstance(entry, str) else 0 for entry in column) for column in columns]
    width = 0.7 / max(sum(length > _SHORT for length in longest), 1)
    return "".join(rf"p{{{width:.2f}\linewidth}}" if length > _SHORT else "l" for length in longest)


def _latex_entry(entry: Entry) -> str:
    if isinstance(entry, str):
        return escape_latex(entry)
    if math.isnan(entry.number):
        return "--"
    mark = "^{1}" if entry.is_single else ""
    spread = entry.spread.replace("±", r"\pm").replace(" [", r"\ [")
    return f"${marked_latex(entry.text, entry.place)}{mark}{spread}$"


def _csv_entry(value: Value) -> list[object]:
    """The number and, of a mean, what it is the mean of; nothing where there is none."""
    about = value.summary
    known = [value.number, *([about.n, about.deviation, about.low, about.high] if about else [math.nan] * 4)]
    return ["" if math.isnan(number_) else number_ for number_ in known]
