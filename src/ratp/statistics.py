"""Statistics of tables: means over seeds and orders with confidence intervals, paired differences, ranks.

Intervals and tests are Student's, so they take the values as independent draws of a normal distribution. NaN, the
accuracy of a domain without labels, is refused everywhere: whoever makes a table decides what to leave out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

Key = TypeVar("Key")
Verdict = Literal["close", "within spread", "above", "below"]

AVERAGE = "average"

# Differences of accuracies below this are rounding errors.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Summary:
    """Some values in short.

    Attributes:
        n: How many values there are; 0: none, and all the rest is NaN (:data:`NOTHING`).
        mean: Their mean.
        deviation: Their sample standard deviation (n - 1); NaN of a single value.
        low: Lower end of the confidence interval of the mean; NaN of a single value.
        high: Upper end of it; NaN of a single value.
    """

    n: int
    mean: float
    deviation: float
    low: float
    high: float

    @property
    def is_single(self) -> bool:
        """Whether it stands on one value, which says nothing about the spread."""
        return self.n == 1

    @property
    def half_width(self) -> float:
        """Distance from the mean to an end of its confidence interval; NaN of a single value."""
        return (self.high - self.low) / 2


# What there is to say where nothing was measured.
NOTHING = Summary(0, math.nan, math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Paired(Summary):
    """The differences ours - theirs in short, and what they say.

    Attributes:
        wins: How many differences are positive.
        losses: How many are negative.
        ties: How many are 0.
        p_value: Two-sided p-value of the paired t-test; NaN of a single difference.
    """

    wins: int
    losses: int
    ties: int
    p_value: float


def summarise(values: Iterable[float], confidence: float = 0.95) -> Summary:
    """Mean, standard deviation and Student's confidence interval of the mean.

    Args:
        values: At least one finite value.
        confidence: Probability with which such an interval covers the mean of the distribution.

    Raises:
        ValueError: If there is no value, one is not finite, or an interval's confidence is not between 0 and 1.
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
    """Compares two sets of values key by key, over the keys both have.

    A difference below 1e-9 is a rounding error and counts as 0. Where all differences are equal the t-test has
    nothing to divide by: its p-value is 1 if they are 0, and 0 otherwise.

    Args:
        ours: Value by key, e.g. by order, or by order and seed.
        theirs: The values to compare with.
        confidence: Probability of the confidence interval of the mean difference.

    Raises:
        ValueError: If no key is common, or a value of a common key is not finite.
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
    """The rank of every name: 1 for the highest value, the mean of their ranks for equal ones.

    Raises:
        ValueError: If a value is not finite.
    """
    values = list(rows.values())
    _refuse_gaps(values)
    return {
        name: sum(other > value for other in values) + (values.count(value) + 1) / 2 for name, value in rows.items()
    }


def mean_ranks(tables: Sequence[Mapping[str, float]], confidence: float = 0.95) -> dict[str, Summary]:
    """The ranks over several tables, e.g. one an order.

    Names that a table lacks are left out first, so that the others are ranked among the same names everywhere.

    Raises:
        ValueError: If no name is in all tables, or a value of one that is in all is not finite.
    """
    names = [name for name in tables[0] if all(name in table for table in tables)] if tables else []
    if not names:
        raise ValueError(f"there is nothing to rank: no name is in all of {len(tables)} tables.")
    ranked = [ranks({name: table[name] for name in names}) for table in tables]
    return {name: summarise((table[name] for table in ranked), confidence) for name in names}


def best_two(rows: Mapping[str, float], decimals: int = 1) -> tuple[frozenset[str], frozenset[str]]:
    """The names with the best and with the second best value as printed.

    Values that look equal in print share a place. The second place is that of the next lower value in print; where
    several share the first, there is none.

    Args:
        rows: Value by name.
        decimals: Decimals in print.

    Raises:
        ValueError: If a value is not finite.
    """
    _refuse_gaps(rows.values())
    printed = {name: float(f"{value:.{decimals}f}") for name, value in rows.items()}
    levels = sorted(set(printed.values()), reverse=True)
    first, next_ = (
        frozenset(name for name, value in printed.items() if value in level) for level in (levels[:1], levels[1:2])
    )
    return first, next_ if len(first) == 1 else frozenset()


def verdict(printed: float, ours: Summary, tolerance: float) -> Verdict:
    """How our mean lies to a printed number.

    It is close if it differs from the printed number by no more than the tolerance. If it differs by more, but with at
    least two values by no more than the half-width of its confidence interval, it is within the spread: our values
    leave open whether they agree. Otherwise it is above or below the printed number. Rounding errors up to 1e-9 do not
    count.

    Args:
        printed: The number to agree with.
        ours: Our values.
        tolerance: Difference that is allowed however certain our mean is.

    Raises:
        ValueError: If the printed number is not finite or the tolerance is negative.
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


@cache
def student_t(confidence: float, freedom: int) -> float:
    """The number that a t-distributed variable stays below in size with the given probability.

    Args:
        confidence: Probability, e.g. 0.95 for the 97.5 % quantile of one side.
        freedom: Degrees of freedom, at least 1.

    Raises:
        ValueError: If there is no such number.
    """
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(f"no t quantile of confidence {confidence} with {freedom} degrees of freedom.")
    low, high = 0.0, 1.0
    while _exceeds(high, freedom) > 1 - confidence:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        if _exceeds(middle, freedom) > 1 - confidence:
            low = middle
        else:
            high = middle
    return middle


def _p_value(differences: Summary) -> float:
    if differences.is_single:
        return math.nan
    if differences.deviation < ROUNDING:
        return 1.0 if abs(differences.mean) < ROUNDING else 0.0
    return _exceeds(differences.mean / differences.deviation * math.sqrt(differences.n), differences.n - 1)


def _exceeds(t: float, freedom: int) -> float:
    """Probability that a t-distributed variable is greater than ``t`` in size."""
    ratio = t * t / freedom
    x, y = 1 / (1 + ratio), ratio / (1 + ratio)
    a, b = freedom / 2, 0.5
    # Either side of this point, the fraction of one of the two converges quickly.
    return _incomplete_beta(a, b, x, y) if x < (a + 1) / (a + b + 2) else 1 - _incomplete_beta(b, a, y, x)


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """The regularised incomplete beta function at ``x``, where ``y`` is ``1 - x`` without cancellation."""
    if x == 0:
        return 0.0
    logarithm = a * math.log(x) + b * math.log(y) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(logarithm) / (a * _beta_fraction(a, b, x))


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, from its front (Lentz's way)."""
    value, upper, lower = 1.0, 1.0, 0.0
    step, m = 0.0, 0
    while abs(step - 1) > 1e-14:
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        m += 1
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        step = 1.0
        for term in (odd, even):
            upper, lower = 1 + term / upper, 1 / (1 + term * lower)
            step *= upper * lower
        value *= step
    return value


def _refuse_gaps(values: Iterable[float]) -> None:
    gaps = [value for value in values if not math.isfinite(value)]
    if gaps:
        raise ValueError(f"only finite values have statistics, and {len(gaps)} of these are not, e.g. {gaps[0]}.")
