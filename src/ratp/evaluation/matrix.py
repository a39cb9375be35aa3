"""The accuracy matrix of a run with TDG, TDA and FA, and statistics over seeds and orders.

Intervals and tests are Student's, which assume independent draws from a normal distribution. The statistics refuse NaN,
the accuracy of a domain without labels: the caller decides what to leave out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ratp.errors import RatpError

Metric = Literal["TDG", "TDA", "FA"]
METRICS: tuple[Metric, ...] = ("TDG", "TDA", "FA")


@dataclass(frozen=True)
class Matrix:
    """Accuracies in percent, one row per finished stage.

    Attributes:
        domains: Names in order of arrival; the first is the source.
        accuracy: ``accuracy[s][d]``, with fewer rows than domains for an unfinished run.
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
            if not all(
                math.isnan(old) == math.isnan(new) or _may_start(old, stage, d) or _may_stop(new, stage, d)
                for d, (old, new) in pairs
            ):
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
        """Domains not measured from the first stage on, each with the domain after whose stage it first was."""
        found = {}
        for d, name in enumerate(self.domains):
            first = next((s for s, row in enumerate(self.accuracy) if not math.isnan(row[d])), 0)
            if first:
                found[name] = self.domains[first]
        return found

    @property
    def gone(self) -> dict[str, str]:
        """Domains not measured up to the last stage, each with the domain after whose stage it was measured last."""
        found = {}
        for d, name in enumerate(self.domains):
            last = max((s for s, row in enumerate(self.accuracy) if not math.isnan(row[d])), default=self.stages - 1)
            if last < self.stages - 1:
                found[name] = self.domains[last]
        return found

    def with_domains(self, domains: Sequence[str], measured: Mapping[str, float]) -> Matrix:
        """Returns the matrix with further domains, measured in the last row only.

        Args:
            domains: All domains, beginning with those of the matrix.
            measured: Accuracies on the further ones with labels after the last stage.
        """
        further = domains[len(self.domains) :]
        rows = [(*row, *(math.nan for _ in further)) for row in self.accuracy[:-1]]
        rows += [(*row, *(measured.get(name, math.nan) for name in further)) for row in self.accuracy[-1:]]
        return Matrix(tuple(domains), tuple(rows))

    def with_row(self, row: Sequence[float]) -> Matrix:
        """Returns the matrix with one more stage."""
        return Matrix(self.domains, (*self.accuracy, tuple(float(v) for v in row)))

    def metric(self, metric: Metric) -> dict[str, float]:
        """Returns the metric by domain, for the domains whose stages so far define it."""
        cells = {
            "TDG": lambda d: [row[d] for row in self.accuracy[:d]],
            "TDA": lambda d: [row[d] for row in self.accuracy[d : d + 1]],
            "FA": lambda d: [row[d] for row in self.accuracy[d + 1 :]],
        }
        if metric in cells:
            measured = {n: [v for v in cells[metric](d) if not math.isnan(v)] for d, n in enumerate(self.domains)}
            return {name: mean_of(values) for name, values in measured.items() if values}
        raise RatpError(f"unknown metric {metric!r}: valid are {', '.join(METRICS)}.")

    def average(self, metric: Metric) -> float:
        """Returns the mean of the metric over the domains that have it; NaN if none has."""
        return mean_of(list(self.metric(metric).values()))

    def averages(self) -> dict[Metric, float]:
        """Returns all three averages."""
        return {metric: self.average(metric) for metric in METRICS}

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, with the metrics for readers without this package."""
        metrics = {m: {"domains": self.metric(m), "average": _or_none(self.average(m))} for m in METRICS}
        rows = [[_or_none(value) for value in row] for row in self.accuracy]
        return {"domains": list(self.domains), "accuracy": rows, "metrics": metrics}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Matrix:
        """Reads what :meth:`to_json` wrote. The metrics are computed again; if they differ, the data is damaged."""
        try:
            if isinstance(data["domains"], str):
                raise TypeError("domains is a string")
            domains = tuple(str(n) for n in data["domains"])
            accuracy = tuple(tuple(math.nan if v is None else float(v) for v in row) for row in data["accuracy"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RatpError(f"not an accuracy matrix: {error!r}.") from error
        matrix = Matrix(domains, accuracy)
        if "metrics" in data and data["metrics"] != matrix.to_json()["metrics"]:
            raise RatpError("the metrics of the matrix are not those of its accuracies.")
        return matrix


def describe_late(matrix: Matrix) -> str:
    """Says what is averaged for domains that were not measured at first, or no longer; empty if there are none."""
    starts = dict.fromkeys(matrix.late.values())
    names = {start: ", ".join(name for name, first in matrix.late.items() if first == start) for start in starts}
    notes = [f"TDG of {late} is over the stages from {start} on" for start, late in names.items()]
    notes += [f"{name} is not measured after the stage of {last}" for name, last in matrix.gone.items()]
    return "; ".join(notes)


def mean_of(values: Sequence[float]) -> float:
    """Returns the mean; NaN of no values."""
    return math.fsum(values) / len(values) if values else math.nan


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _may_start(before: float, stage: int, domain: int) -> bool:
    """Whether a domain that was not measured before may be measured from a stage on: it must come later than that."""
    return math.isnan(before) and stage < domain


def _may_stop(now: float, stage: int, domain: int) -> bool:
    """Whether a domain may no longer be measured from a stage on: its images may be gone once its own stage is over."""
    return math.isnan(now) and stage > domain


Key = TypeVar("Key")
Verdict = Literal["close", "within spread", "above", "below"]

AVERAGE = "average"

# Smaller differences of accuracies are rounding errors.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Summary:
    """A summary of ``n`` values; all else is NaN if there are none (:data:`NOTHING`)."""

    n: int
    mean: float
    deviation: float  # sample standard deviation (n - 1); NaN for a single value
    low: float  # lower end of the confidence interval of the mean; NaN for a single value
    high: float  # upper end of it

    @property
    def is_single(self) -> bool:
        """Whether there is one value only, which says nothing about the spread."""
        return self.n == 1

    @property
    def half_width(self) -> float:
        """Half the width of the confidence interval; NaN for a single value."""
        return (self.high - self.low) / 2


NOTHING = Summary(0, math.nan, math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Paired(Summary):
    """A summary of the differences ours - theirs."""

    wins: int  # number of positive differences
    losses: int  # number of negative ones
    ties: int  # number of zeros
    p_value: float  # two-sided p-value of the paired t-test; NaN for a single difference


def summarise(values: Iterable[float], confidence: float = 0.95) -> Summary:
    """Returns the mean, standard deviation and Student's confidence interval of the mean of one or more finite values.

    Such an interval covers the mean of the distribution with probability ``confidence``.
    """
    values = [float(value) for value in values]
    if not values:
        raise ValueError("there are no values to summarise.")
    _refuse_gaps(values)
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Summary(n, mean, math.nan, math.nan, math.nan)
    deviation = math.dist(values, [mean] * n) / math.sqrt(n - 1)
    half = student_t(confidence, n - 1) * deviation / math.sqrt(n)
    return Summary(n, mean, deviation, mean - half, mean + half)


def paired(ours: Mapping[Key, float], theirs: Mapping[Key, float], confidence: float = 0.95) -> Paired:
    """Compares two sets of values key by key, e.g. by order and seed, over the keys both have.

    A difference below 1e-9 is a rounding error and counts as 0. If all differences are equal, the p-value is 1 if they
    are 0, and 0 otherwise. ``confidence`` is that of the interval of the mean difference.
    """
    common = [key for key in ours if key in theirs]
    if not common:
        raise ValueError("there is nothing to compare: no key is on both sides.")
    exact = [ours[key] - theirs[key] for key in common]
    differences = [0.0 if abs(difference) < ROUNDING else difference for difference in exact]
    summary = summarise(differences, confidence)
    return Paired(
        **vars(summary),
        wins=sum(difference > 0 for difference in differences),
        losses=sum(difference < 0 for difference in differences),
        ties=differences.count(0),
        p_value=_p_value(summary),
    )


def ranks(rows: Mapping[str, float]) -> dict[str, float]:
    """Ranks names by value: 1 for the highest, the mean of their ranks for equal ones."""
    values = list(rows.values())
    _refuse_gaps(values)
    return {name: sum(other > v for other in values) + (values.count(v) + 1) / 2 for name, v in rows.items()}


def mean_ranks(tables: Sequence[Mapping[str, float]], confidence: float = 0.95) -> dict[str, Summary]:
    """Summarises the ranks over several tables, e.g. one per order.

    Names that a table lacks are left out first, so that all tables rank the same names.
    """
    names = [name for name in tables[0] if all(name in table for table in tables)] if tables else []
    if not names:
        raise ValueError(f"there is nothing to rank: no name is in all of {len(tables)} tables.")
    ranked = [ranks({name: table[name] for name in names}) for table in tables]
    return {name: summarise((table[name] for table in ranked), confidence) for name in names}


def best_two(rows: Mapping[str, float], decimals: int = 1) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names with the best and the second best value as printed.

    Values that look equal in print share a place; if several share the first, there is no second.
    """
    _refuse_gaps(rows.values())
    printed = {name: float(f"{value:.{decimals}f}") for name, value in rows.items()}
    levels = sorted(set(printed.values()), reverse=True)
    first, next_ = (
        frozenset(name for name, value in printed.items() if value in level) for level in (levels[:1], levels[1:2])
    )
    return first, next_ if len(first) == 1 else frozenset()


