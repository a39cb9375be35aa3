"""The tables of a report as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence

from ratp.errors import csv_cell
from ratp.evaluation.matrix import METRICS
from ratp.reports.summary import ONLINE, Group, Measure, Section, by_domain, group_runs, online_scores, sections
from ratp.reports.tables import (
    MEANING,
    Entry,
    Table,
    Value,
    clean,
    comparison_table,
    domain_tables,
    matrix_table,
    metrics_table,
    most_places,
    online_tables,
    order_text,
)
from ratp.runs.record import RunRecord

SINGLE = "from a single seed."
_MARKDOWN_SPECIAL = re.compile(r"([\\`*|\[\]~$#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_LATEX_SPECIAL = {
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
_MOST_COLUMNS = 6  # methods that fit side by side in LaTeX
_LONG_TEXT = 24  # characters from which LaTeX breaks a text into lines


def markdown_report(
    runs: Sequence[RunRecord], title: str = "Continual domain shift report", preface: Sequence[str] = ()
) -> str:
    """The whole report as Markdown; blocks of ``preface`` take the place of the sections' comparisons."""
    found = sections(group_runs(runs))
    explained: dict[Measure, None] = dict.fromkeys(m for section in found for m in section.measures)
    meanings = "\n".join(f"- **{m}** – {MEANING[m][0].lower()}. {MEANING[m][1]}" for m in explained)
    blocks = [f"# {escape_markdown(title)}", meanings, *preface]
    for section in found:
        blocks.append(f"## {_section_title(section)}")
        marked = most_places(section)
        blocks += _notes(section, marked) if preface else [_comparison(section, marked)]
        if len(section.parts) == 1:
            blocks.append(markdown_table(metrics_table(section), corner="Metric (%)"))
        else:
            blocks += [markdown_table(table, corner=f"{table.kind} (%)") for table in domain_tables(section)]
        for table in online_tables(section):
            blocks += markdown_block(table)
        for part in section.parts:
            blocks.append(f"### Accuracy matrix (%): {escape_markdown(part.name)}, {part.status}")
            blocks.append(_matrix(part))
    return "\n\n".join(blocks) + "\n"


def comparison_markdown(runs: Sequence[RunRecord]) -> str:
    """Only the comparison: one row per method with its seeds and averages, the best in bold."""
    found = sections(group_runs(runs))
    tables = [_comparison(section, comparison_table(section).places) for section in found]
    if len(found) == 1:
        return tables[0] + "\n"
    titled = [f"**{_section_title(section)}**\n\n{table}" for section, table in zip(found, tables, strict=True)]
    return "\n\n".join(titled) + "\n"


def markdown_table(table: Table, corner: str | None = None, unit: str = "") -> str:
    """A table in Markdown, its columns aligned; columns of numbers to the right."""
    heads = [table.heads[0] if corner is None else corner, *table.heads[1:]]
    heads = [f"{head}{unit}" if head in MEANING else head for head in heads]
    rows = [[escape_markdown(name), *map(_markdown_entry, entries)] for name, entries in table.rows]
    return _markdown_grid(list(map(escape_markdown, heads)), rows, left=1 if table.values else len(heads))


def markdown_block(table: Table) -> list[str]:
    """A table under its title, with its notes."""
    notes = [*map(escape_markdown, table.notes), *_mark_note(table.places, "in italics")]
    notes += [f"¹ {SINGLE}"] if table.has_single else []
    listed = ["\n".join(f"- {note}" for note in notes)] if notes else []
    return [f"### {escape_markdown(table.title)}", markdown_table(table), *listed]


def escape_markdown(name: str) -> str:
    """Escapes whatever Markdown would not show as text."""
    safe = clean(name).replace("&", "&amp;").replace("<", "&lt;")
    return _MARKDOWN_SPECIAL.sub(r"\\\1", safe)


def _section_title(section: Section) -> str:
    return escape_markdown(f"{section.stream}: {order_text(section.order)}")


