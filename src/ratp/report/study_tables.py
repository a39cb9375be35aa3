"""The tables of a study: what is missing, confidence intervals, several orders, sweeps."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from ratp.matrix import METRICS, Metric
from ratp.record import ORACLE
from ratp.report.cells import MISSING, order_text, places
from ratp.report.chapters import Entry, Table, Value
from ratp.report.settings import as_text
from ratp.report.study_parts import Order, Orders, Sweep, averages, several_seeds
from ratp.report.summary import Group, Measure, Section
from ratp.statistics import Paired
from ratp.study_record import AskedRun, StudyRecord

INTERVAL = "In brackets the 95 % confidence interval of the mean over the seeds (Student's), within 0 and 100 %."


def missing_table(study: StudyRecord) -> Table | None:
    """The runs that have not come to their end, by label, state and reason; None if there are none."""
    asked: dict[tuple[str, str], list[AskedRun]] = {}
    for run in study.runs:
        for label in dict.fromkeys(row.label for row in run.rows):
            asked.setdefault((run.stream, label), []).append(run)
    rows: list[tuple[str, tuple[Entry, ...]]] = []
    for (stream, label), runs in asked.items():
        states: dict[str, list[AskedRun]] = {}
        for run in runs:
            if run.record is None:
                states.setdefault(_state(run), []).append(run)
        rows += [
            (label, (stream, f"{len(these)} of {len(runs)}", _which(these, runs), state))
            for state, these in states.items()
        ]
    heads = ("Label", "Stream", "Missing", "Which", "State")
    return Table("missing", "Runs that are not finished", heads, tuple(rows)) if rows else None


def missing_csv(study: StudyRecord) -> str:
    """The runs that have not come to their end, a line a run and label."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("label", "stream", "order", "seed", "state", "reason"))
    for run in study.runs:
        if run.record is None:
            about = (run.stream, ">".join(run.order), run.seed, run.state, run.reason)
            writer.writerows((label, *about) for label in dict.fromkeys(row.label for row in run.rows))
    return file.getvalue()


def interval_table(section: Section) -> Table:
    """The averages of all labels on one stream in one order, with confidence intervals."""
    return Table(
        "averages",
        f"{section.stream}: {order_text(section.order)}, averages over domains (%)",
        ("Label", "Seeds", *section.measures),
        _rows([group.label for group in section.groups], section.groups, section.measures),
        (*([INTERVAL] if section.several_seeds else []), *section.label_notes),
        section.stream,
        ">".join(section.order),
    )


def order_tables(orders: Orders) -> list[Table]:
    """For every metric, all orders side by side, then the first label against the others."""
    tables = []
    for metric in METRICS:
        tables.append(_orders_table(orders, metric))
        if orders.first in orders.lines and len(orders.lines) > 1:
            tables.append(_paired_table(orders, metric))
    return tables


def sweep_tables(sweep: Sweep) -> list[Table]:
    """The averages at every value of a switch, a table an order."""
    tables = []
    for order in sweep.orders:
        found = {label: sweep.lines[label][order] for label in sweep.labels if order in sweep.lines.get(label, {})}
        names = [_value_name(sweep, label) for label in found]
        title = f"{sweep.switch} on {sweep.stream}: {order_text(order)}, averages over domains (%)"
        rows = _rows(names, list(found.values()))
        notes = (INTERVAL,) if several_seeds(sweep.lines) else ()
        heads = (sweep.switch, "Seeds", *METRICS)
        if found:
            tables.append(Table(f"sweep of {sweep.switch}", title, heads, rows, notes, sweep.stream, ">".join(order)))
    return tables


def _rows(
    names: Sequence[str], groups: Sequence[Group], measures: Sequence[Measure] = METRICS
) -> tuple[tuple[str, tuple[Entry, ...]], ...]:
    """Seeds and averages of every group, the best marked."""
    columns = []
    for measure in measures:
        found = [averages(group, measure) for group in groups]
        marks = places([s.mean if s and g.competes else None for s, g in zip(found, groups, strict=True)])
        columns.append([Value.with_interval(s, place) for s, place in zip(found, marks, strict=True)])
    seeds = [Value(len(group.counted), str(len(group.counted))) for group in groups]
    return tuple(zip(names, zip(seeds, *columns, strict=True), strict=True))


