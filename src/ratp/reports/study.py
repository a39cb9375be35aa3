"""The report of a study: what is missing, all orders side by side, variants and sweeps, then every stream and order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from ratp._core.files import safe_name
from ratp.evaluation.matrix import METRICS, NOTHING, Metric, Paired, Summary
from ratp.reports.markup import csv_text
from ratp.reports.page import Chapter, Picture, Preface, write_report
from ratp.reports.study_parts import Order, Orders, Sweep, several_orders, several_seeds, sweeps, variants
from ratp.reports.study_plots import sweep_curves, variant_bars
from ratp.reports.style import encode
from ratp.reports.summary import Group, Measure, Section, as_text, group_runs, sections
from ratp.reports.tables import MISSING, Entry, Printer, Table, Value, explain, order_text, places, print_comparison
from ratp.runs.record import ORACLE
from ratp.studies.record import AskedRun, StudyRecord

INTERVAL = "In brackets: the 95 % confidence interval of the mean over seeds (Student's t), within 0 and 100 %."

Rows = tuple[tuple[str, tuple[Entry, ...]], ...]


def write_study(study: StudyRecord, folder: Path, console: Console | None = None) -> Path:
    """Writes page, tables and figures of a study into a folder, created if needed, and returns the page."""
    found = sections(group_runs(study.records()))
    intervals = [interval_table(section) for section in found]
    missing = missing_table(study)
    orders = [table for orders in several_orders(study) for table in order_tables(orders)]
    overall = "Averages over the domains of a stream in one order. Domain by domain, with deviations, further below."
    by_order = "All orders of a stream side by side, and the first label against every other."
    chapters = (
        Chapter("What is missing?", "Tables and figures cover finished runs only.", (missing,) if missing else ()),
        Chapter("Which does best overall, and how sure is that?", overall, tuple(intervals)),
        Chapter("Does it depend on the order?", by_order, tuple(orders)),
        Chapter("What does each part bring?", "One figure per grid with variants.", tuple(_variants(study))),
        Chapter("How sensitive is it to its switches?", "One switch at a time.", tuple(_sweeps(study))),
    )
    shown = tuple(chapter for chapter in chapters if chapter.items)
    preface = Preface(study.title, progress(study), shown, {"missing.csv": missing_csv(study)})
    return write_report(study.records(), folder, console, preface)


def print_study(study: StudyRecord, console: Console) -> None:
    """Prints the averages of every label on every stream and in every order, then over the orders."""
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
    """Says how many runs are finished."""
    finished = sum(run.record is not None for run in study.runs)
    missing = len(study.runs) - finished
    rest = f" {missing} {'are' if missing > 1 else 'is'} missing and left out everywhere." if missing else ""
    return f"{finished} of {len(study.runs)} runs are finished.{rest}"


def missing_table(study: StudyRecord) -> Table | None:
    """The unfinished runs by label, state and reason; None if there are none."""
    asked: dict[tuple[str, str], list[AskedRun]] = {}
    for run in study.runs:
        for label in dict.fromkeys(row.label for row in run.rows):
            asked.setdefault((run.stream, label), []).append(run)
    rows: list[tuple[str, tuple[Entry, ...]]] = []
    for (stream, label), runs in asked.items():
        states: dict[str, list[AskedRun]] = {}
        for run in runs:
            if run.record is None:
                lines = run.reason.strip().splitlines()
                states.setdefault(f"{run.state}: {lines[-1]}" if lines else run.state, []).append(run)
        for state, these in states.items():
            rows.append((label, (stream, f"{len(these)} of {len(runs)}", _which(these, runs), state)))
    heads = ("Label", "Stream", "Missing", "Which", "State")
    return Table("Runs that are not finished", heads, tuple(rows), "missing") if rows else None


def missing_csv(study: StudyRecord) -> str:
    """The unfinished runs, one line per run and label."""
    rows = [
        (label, run.stream, ">".join(run.order), run.seed, run.state, run.reason)
        for run in study.runs
        if run.record is None
        for label in dict.fromkeys(row.label for row in run.rows)
    ]
    return csv_text(("label", "stream", "order", "seed", "state", "reason"), rows)


def _which(runs: Sequence[AskedRun], asked: Sequence[AskedRun]) -> str:
    """Orders × seeds of some runs of a label, listed unless it is all of them."""
    orders, seeds = {run.order for run in runs}, {run.seed for run in runs}
    if len(runs) == len(asked) == len(orders) * len(seeds):
        return f"all, {_product(len(orders), len(seeds))}"
    by_order: dict[Order, list[int]] = {}
    for run in runs:
        by_order.setdefault(run.order, []).append(run.seed)
    by_seeds: dict[tuple[int, ...], list[Order]] = {}
    for order, its_seeds in by_order.items():
        by_seeds.setdefault(tuple(its_seeds), []).append(order)
    return "; ".join(
        f"{_product(len(same), len(key))} ({', '.join(order_text(order, '>') for order in same)}; "
        f"seed{'s' if len(key) > 1 else ''} {', '.join(map(str, key))})"
        for key, same in by_seeds.items()
    )


def _product(orders: int, seeds: int) -> str:
    return f"{orders} order{'s' if orders > 1 else ''} × {seeds} seed{'s' if seeds > 1 else ''}"


def interval_table(section: Section) -> Table:
    """The averages of all labels on one stream in one order, with confidence intervals."""
    return Table(
        f"{section.stream}: {order_text(section.order)}, averages over domains (%)",
        ("Label", "Seeds", *section.measures),
        _rows([group.label for group in section.groups], section.groups, section.measures),
        "averages",
        (*([INTERVAL] if section.several_seeds else []), *section.label_notes),
        section.stream,
        ">".join(section.order),
    )


def _rows(names: Sequence[str], groups: Sequence[Group], measures: Sequence[Measure] = METRICS) -> Rows:
    """Seeds and averages of every group, the best marked."""
    columns = []
    for measure in measures:
        found = [(group.spread(measure), group.competes) for group in groups]
        marks = places([s.mean if s.n and competes else None for s, competes in found])
        columns.append([Value.with_interval(s, place) for (s, _), place in zip(found, marks, strict=True)])
    seeds = [Value.count(len(group.counted)) for group in groups]
    return tuple(zip(names, zip(seeds, *columns, strict=True), strict=True))


def order_tables(orders: Orders) -> list[Table]:
    """For every metric, all orders side by side, then the first label against the others."""
    tables = []
    for metric in METRICS:
        tables.append(_orders_table(orders, metric))
        if orders.first in orders.lines and len(orders.lines) > 1:
            tables.append(_paired_table(orders, metric))
    return tables


def _orders_table(orders: Orders, metric: Metric) -> Table:
    labels = list(orders.lines)
    columns = []
    for order in orders.orders:
        groups = [orders.lines[label].get(order) for label in labels]
        columns.append(_marked(orders, [group.spread(metric) if group else NOTHING for group in groups], seeds=True))
    columns.append(_marked(orders, [orders.mean(label, metric) for label in labels]))
    found = orders.ranks(metric)
    ranks = [found[label].mean if label in found else None for label in labels]
    marks = places([None if rank is None else -rank for rank in ranks])
    ranked = zip(ranks, marks, strict=True)
    columns.append([Value() if rank is None else Value(rank, f"{rank:.1f}", place=place) for rank, place in ranked])
    numbered = {str(i): order for i, order in enumerate(orders.orders, start=1)}
    return Table(
        f"{metric} on {orders.stream} in {len(orders.orders)} orders, averages over domains (%)",
        ("Label", *numbered, "mean", "mean rank"),
        tuple(zip(map(orders.name, labels), zip(*columns, strict=True), strict=True)),
        f"{metric} by order",
        (
            f"Orders: {'; '.join(f'{i}: {order_text(order)}' for i, order in numbered.items())}.",
            "Per order: mean ± sample standard deviation over seeds. Over the orders: mean ± sample standard deviation "
            "of the orders' means, only for labels with all orders; of these, methods that use target labels are "
            "unranked.",
        ),
        orders.stream,
        spelled={i: ">".join(order) for i, order in numbered.items()},
    )


def _marked(orders: Orders, column: Sequence[Summary], *, seeds: bool = False) -> list[Value]:
    marks = orders.places(column)
    return [Value.with_deviation(s, place, over_seeds=seeds) for s, place in zip(column, marks, strict=True)]


def _paired_table(orders: Orders, metric: Metric) -> Table:
    first = orders.name(orders.first)
    others = [label for label in orders.lines if label != orders.first]
    return Table(
        f"{metric} on {orders.stream}: {first} minus the others (points)",
        (f"{first} minus", "Orders", "Difference", "Wins", "Losses", "p"),
        tuple((orders.name(label), _paired_entries(orders.difference(label, metric))) for label in others),
        f"{metric} paired",
        (
            "Over the orders that both have finished, each the mean over the seeds that both have: mean difference, "
            "its 95 % confidence interval, and the p-value of the paired t-test.",
        ),
        orders.stream,
    )


def _paired_entries(difference: Paired | None) -> tuple[Entry, ...]:
    if difference is None:
        return (Value.count(0), *[Value()] * 4)
    orders, wins, losses = map(Value.count, (difference.n, difference.wins, difference.losses))
    spread = "" if difference.is_single else f" [{difference.low:+.1f}, {difference.high:+.1f}]"
    mean = Value(difference.mean, f"{difference.mean:+.1f}", spread, difference)
    p = difference.p_value
    p_text = MISSING if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"
    return orders, mean, wins, losses, Value(p, p_text)


def _variants(study: StudyRecord) -> list[Picture]:
    pictures = []
    for grid in variants(study):
        caption = "Averages over domains."
        caption += " Error bars: one sample standard deviation over seeds." if several_seeds(grid.lines) else ""
        about = study.titles.get(grid.grid, f"Methods and variants of grid {grid.grid + 1}")
        name = f"variants-{grid.grid + 1}"
        pictures.append(_picture(name, f"{about}, {grid.stream}", caption, variant_bars(grid)))
    return pictures


def _sweeps(study: StudyRecord) -> list[Table | Picture]:
    items: list[Table | Picture] = []
    for sweep in sweeps(study):
        caption = "Averages over domains."
        caption += " Bands: one sample standard deviation over seeds." if several_seeds(sweep.lines) else ""
        caption += " The vertical line is the usual value." if sweep.usual in sweep.values.values() else ""
        about = f"{study.titles[sweep.grid]}, " if sweep.grid in study.titles else ""
        name = f"sweep-{sweep.grid + 1}-{safe_name(sweep.switch)}"
        items.append(_picture(name, f"{about}{sweep.switch}, {sweep.stream}", caption, sweep_curves(sweep)))
        items += [replace(table, title=f"{about}{table.title}") for table in sweep_tables(sweep)]
    return items


def sweep_tables(sweep: Sweep) -> list[Table]:
    """The averages at every value of a switch, one table per order."""
    tables = []
    for order in sweep.orders:
        found = {label: sweep.lines[label][order] for label in sweep.labels if order in sweep.lines.get(label, {})}
        title = f"{sweep.switch} on {sweep.stream}: {order_text(order)}, averages over domains (%)"
        heads = (sweep.switch, "Seeds", *METRICS)
        rows = _rows([_value_name(sweep, label) for label in found], list(found.values()))
        notes = (INTERVAL,) if several_seeds(sweep.lines) else ()
        if found:
            tables.append(Table(title, heads, rows, f"sweep of {sweep.switch}", notes, sweep.stream, ">".join(order)))
    return tables


def _value_name(sweep: Sweep, label: str) -> str:
    value = sweep.values[label]
    extra = ["usual"] if value == sweep.usual else []
    extra += [ORACLE] if sweep.is_oracle(label) else []
    return f"{as_text(value)} ({', '.join(extra)})" if extra else as_text(value)


def _picture(name: str, title: str, caption: str, figure: Figure) -> Picture:
    return Picture(name, title, caption, {"png": encode(figure, "png"), "svg": encode(figure, "svg")})


def _print_orders(orders: Orders, console: Console) -> None:
    printer = Printer(console)
    columns: list[Sequence[Entry]] = []
    for metric in METRICS:
        ranks = orders.ranks(metric)
        columns.append(_marked(orders, [orders.mean(label, metric) for label in orders.lines]))
        columns.append([f"{ranks[label].mean:.1f}" if label in ranks else MISSING for label in orders.lines])
    rows = tuple(zip(map(orders.name, orders.lines), zip(*columns, strict=True), strict=True))
    heads = [head for metric in METRICS for head in (metric, "rank")]
    printer.say(f"{orders.stream}: {len(orders.orders)} orders", "bold underline")
    console.print()
    printer.table(Table("Over the orders (%), with mean ranks", ("Method", *heads), rows))
    notes = printer.mark_notes("Mean ± sample standard deviation over orders.", "orders")
    for note in (*notes, "A dash: an order is missing. Methods that use target labels are unranked."):
        printer.say(note, "dim")
    console.print()
