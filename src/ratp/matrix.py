"""The accuracy matrix and the three metrics read off it.

``accuracy[s][d]`` is the accuracy in percent on domain ``d`` after stage ``s``. With ``T + 1`` domains
in their order of arrival (the source is domain 0):

* TDG, target domain generalisation: mean of ``accuracy[s][d]`` over the stages ``s < d``, before domain
  ``d`` was trained on. Defined for every target.
* TDA, target domain adaptation: ``accuracy[d][d]``, right after. Defined for every domain, the source
  included, as the paper averages it.
* FA, forgetting alleviation: mean over the stages ``s > d``, after later domains. Defined for every
  domain but the last.

A domain without labels has no accuracy: its column is NaN (null in JSON), and it has no metric. A domain that came when
a run had ended, which another goes on from, was not measured in the stages before: its column is NaN there, and its TDG
is the mean over the stages from the last of that run on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ratp.errors import RatpError

Metric = Literal["TDG", "TDA", "FA"]
METRICS: tuple[Metric, ...] = ("TDG", "TDA", "FA")


@dataclass(frozen=True)
class Matrix:
    """Accuracies in percent, one row a finished stage.

    Attributes:
        domains: Names in order of arrival; the first is the source.
        accuracy: ``accuracy[s][d]``, at most as many rows as domains. Fewer rows: a run under way. NaN in the
            columns of domains without labels, and at the top of those that came later.
    """

    domains: tuple[str, ...]
    accuracy: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.domains)) < len(self.domains):
            raise RatpError(f"a domain occurs twice: {', '.join(self.domains)}.")
        if len(self.accuracy) > len(self.domains):
            raise RatpError(f"{len(self.accuracy)} rows for {len(self.domains)} domains.")
        for stage, row in enumerate(self.accuracy):
            if len(row) != len(self.domains):
                raise RatpError(f"row {stage} holds {len(row)} values for {len(self.domains)} domains.")
            if not all(math.isnan(v) or 0 <= v <= 100 for v in row):
                raise RatpError(f"row {stage} holds a value outside 0..100: {row}.")
            before = self.accuracy[max(stage - 1, 0)]
            pairs = enumerate(zip(before, row, strict=True))
            if not all(math.isnan(old) == math.isnan(new) or _begins(old, stage, d) for d, (old, new) in pairs):
                raise RatpError(f"row {stage} has accuracies on other domains than row {stage - 1}: {row}.")

    @property
    def stages(self) -> int:
        """Number of finished stages."""
        return len(self.accuracy)

    @property
    def complete(self) -> bool:
        """Whether every domain has had its stage."""
        return self.stages == len(self.domains)

    @property
    def late(self) -> dict[str, str]:
        """Domains that were not measured from the first stage on; each with that after whose stage it first was."""
        found = {}
        for d, name in enumerate(self.domains):
            first = next((s for s, row in enumerate(self.accuracy) if not math.isnan(row[d])), 0)
            if first:
                found[name] = self.domains[first]
        return found

    def with_domains(self, domains: Sequence[str], measured: Mapping[str, float]) -> Matrix:
        """The matrix with further domains, which are measured in the last row alone.

        Args:
            domains: All domains, those it has first.
            measured: Accuracies on further ones after the last stage; a domain without labels has none.
        """
        further = domains[len(self.domains) :]
        rows = [(*row, *(math.nan for _ in further)) for row in self.accuracy[:-1]]
        rows += [(*row, *(measured.get(name, math.nan) for name in further)) for row in self.accuracy[-1:]]
        return Matrix(tuple(domains), tuple(rows))

    def with_row(self, row: Sequence[float]) -> Matrix:
        """The matrix with one more stage."""
        return Matrix(self.domains, (*self.accuracy, tuple(float(v) for v in row)))

    def metric(self, metric: Metric) -> dict[str, float]:
        """The metric by domain, for the domains whose stages so far define it."""
        columns = [(d, n) for d, n in enumerate(self.domains) if self.stages and not math.isnan(self.accuracy[-1][d])]
        if metric == "TDG":
            return {n: mean_of([r[d] for r in self.accuracy[:d] if not math.isnan(r[d])]) for d, n in columns if d > 0}
        if metric == "TDA":
            return {n: self.accuracy[d][d] for d, n in columns if d < self.stages}
        if metric == "FA":
            return {n: mean_of([r[d] for r in self.accuracy[d + 1 :]]) for d, n in columns if d + 1 < self.stages}
        raise RatpError(f"unknown metric {metric!r}: valid are {', '.join(METRICS)}.")

    def average(self, metric: Metric) -> float:
        """Mean of the metric over the domains that have it; NaN if none has."""
        return mean_of(list(self.metric(metric).values()))

    def averages(self) -> dict[Metric, float]:
        """All three averages."""
        return {metric: self.average(metric) for metric in METRICS}

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the metrics spelled out for readers without this package."""
        metrics = {m: {"domains": self.metric(m), "average": _or_none(self.average(m))} for m in METRICS}
        rows = [[_or_none(value) for value in row] for row in self.accuracy]
        return {"domains": list(self.domains), "accuracy": rows, "metrics": metrics}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Matrix:
        """Reads what :meth:`to_json` wrote. The metrics are computed anew; if others are written, it is damaged.

        Raises:
            RatpError: If the data is not a matrix.
        """
        try:
            if isinstance(data["domains"], str):
                raise TypeError("domains is a text")
            domains = tuple(str(n) for n in data["domains"])
            accuracy = tuple(tuple(math.nan if v is None else float(v) for v in row) for row in data["accuracy"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RatpError(f"not an accuracy matrix: {error!r}.") from error
        matrix = Matrix(domains, accuracy)
        if "metrics" in data and data["metrics"] != matrix.to_json()["metrics"]:
            raise RatpError("the metrics of the matrix are not those of its accuracies.")
        return matrix


def describe_late(matrix: Matrix) -> str:
    """Of which stages the TDG of late domains is the mean, in words; empty if there are none."""
    starts = dict.fromkeys(matrix.late.values())
    names = {start: ", ".join(name for name, first in matrix.late.items() if first == start) for start in starts}
    return "; ".join(f"TDG of {late} is over the stages from {start} on" for start, late in names.items())


def mean_of(values: Sequence[float]) -> float:
    """The mean; NaN if there are no values."""
    return math.fsum(values) / len(values) if values else math.nan


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _begins(before: float, stage: int, domain: int) -> bool:
    """Whether a domain that was not measured before may be from a stage on: it must come later than that."""
    return math.isnan(before) and stage < domain