def _orders_table(orders: Orders, metric: Metric) -> Table:
    labels = list(orders.lines)
    cells = {label: orders.cells(label, metric) for label in labels}
    columns = []
    for order in orders.orders:
        found = [cells[label].get(order) for label in labels]
        marked = zip(found, orders.places(found), strict=True)
        columns.append([Value.with_deviation(s, place, over_seeds=True) for s, place in marked])
    means = [orders.mean(label, metric) for label in labels]
    columns.append([Value.with_deviation(s, place) for s, place in zip(means, orders.places(means), strict=True)])
    ranks = orders.ranks(metric)
    ranked = [ranks[label].mean if label in ranks else None for label in labels]
    marks = places([None if rank is None else -rank for rank in ranked])
    rank_cells = [
        Value() if rank is None else Value(rank, f"{rank:.1f}", place=place)
        for rank, place in zip(ranked, marks, strict=True)
    ]
    rows = zip(map(orders.name, labels), zip(*columns, rank_cells, strict=True), strict=True)
    numbered = {str(number): order for number, order in enumerate(orders.orders, start=1)}
    return Table(
        f"{metric} by order",
        f"{metric} on {orders.stream} in {len(orders.orders)} orders, averages over domains (%)",
        ("Label", *numbered, "mean", "mean rank"),
        tuple(rows),
        (
            f"Orders: {'; '.join(f'{number}: {order_text(order)}' for number, order in numbered.items())}.",
            "An order: mean ± sample standard deviation over the seeds. The mean over the orders ± that of the orders' "
            "means, only where no order is missing; ranked are those of these that are not told labels.",
        ),
        orders.stream,
        spelled={number: ">".join(order) for number, order in numbered.items()},
    )


def _paired_table(orders: Orders, metric: Metric) -> Table:
    first = orders.name(orders.first)
    others = [label for label in orders.lines if label != orders.first]
    return Table(
        f"{metric} paired",
        f"{metric} on {orders.stream}: {first} minus the others (points)",
        (f"{first} minus", "Orders", "Difference", "Wins", "Losses", "p"),
        tuple((orders.name(label), _paired_entries(orders.difference(label, metric))) for label in others),
        (
            "Over the orders that both have finished, in each the mean over the seeds that both have: mean difference, "
            "its 95 % confidence interval, and the p-value of the paired t-test.",
        ),
        orders.stream,
    )


def _paired_entries(difference: Paired | None) -> tuple[Entry, ...]:
    if difference is None:
        return (Value(0, "0"), *[Value()] * 4)
    counts = [Value(count, str(count)) for count in (difference.n, difference.wins, difference.losses)]
    spread = "" if difference.is_single else f" [{difference.low:+.1f}, {difference.high:+.1f}]"
    mean = Value(difference.mean, f"{difference.mean:+.1f}", spread, difference)
    return counts[0], mean, *counts[1:], Value(difference.p_value, _p_text(difference.p_value))


def _p_text(p: float) -> str:
    if math.isnan(p):
        return MISSING
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _value_name(sweep: Sweep, label: str) -> str:
    value = sweep.values[label]
    extra = ["usual"] if value == sweep.usual else []
    extra += [ORACLE] if sweep.is_oracle(label) else []
    return f"{as_text(value)} ({', '.join(extra)})" if extra else as_text(value)


def _state(run: AskedRun) -> str:
    """What became of a run; of one that failed or is damaged, the last line of the reason."""
    lines = run.reason.strip().splitlines()
    return f"{run.state}: {lines[-1]}" if lines else run.state


def _which(runs: Sequence[AskedRun], asked: Sequence[AskedRun]) -> str:
    """Orders × seeds of some of the runs of a label; named, unless it is all of them."""
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
