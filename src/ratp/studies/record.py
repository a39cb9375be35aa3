"""A study as its report sees it: the requested runs and the results so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ratp.runs.record import RunRecord


@dataclass(frozen=True)
class Row:
    """The row of a run in a table: the name of its variant or method.

    Attributes:
        grid: Number of the grid, from 0.
        label: Name of the method or variant.
        sweep: Name and value of the switch that is swept; None: it does not belong to a sweep.
        is_variant: Whether it is one of the grid's variants.
    """

    grid: int
    label: str
    sweep: tuple[str, Any] | None = None
    is_variant: bool = False


@dataclass(frozen=True)
class AskedRun:
    """A run that a study requests.

    Attributes:
        rows: Where tables show it.
        stream: Name of its stream.
        order: Codes of its domains in their order of arrival.
        seed: Its seed.
        state: Its state.
        reason: Why it failed, or how it is damaged; empty otherwise.
        record: Its result; None while it is unfinished.
        settings: Its method and all values except order and seed, as text to compare.
        shift: Label shift of its targets, as text; empty if there is none.
    """

    rows: tuple[Row, ...]
    stream: str
    order: tuple[str, ...]
    seed: int
    state: str
    reason: str = ""
    record: RunRecord | None = None
    settings: str = ""
    shift: str = ""

    @property
    def own_rows(self) -> tuple[Row, ...]:
        """Its rows except those of sweeps."""
        return tuple(row for row in self.rows if row.sweep is None)


@dataclass(frozen=True)
class StudyRecord:
    """The runs that a study requests, and their results so far.

    Attributes:
        title: Its title, one line.
        runs: Its runs, each once, in the order of the file.
        usual: The unswept value of every swept switch, by grid and switch.
        titles: Titles of grids, by number.
    """

    title: str
    runs: tuple[AskedRun, ...]
    usual: Mapping[tuple[int, str], Any] = field(default_factory=dict)
    titles: Mapping[int, str] = field(default_factory=dict)

    def records(self) -> list[RunRecord]:
        """The finished runs by their names in the study; a run with several names appears under each.

        A run that belongs to a sweep and to other rows has the names of those other rows only.
        """
        return [record for run in self.runs for record in _named(run, run.own_rows or run.rows)]

    def records_by_row(self) -> list[RunRecord]:
        """The finished runs by all names that any row has."""
        return [record for run in self.runs for record in _named(run, run.rows)]

    def by_one_name(self) -> list[tuple[str, AskedRun]]:
        """The runs, each once, by the first name of their settings; names of sweeps only where there is no other."""
        names: dict[tuple[str, str], str] = {}
        for run, rows in [*((run, run.own_rows) for run in self.runs), *((run, run.rows) for run in self.runs)]:
            for row in rows:
                names.setdefault(_settings(run), row.label)
        return [(names[_settings(run)], run) for run in self.runs]


def _settings(run: AskedRun) -> tuple[str, str]:
    """Identifies the runs that differ in order and seed only."""
    return run.stream, run.settings or (run.own_rows or run.rows)[0].label


def _named(run: AskedRun, rows: Sequence[Row]) -> list[RunRecord]:
    """A run under the names of some rows; nothing while it is unfinished."""
    if run.record is None:
        return []
    return [replace(run.record, name=label) for label in dict.fromkeys(row.label for row in rows)]


def distinct_labels(runs: Sequence[tuple[Sequence[Row], str, str]]) -> list[tuple[Row, ...]]:
    """The rows of runs; labels that mean different things on one stream get the number of their grid."""
    meant: dict[tuple[str, str], set[str]] = {}
    for rows, stream, settings in runs:
        for row in rows:
            meant.setdefault((row.label, stream), set()).add(settings)
    unclear = {label for (label, _), settings in meant.items() if len(settings) > 1}
    return [
        tuple(replace(row, label=f"{row.label}, grid {row.grid + 1}") if row.label in unclear else row for row in rows)
        for rows, *_ in runs
    ]
