"""The report of a study: what is missing, all orders side by side, variants and sweeps, then every stream and order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from ratp.files import safe_name
from ratp.matrix import METRICS
from ratp.report.cells import MISSING, Cell
from ratp.report.chapters import Chapter, Picture, Preface, Table
from ratp.report.page import write_report
from ratp.report.study_parts import Orders, several_orders, several_seeds, sweeps, variants
from ratp.report.study_plots import sweep_curves, variant_bars
from ratp.report.study_tables import interval_table, missing_csv, missing_table, order_tables, sweep_tables
from ratp.report.style import encode
from ratp.report.summary import group_runs, sections
from ratp.report.terminal import Line, Printer, explain, print_comparison
from ratp.statistics import NOTHING
from ratp.study_record import StudyRecord


def write_study(study: StudyRecord, folder: Path, console: Console | None = None) -> Path:
    """Writes page, tables and figures of a study into a folder, which is made if it is not there.

    Args:
        study: What to report.
        folder: Where to write.
        console: Told of every file written.

    Returns:
        The page, ``index.html``.

    Raises:
        RatpError: If no run is finished.
        RunDirectoryError: If the folder cannot be written or a run is damaged.
    """
    return write_report(study.records(), folder, console, _preface(study))


def print_study(study: StudyRecord, console: Console) -> None:
    """Prints the averages of every label on every stream and in every order, then over the orders.

    Raises:
        RatpError: If no run is finished.
    """
    found = sections(group_runs(study.records()))
    printer = Printer(console)
    printer.say(study.title, "bold")
    console.print()
    for section in found:
        print_comparison(section, console)
    for orders in several_orders(study):
        _print_orders(orders, console)
    explain(found, console)
    console.print()
    printer.say(progress(study), "bold")
    missing = missing_table(study)
    for label, (stream, _, which, state) in missing.rows if missing else ():
        printer.say(f"{label}, {stream}: {which}; {state}", "dim")


def progress(study: StudyRecord) -> str:
    """How many runs are finished, in a sentence."""
    finished = sum(run.record is not None for run in study.runs)
    missing = len(study.runs) - finished
    rest = f" {missing} {'are' if missing > 1 else 'is'} missing and left out everywhere." if missing else ""
    return f"{finished} of {len(study.runs)} runs are finished.{rest}"


def _preface(study: StudyRecord) -> Preface:
    chapters = [_missing(study), _intervals(study), _orders(study), _variants(study), _sweeps(study)]
    shown = tuple(chapter for chapter in chapters if chapter.items)
    return Preface(study.title, progress(study), shown, {"missing.csv": missing_csv(study)})


def _missing(study: StudyRecord) -> Chapter:
    table = missing_table(study)
    intro = "Tables and figures are made of the finished runs alone."
    return Chapter("What is missing?", intro, (table,) if table else ())


def _intervals(study: StudyRecord) -> Chapter:
    tables = [interval_table(section) for section in sections(group_runs(study.records()))]
    intro = "Averages over the domains of a stream in one order. Domain by domain, with deviations, further below."
    return Chapter("Which does best overall, and how sure is that?", intro, tuple(tables))


def _orders(study: StudyRecord) -> Chapter:
    tables = [table for orders in several_orders(study) for table in order_tables(orders)]
    intro = "All orders of a stream side by side, and the first label against every other."
    return Chapter("Does it depend on the order?", intro, tuple(tables))


def _variants(study: StudyRecord) -> Chapter:
    pictures = []
    for grid in variants(study):
        caption = "Averages over domains."
        caption += " Error bars: one sample standard deviation over seeds." if several_seeds(grid.lines) else ""
        about = study.titles.get(grid.grid, f"Methods and variants of grid {grid.grid + 1}")
        picture = _picture(f"variants-{grid.grid + 1}", f"{about}, {grid.stream}", caption, variant_bars(grid))
        pictures.append(picture)
    return Chapter("What does each part bring?", "A figure a grid that has variants.", tuple(pictures))


def _sweeps(study: StudyRecord) -> Chapter:
    items: list[Table | Picture] = []
    for sweep in sweeps(study):
        caption = "Averages over domains."
        caption += " Bands: one sample standard deviation over seeds." if several_seeds(sweep.lines) else ""
        caption += " The upright line is the usual value." if sweep.usual in sweep.values.values() else ""
        about = f"{study.titles[sweep.grid]}, " if sweep.grid in study.titles else ""
        name = f"sweep-{sweep.grid + 1}-{safe_name(sweep.switch)}"
        items.append(_picture(name, f"{about}{sweep.switch}, {sweep.stream}", caption, sweep_curves(sweep)))
        items += [replace(table, title=f"{about}{table.title}") for table in sweep_tables(sweep)]
    return Chapter("How sensitive is it to its switches?", "One switch at a time.", tuple(items))


def _picture(name: str, title: str, caption: str, figure: Figure) -> Picture:
    return Picture(name, title, caption, {"png": encode(figure, "png"), "svg": encode(figure, "svg")})


def _print_orders(orders: Orders, console: Console) -> None:
    printer = Printer(console)
    columns = []
    for metric in METRICS:
        means = [orders.mean(label, metric) for label in orders.lines]
        columns.append([Cell(mean or NOTHING, rank) for mean, rank in zip(means, orders.places(means), strict=True)])
    ranks = [orders.ranks(metric) for metric in METRICS]

    def lines(joint: str | None) -> list[Line]:
        found = []
        for i, label in enumerate(orders.lines):
            cells = []
            for column, ranked in zip(columns, ranks, strict=True):
                rank = printer.show(f"{ranked[label].mean:.1f}" if label in ranked else MISSING)
                cells += [printer.value(column[i], joint), Text(f"{rank} ")]
            found.append((orders.name(label), cells))
        return found

    printer.say(f"{orders.stream}: {len(orders.orders)} orders", "bold underline")
    console.print()
    heads = [head for metric in METRICS for head in (metric, "rank")]
    printer.grid("Over the orders (%), with mean ranks", "Method", heads, lines)
    notes = printer.mark_notes("Mean ± sample standard deviation over orders.", "orders")
    for note in (*notes, "A dash: an order lacks it; who was told labels has no rank."):
        printer.say(note, "dim")
    console.print()
