"""A study as read from disk: what its report knows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ratp.runs.record import RunRecord


@dataclass(frozen=True)
class Row:
    """What a table of a study calls a run: the variant's name, or the method's.

    Attributes:
        grid: Number of the grid, from 0.
        label: Name of the method or variant.
        sweep: Name and value of the switch that is swept; None: it is not one of a sweep.
        is_variant: Whether it is one of the grid's variants.
    """

    grid: int
    label: str
    sweep: tuple[str, Any] | None = None
    is_variant: bool = False


@dataclass(frozen=True)
class AskedRun:
    """A run that a study asks for.

    Attributes:
        rows: Where tables show it.
        stream: Name of its stream.
        order: Codes of its domains in their order of arrival.
        seed: Its seed.
        state: What became of it.
        reason: Why it failed, or what of it is damaged; empty otherwise.
        record: Its result; None: it has not come to its end.
        settings: Its method and all values, but for order and seed, as text to compare.
    """

    rows: tuple[Row, ...]
    stream: str
    order: tuple[str, ...]
    seed: int
    state: str
    reason: str = ""
    record: RunRecord | None = None
    settings: str = ""

    @property
    def own_rows(self) -> tuple[Row, ...]:
        """Its rows but for those of sweeps."""
        return tuple(row for row in self.rows if row.sweep is None)


@dataclass(frozen=True)
class StudyRecord:
    """All that a study asks for, and what there is of it.

    Attributes:
        title: What it is, in a line.
        runs: Its runs, each once, in the order of the file.
        usual: The value a swept switch has unless it is swept, by the number of the grid and the switch's name.
        titles: What its grids are about, by their number, of those that say so.
    """

    title: str
    runs: tuple[AskedRun, ...]
    usual: Mapping[tuple[int, str], Any] = field(default_factory=dict)
    titles: Mapping[int, str] = field(default_factory=dict)

    def records(self) -> list[RunRecord]:
        """The finished runs, each called as the study calls it; one that it calls by several names appears as often.

        A swept value that makes no difference goes by the name it has without, where the study has that, too.
        """
        return [record for run in self.runs for record in _named(run, run.own_rows or run.rows)]

    def records_by_row(self) -> list[RunRecord]:
        """The finished runs by all names that any row has."""
        return [record for run in self.runs for record in _named(run, run.rows)]

    def by_one_name(self) -> list[tuple[str, AskedRun]]:
        """The runs, each once, with the first name of its settings; that of a sweep only if there is no other."""
        names: dict[tuple[str, str], str] = {}
        for run, rows in [*((run, run.own_rows) for run in self.runs), *((run, run.rows) for run in self.runs)]:
            for row in rows:
                names.setdefault(_settings(run), row.label)
        return [(names[_settings(run)], run) for run in self.runs]


def _settings(run: AskedRun) -> tuple[str, str]:
    """What a run has in common with those that differ in order and seed alone."""
    return run.stream, run.settings or (run.own_rows or run.rows)[0].label


def _named(run: AskedRun, rows: Sequence[Row]) -> list[RunRecord]:
    """A run by the names that some rows have; none if it has not come to its end."""
    if run.record is None:
        return []
    return [replace(run.record, name=label) for label in dict.fromkeys(row.label for row in rows)]


def distinct_labels(runs: Sequence[tuple[Sequence[Row], str, str]]) -> list[tuple[Row, ...]]:
    """The rows of runs, with the grid's number in a label that grids use for different things on one stream."""
    meant: dict[tuple[str, str], set[str]] = {}
    for rows, stream, settings in runs:
        for row in rows:
            meant.setdefault((row.label, stream), set()).add(settings)
    unclear = {label for (label, _), settings in meant.items() if len(settings) > 1}
    return [
        tuple(replace(row, label=f"{row.label}, grid {row.grid + 1}") if row.label in unclear else row for row in rows)
        for rows, *_ in runs
    ]
