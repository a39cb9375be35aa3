"""What the tables and figures of a study are about: several orders of a stream, variants, sweeps."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from ratp.matrix import Metric
from ratp.record import RunRecord
from ratp.report.cells import places
from ratp.report.summary import Group, Measure
from ratp.statistics import Paired, Summary, mean_ranks, paired, summarise
from ratp.study_record import Row, StudyRecord

Order = tuple[str, ...]
Lines = Mapping[str, Mapping[Order, Group]]


def averages(group: Group, measure: Measure) -> Summary | None:
    """The average of a measure over the domains, over the seeds; None where no domain has it."""
    found = group.spread(measure)
    return found if found.n else None


def several_seeds(lines: Lines) -> bool:
    """Whether a mean is over more than one seed."""
    return any(len(group.counted) > 1 for groups in lines.values() for group in groups.values())


def name_in(lines: Lines, label: str) -> str:
    """What tables and figures call a label that has results: an oracle is called one."""
    return next(iter(lines[label].values())).label


@dataclass(frozen=True)
class Orders:
    """A stream in several orders.

    Attributes:
        stream: Its name.
        orders: The orders that are asked for.
        first: The first label in the file.
        lines: The finished runs by label and order.
    """

    stream: str
    orders: tuple[Order, ...]
    first: str
    lines: Lines

    def name(self, label: str) -> str:
        """What tables call a label."""
        return name_in(self.lines, label)

    def competes(self, label: str) -> bool:
        """Whether it can be the best."""
        return all(group.competes for group in self.lines[label].values())

    def places(self, column: Sequence[Summary | None]) -> list[int]:
        """The places of a column that has an entry a label."""
        rivals = zip(column, map(self.competes, self.lines), strict=True)
        return places([summary.mean if summary and competes else None for summary, competes in rivals])

    def cells(self, label: str, metric: Metric) -> dict[Order, Summary]:
        """The metric in every order that it is known in, over the seeds."""
        found = {order: averages(group, metric) for order, group in self.lines[label].items()}
        return {order: summary for order, summary in found.items() if summary is not None}

    def mean(self, label: str, metric: Metric) -> Summary | None:
        """The metric over the orders; None where one is missing."""
        cells = self.cells(label, metric)
        return summarise(cell.mean for cell in cells.values()) if len(cells) == len(self.orders) else None

    def ranks(self, metric: Metric) -> dict[str, Summary]:
        """The ranks over the orders among the labels that compete and lack none; nothing if there is no rival."""
        known = {label: self.cells(label, metric) for label in self.lines if self.competes(label)}
        rivals = {label: cells for label, cells in known.items() if len(cells) == len(self.orders)}
        if len(rivals) < 2:
            return {}
        return mean_ranks([{label: cells[order].mean for label, cells in rivals.items()} for order in self.orders])

    def difference(self, label: str, metric: Metric) -> Paired | None:
        """The first label less another, order by order, each over the seeds that both have; None: they share nothing.

        Seeds of one order are no independent draws of orders, so they are averaged first.
        """
        ours, theirs = self._runs(self.first, metric), self._runs(label, metric)
        common = [key for key in ours if key in theirs]
        if not common:
            return None
        return paired(_by_order(ours, common), _by_order(theirs, common))

    def _runs(self, label: str, metric: Metric) -> dict[tuple[Order, int], float]:
        runs = [(order, run) for order, group in self.lines[label].items() for run in group.counted]
        found = {(order, run.seed): run.matrix.average(metric) for order, run in runs}
        return {key: value for key, value in found.items() if not math.isnan(value)}


def _by_order(runs: Mapping[tuple[Order, int], float], keys: Sequence[tuple[Order, int]]) -> dict[Order, float]:
    """The mean over seeds in every order, of the orders and seeds given."""
    found: dict[Order, list[float]] = {}
    for key in keys:
        found.setdefault(key[0], []).append(runs[key])
    return {order: fmean(values) for order, values in found.items()}


@dataclass(frozen=True)
class Variants:
    """The methods and variants of a grid that has variants.

    Attributes:
        grid: Number of the grid, from 0.
        stream: Name of its stream.
        orders: Its orders.
        lines: The finished runs by label and order.
    """

    grid: int
    stream: str
    orders: tuple[Order, ...]
    lines: Lines


@dataclass(frozen=True)
class Sweep:
    """The values of one swept switch.

    Attributes:
        grid: Number of the grid, from 0.
        stream: Name of its stream.
        orders: Its orders.
        switch: Name of the switch.
        values: Its values by label.
        usual: The value it has unless it is swept.
        lines: The finished runs by label and order.
    """

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
        """Its labels by rising value; in the order of the file, if the values are no numbers."""
        return sorted(self.values, key=self.values.__getitem__) if self.numeric else list(self.values)

    def is_oracle(self, label: str) -> bool:
        """Whether a run of a label was told the true labels of targets."""
        return any(run.is_oracle for group in self.lines.get(label, {}).values() for run in group.runs)


def several_orders(study: StudyRecord) -> list[Orders]:
    """Every stream that something is asked for on in at least two orders, and that has results of it.

    A setting stands there once, however many names the study has for it: it is no rival of itself.
    """
    asked: dict[str, dict[str, dict[Order, None]]] = {}
    named = study.by_one_name()
    for label, run in named:
        asked.setdefault(run.stream, {}).setdefault(label, {})[run.order] = None
    records = [replace(run.record, name=label) for label, run in named if run.record is not None]
    found = []
    for stream, labels in asked.items():
        often = {label: orders for label, orders in labels.items() if len(orders) > 1}
        orders = dict.fromkeys(order for orders in often.values() for order in orders)
        if lines := _lines(records, stream, often):
            found.append(Orders(stream, tuple(orders), next(iter(often)), lines))
    return found


def variants(study: StudyRecord) -> list[Variants]:
    """Every grid that has variants, and results."""
    found = []
    for grid in dict.fromkeys(row.grid for run in study.runs for row in run.rows if row.is_variant):
        stream, orders, rows = _grid(study, grid)
        if lines := _lines(study.records_by_row(), stream, {row.label for row in rows if row.sweep is None}):
            found.append(Variants(grid, stream, orders, lines))
    return found


def sweeps(study: StudyRecord) -> list[Sweep]:
    """Every switch that is swept, and has results."""
    swept = dict.fromkeys((row.grid, row.sweep[0]) for run in study.runs for row in run.rows if row.sweep)
    found = []
    for grid, switch in swept:
        stream, orders, rows = _grid(study, grid)
        values = {row.label: row.sweep[1] for row in rows if row.sweep and row.sweep[0] == switch}
        if lines := _lines(study.records_by_row(), stream, values):
            found.append(Sweep(grid, stream, orders, switch, values, study.usual.get((grid, switch)), lines))
    return found


def _grid(study: StudyRecord, grid: int) -> tuple[str, tuple[Order, ...], list[Row]]:
    """Stream, orders and rows of a grid."""
    runs = [run for run in study.runs if any(row.grid == grid for row in run.rows)]
    rows = [row for run in runs for row in run.rows if row.grid == grid]
    return runs[0].stream, tuple(dict.fromkeys(run.order for run in runs)), rows


def _lines(records: Sequence[RunRecord], stream: str, labels: Container[str]) -> Lines:
    """Some of the runs on a stream by label and order, in their order."""
    found: dict[str, dict[Order, list[RunRecord]]] = {}
    for run in records:
        if run.config["stream"] == stream and run.name is not None and run.name in labels:
            found.setdefault(run.name, {}).setdefault(run.matrix.domains, []).append(run)
    return {
        label: {order: Group(runs[0].label, stream, order, tuple(runs)) for order, runs in orders.items()}
        for label, orders in found.items()
    }