def _comparison(section: Section, marked: int) -> str:
    return "\n\n".join([markdown_table(comparison_table(section), unit=" (%)"), *_notes(section, marked)])


def _notes(section: Section, marked: int) -> list[str]:
    """The notes on a section whose tables mark so many places, as one list or none."""
    spread = [section.spread_note] if section.spread_note else []
    lines = [*spread, *_mark_note(marked, "in italics"), *map(escape_markdown, section.notes())]
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _matrix(part: Group) -> str:
    table = matrix_table(part)
    rows = [[escape_markdown(name), *map(_markdown_entry, entries)] for name, entries in table.rows]
    for stage, row in enumerate(rows[: len(part.accuracy)]):
        row[stage + 1] = f"**{row[stage + 1]}**"
    return _markdown_grid(["", *map(escape_markdown, part.order)], rows)


def _markdown_entry(entry: Entry) -> str:
    if isinstance(entry, str):
        return escape_markdown(entry)
    mark = "¹" if entry.is_single else ""
    best = {1: f"**{entry.text}**", 2: f"*{entry.text}*"}.get(entry.place, entry.text)
    return f"{best}{mark}{entry.spread}"


def _markdown_grid(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table of escaped texts whose first columns are aligned to the left, the others to the right."""
    widths = [max(3, *(len(row[i]) for row in (heads, *rows))) for i in range(len(heads))]
    rule = [":" + "-" * (w - 1) if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    lines = [
        [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in (heads, *rows)
    ]
    lines.insert(1, rule)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mark_note(places: int, second: str) -> list[str]:
    return ["Best in bold." if places == 1 else f"Best in bold, second best {second}."] if places else []


def latex_report(runs: Sequence[RunRecord], opening: str = "") -> str:
    """One booktabs table per section after ``opening``; the best number bold, the second best underlined."""
    tables = []
    for section in sections(group_runs(runs)):
        tables += [_latex_section(section), *map(latex_block, online_tables(section))]
    needs = "% Needs \\usepackage[T1]{fontenc} and \\usepackage{adjustbox,booktabs}.\n"
    return needs + "\n".join([opening, *tables] if opening else tables)


def latex_block(table: Table) -> str:
    """A table with its title and notes as caption."""
    single = [f"$^{{1}}$ {SINGLE}"] if table.has_single else []
    caption = [escape_latex(f"{table.title}."), *map(escape_latex, table.notes)]
    caption += [*_mark_note(table.places, "underlined"), *single]
    columns = "r" * (len(table.heads) - 1) if table.values else _text_columns(table)
    rows = [[escape_latex(name), *map(_latex_entry, entries)] for name, entries in table.rows]
    return _latex_table(" ".join(caption), f"l{columns}", [*map(escape_latex, table.heads)], [rows])


def escape_latex(name: str) -> str:
    """Escapes whatever LaTeX would not set as text."""
    return "".join(_LATEX_SPECIAL.get(c, c) for c in clean(name))


def _latex_section(section: Section) -> str:
    """A block per measure: domains as rows and methods as columns, as in the paper; many methods as rows."""
    blocks: list[list[list[str]]] = []
    names = [escape_latex(part.name if part.finished else f"{part.name} ({part.status})") for part in section.parts]
    if len(section.parts) <= _MOST_COLUMNS:
        heads = ["", "Domain", *names]
        for table in domain_tables(section):
            columns = zip(*(map(_latex_entry, entries) for _, entries in table.rows), strict=True)
            domains = map(escape_latex, table.heads[1:])
            blocks.append([[table.kind, domain, *cells] for domain, cells in zip(domains, columns, strict=True)])
    else:
        heads = ["", "Method", *map(escape_latex, section.order), "average"]
        for table in domain_tables(section):
            rows = zip(names, (entries for _, entries in table.across(section.order).rows), strict=True)
            measured = [
                (name, entries) for name, entries in rows if any(e.summary for e in entries if isinstance(e, Value))
            ]
            blocks.append([[table.kind, name, *map(_latex_entry, entries)] for name, entries in measured])
    for block in blocks:
        for row in block[1:]:
            row[0] = ""
    order = r" $\rightarrow$ ".join(map(escape_latex, section.order))
    spread = [section.spread_note.replace("±", r"$\pm$")] if section.spread_note else []
    notes = [*spread, *_mark_note(most_places(section), "underlined"), *map(escape_latex, section.notes())]
    caption = " ".join([f"{escape_latex(section.stream)} ({order}): accuracy in percent.", *notes])
    return _latex_table(caption, f"ll{'r' * (len(heads) - 2)}", heads, blocks)


def _latex_table(caption: str, columns: str, heads: Sequence[str], blocks: Sequence[Sequence[Sequence[str]]]) -> str:
    """A booktabs table of escaped texts, a rule above every block of rows, shrunk to fit the page."""
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{caption}}}",
        r"  \begin{adjustbox}{max width=\linewidth, max totalheight=0.8\textheight}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        _latex_line(heads),
    ]
    for rows in blocks:
        lines += [r"    \midrule", *map(_latex_line, rows)]
    lines += [r"    \bottomrule", r"  \end{tabular}", r"  \end{adjustbox}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _latex_line(cells: Sequence[str]) -> str:
    return f"    {' & '.join(cells)} \\\\"


def _latex_entry(entry: Entry) -> str:
    if isinstance(entry, str):
        return escape_latex(entry)
    if math.isnan(entry.number):
        return "--"
    mark = "^{1}" if entry.is_single else ""
    best = {1: rf"\mathbf{{{entry.text}}}", 2: rf"\underline{{{entry.text}}}"}.get(entry.place, entry.text)
    spread = entry.spread.replace("±", r"\pm").replace(" [", r"\ [")
    return f"${best}{mark}{spread}$"


def _text_columns(table: Table) -> str:
    """LaTeX's columns of texts: long texts are broken into lines and share what short ones leave."""
    columns = zip(*(entries for _, entries in table.rows), strict=True)
    longest = [max(len(entry) if isinstance(entry, str) else 0 for entry in column) for column in columns]
    width = 0.7 / max(sum(length > _LONG_TEXT for length in longest), 1)
    return "".join(rf"p{{{width:.2f}\linewidth}}" if length > _LONG_TEXT else "l" for length in longest)


def csv_text(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([csv_cell(cell) for cell in row] for row in rows)
    return file.getvalue()


def csv_report(runs: Sequence[RunRecord]) -> str:
    """Every number of every run in long form, unrounded: one line per matrix cell or metric."""
    heads = ("label", "stream", "order", "seed", "complete", "metric", "stage", "domain", "value")
    found = [(section, run) for section in sections(group_runs(runs)) for run in section.runs]
    rows: list[tuple[object, ...]] = []
    for section, run in found:
        complete = str(run.matrix.complete).lower()
        about = (run.label, section.stream, ">".join(section.order), run.seed, complete)
        rows += [(*about, *line) for line in _csv_lines(run)]
    return csv_text(heads, rows)


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
    for order, scores in online_scores(run).items():
        for domain, score in scores.items():
            for column, value_of in ONLINE.items():
                yield f"online {order} {column}", "", domain, "" if math.isnan(value_of(score)) else value_of(score)


def csv_tables(tables: Sequence[Table]) -> str:
    """Every number of some tables in long form, unrounded."""
    heads = ("table", "stream", "order", "row", "column", "value", "n", "deviation", "low", "high")
    rows = [
        [table.kind, table.stream, table.order, name, table.spelled.get(head, head), *_csv_entry(entry)]
        for table in tables
        for name, entries in table.rows
        for head, entry in zip(table.heads[1:], entries, strict=True)
        if isinstance(entry, Value)
    ]
    return csv_text(heads, rows)


def _csv_entry(value: Value) -> list[object]:
    """A number and, of a mean, its statistics; empty where there is none."""
    about = value.summary
    known = [value.number, *([about.n, about.deviation, about.low, about.high] if about else [math.nan] * 4)]
    return ["" if math.isnan(number) else number for number in known]