def verdict(printed: float, ours: Summary, tolerance: float) -> Verdict:
    """Compares our mean with a printed number, up to rounding errors of 1e-9.

    It is "close" if the difference is within the tolerance, and "within spread" if the number is inside our confidence
    interval, so that our values do not settle whether they agree. Otherwise it is "above" or "below" the number.
    """
    _refuse_gaps([printed])
    if not tolerance >= 0:
        raise ValueError(f"the tolerance is {tolerance}; it must be at least 0.")
    difference = ours.mean - printed
    if abs(difference) <= tolerance + ROUNDING:
        return "close"
    if not ours.is_single and abs(difference) <= ours.half_width + ROUNDING:
        return "within spread"
    return "above" if difference > 0 else "below"


def student_t(confidence: float, freedom: int) -> float:
    """Returns the number that a t-distributed variable exceeds in size with probability ``1 - confidence``."""
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(f"no t quantile of confidence {confidence} with {freedom} degrees of freedom.")
    from scipy.special import stdtrit

    return float(-stdtrit(freedom, (1 - confidence) / 2))


def _p_value(differences: Summary) -> float:
    if differences.is_single:
        return math.nan
    if differences.deviation < ROUNDING:
        return 1.0 if abs(differences.mean) < ROUNDING else 0.0
    from scipy.special import stdtr

    t = differences.mean / differences.deviation * math.sqrt(differences.n)
    return float(2 * stdtr(differences.n - 1, -abs(t)))


def _refuse_gaps(values: Iterable[float]) -> None:
    gaps = [value for value in values if not math.isfinite(value)]
    if gaps:
        raise ValueError(f"only finite values have statistics, and {len(gaps)} of these are not, e.g. {gaps[0]}.")
