"""What the tables and figures of a study are about: several orders of a stream, variants, sweeps."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from ratp.evaluation.matrix import NOTHING, Metric, Paired, Summary, mean_ranks, paired, summarise
from ratp.reports.summary import Group
from ratp.reports.tables import places
from ratp.runs.record import RunRecord
from ratp.studies.record import Row, StudyRecord

Order = tuple[str, ...]
Lines = Mapping[str, Mapping[Order, Group]]


def several_seeds(lines: Lines) -> bool:
    """Whether any mean is over several seeds."""
    return any(len(group.counted) > 1 for groups in lines.values() for group in groups.values())


def name_in(lines: Lines, label: str) -> str:
    """The name tables and figures show for a label, which marks an oracle as one."""
    return next(iter(lines[label].values())).label


@dataclass(frozen=True)
class Orders:
    """The finished runs of a stream in several orders; ``first`` is the first label in the file."""

    stream: str
    orders: tuple[Order, ...]
    first: str
    lines: Lines

    def name(self, label: str) -> str:
        """The name tables show for a label."""
        return name_in(self.lines, label)

    def competes(self, label: str) -> bool:
        """Whether it may be marked best."""
        return all(group.competes for group in self.lines[label].values())

    def places(self, column: Sequence[Summary]) -> list[int]:
        """The places of a column with one summary per label."""
        rivals = zip(column, map(self.competes, self.lines), strict=True)
        return places([summary.mean if summary.n and competes else None for summary, competes in rivals])

    def cells(self, label: str, metric: Metric) -> dict[Order, Summary]:
        """A metric over the seeds, in every order that has it."""
        found = {order: group.spread(metric) for order, group in self.lines[label].items()}
        return {order: summary for order, summary in found.items() if summary.n}

    def mean(self, label: str, metric: Metric) -> Summary:
        """A metric over the orders; nothing if one is missing."""
        cells = self.cells(label, metric)
        return summarise(cell.mean for cell in cells.values()) if len(cells) == len(self.orders) else NOTHING

    def ranks(self, metric: Metric) -> dict[str, Summary]:
        """Mean ranks over the orders, among the labels that compete and have all orders; empty without rivals."""
        known = {label: self.cells(label, metric) for label in self.lines if self.competes(label)}
        rivals = {label: cells for label, cells in known.items() if len(cells) == len(self.orders)}
        if len(rivals) < 2:
            return {}
        return mean_ranks([{label: cells[order].mean for label, cells in rivals.items()} for order in self.orders])

    def difference(self, label: str, metric: Metric) -> Paired | None:
        """The first label minus another, order by order, over the seeds both have; None if they share no run.

        Seeds of one order are not independent draws of orders, so they are averaged first.
        """
        ours, theirs = self._runs(self.first, metric), self._runs(label, metric)
        both: dict[Order, list[tuple[float, float]]] = {}
        for (order, seed), value in ours.items():
            if (order, seed) in theirs:
                both.setdefault(order, []).append((value, theirs[order, seed]))
        if not both:
            return None
        means = {order: tuple(map(fmean, zip(*pairs, strict=True))) for order, pairs in both.items()}
        return paired({order: mean[0] for order, mean in means.items()}, {o: mean[1] for o, mean in means.items()})

    def _runs(self, label: str, metric: Metric) -> dict[tuple[Order, int], float]:
        runs = [(order, run) for order, group in self.lines[label].items() for run in group.counted]
        found = {(order, run.seed): run.matrix.average(metric) for order, run in runs}
        return {key: value for key, value in found.items() if not math.isnan(value)}


@dataclass(frozen=True)
class Variants:
    """The finished runs, by label and order, of a grid that has variants; ``grid`` counts from 0."""

    grid: int
    stream: str
    orders: tuple[Order, ...]
    lines: Lines


@dataclass(frozen=True)
class Sweep:
    """The finished runs of one swept switch, whose values are by label; ``usual`` is its value in other runs."""

    grid: int
    stream: str
    orders: tuple[Order, ...]
    switch: str
    values: Mapping[str, Any]
    usual: Any
    lines: Lines

    @cached_property
    def numeric(self) -> bool:
        """Whether its values are numbers."""
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values.values())

    @cached_property
    def labels(self) -> list[str]:
        """Its labels by rising value, or as in the file if the values are not numbers."""
        return sorted(self.values, key=self.values.__getitem__) if self.numeric else list(self.values)

    def is_oracle(self, label: str) -> bool:
        """Whether a run of the label used target labels."""
        return any(run.is_oracle for group in self.lines.get(label, {}).values() for run in group.runs)


def several_orders(study: StudyRecord) -> list[Orders]:
    """Every stream, with its label shift, with results that the study requests in at least two orders.

    Settings appear once, however many names the study has for them: nothing competes with itself.
    """
    asked: dict[str, dict[str, dict[Order, None]]] = {}
    named = study.by_one_name()
    for label, run in named:
        stream = ", ".join(filter(None, (run.stream, run.shift)))
        asked.setdefault(stream, {}).setdefault(label, {})[run.order] = None
    records = [replace(run.record, name=label) for label, run in named if run.record is not None]
    found = []
    for stream, labels in asked.items():
        often = {label: orders for label, orders in labels.items() if len(orders) > 1}
        orders = dict.fromkeys(order for orders in often.values() for order in orders)
        if lines := _lines([record for record in records if record.stream == stream], stream, often):
            found.append(Orders(stream, tuple(orders), next(iter(often)), lines))
    return found


def variants(study: StudyRecord) -> list[Variants]:
    """Every grid with variants and results."""
    found = []
    for grid in dict.fromkeys(row.grid for run in study.runs for row in run.rows if row.is_variant):
        stream, orders, rows = _grid(study, grid)
        if lines := _lines(_records(study, stream), stream, {row.label for row in rows if row.sweep is None}):
            found.append(Variants(grid, stream, orders, lines))
    return found


def sweeps(study: StudyRecord) -> list[Sweep]:
    """Every swept switch with results."""
    swept = dict.fromkeys((row.grid, row.sweep[0]) for run in study.runs for row in run.rows if row.sweep)
    found = []
    for grid, switch in swept:
        stream, orders, rows = _grid(study, grid)
        values = {row.label: row.sweep[1] for row in rows if row.sweep and row.sweep[0] == switch}
        if lines := _lines(_records(study, stream), stream, values):
            found.append(Sweep(grid, stream, orders, switch, values, study.usual.get((grid, switch)), lines))
    return found


def _grid(study: StudyRecord, grid: int) -> tuple[str, tuple[Order, ...], list[Row]]:
    """Stream, orders and rows of a grid."""
    runs = [run for run in study.runs if any(row.grid == grid for row in run.rows)]
    rows = [row for run in runs for row in run.rows if row.grid == grid]
    return runs[0].stream, tuple(dict.fromkeys(run.order for run in runs)), rows


def _records(study: StudyRecord, stream: str) -> list[RunRecord]:
    """The finished runs on a stream, whatever the label shift: a grid may vary it."""
    return [run for run in study.records_by_row() if run.config["stream"] == stream]


def _lines(records: Sequence[RunRecord], stream: str, labels: Container[str]) -> Lines:
    """The runs of some labels by label and order."""
    found: dict[str, dict[Order, list[RunRecord]]] = {}
    for run in records:
        if run.name is not None and run.name in labels:
            found.setdefault(run.name, {}).setdefault(run.matrix.domains, []).append(run)
    return {
        label: {order: Group(runs[0].label, stream, order, tuple(runs)) for order, runs in orders.items()}
        for label, orders in found.items()
    }
