"""Statistics of tables: by hand, by printed t tables, by scipy, and by what must not change them."""

import math
from dataclasses import FrozenInstanceError, astuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from ratp.evaluation.matrix import (
    Summary,
    best_two,
    mean_ranks,
    paired,
    ranks,
    student_t,
    summarise,
    verdict,
)

PERCENT = st.floats(0, 100)
SAMPLES = st.lists(PERCENT, min_size=1, max_size=8)
SHORT = st.integers(0, 1000).map(lambda number: number / 10)
TABLES = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), SHORT, max_size=8)
SINGLE = Summary(1, 80.0, math.nan, math.nan, math.nan)


def close(expected, **limits):
    return pytest.approx(expected, nan_ok=True, **limits)


class TestStudent:
    @pytest.mark.parametrize(
        ("confidence", "freedom", "expected"),
        [
            (0.95, 1, 12.706),
            (0.95, 2, 4.303),
            (0.95, 4, 2.776),
            (0.99, 9, 3.250),
            (0.9, 30, 1.697),
            (0.95, 120, 1.980),
        ],
    )
    def test_printed_tables(self, confidence, freedom, expected):
        assert student_t(confidence, freedom) == pytest.approx(expected, abs=5e-4)

    @given(st.floats(0.01, 0.9999))
    def test_closed_forms_of_one_and_two_degrees(self, confidence):
        assert student_t(confidence, 1) == pytest.approx(math.tan(math.pi * confidence / 2), rel=1e-9)
        squared = 2 * confidence**2 / (1 - confidence**2)
        assert student_t(confidence, 2) == pytest.approx(math.sqrt(squared), rel=1e-9)

    @pytest.mark.parametrize("confidence", [0.5, 0.6827, 0.8, 0.9, 0.95, 0.99, 0.999])
    def test_agrees_with_scipy(self, confidence):
        freedoms = [*range(1, 60), *range(60, 1001, 47), 1000]
        expected = stats.t.ppf((1 + confidence) / 2, freedoms)
        assert [student_t(confidence, freedom) for freedom in freedoms] == pytest.approx(expected, rel=1e-10)

    @pytest.mark.parametrize("confidence", [1e-300, 1e-6, 1 - 1e-15])
    @pytest.mark.parametrize("freedom", [1, 3, 10**7])
    def test_the_ends_of_the_range(self, confidence, freedom):
        expected = -stats.t.ppf((1 - confidence) / 2, freedom)
        assert student_t(confidence, freedom) == pytest.approx(expected, rel=1e-6, abs=1e-15)

    @pytest.mark.parametrize(("confidence", "freedom"), [(0, 3), (1, 3), (95, 3), (-0.5, 3), (math.nan, 3), (0.95, 0)])
    def test_undefined_values_are_refused(self, confidence, freedom):
        with pytest.raises(ValueError, match="no t quantile"):
            student_t(confidence, freedom)


class TestSummarise:
    def test_worked_example(self):
        """2, 4 and 6: deviation 2, and 4.302653 (from a table) times 2 / √3 either way."""
        summary = summarise([2, 4, 6])
        assert (summary.n, summary.mean, summary.deviation) == (3, 4, 2)
        assert summary.half_width == pytest.approx(4.302653 * 2 / math.sqrt(3), rel=1e-6)
        assert (summary.low, summary.high) == pytest.approx((-0.968275, 8.968275), rel=1e-6)
        assert not summary.is_single

    def test_a_single_value_has_no_spread(self):
        summary = summarise([80])
        assert (summary.n, summary.mean) == (1, 80)
        assert all(math.isnan(v) for v in (summary.deviation, summary.low, summary.high, summary.half_width))
        assert summary.is_single

    @given(st.lists(PERCENT, min_size=2, max_size=8), st.sampled_from([0.5, 0.9, 0.99]))
    def test_agrees_with_numpy_and_scipy(self, values, confidence):
        summary = summarise(values, confidence)
        half = stats.t.ppf((1 + confidence) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
        assert summary.mean == close(np.mean(values), abs=1e-9)
        assert summary.deviation == close(np.std(values, ddof=1), abs=1e-9)
        assert (summary.low, summary.high) == close((summary.mean - half, summary.mean + half), abs=1e-9)

    @given(SAMPLES, st.randoms())
    def test_order_of_values_does_not_matter(self, values, random):
        shuffled = random.sample(values, len(values))
        assert astuple(summarise(shuffled)) == close(astuple(summarise(values)), abs=1e-9)

    @given(SAMPLES, st.floats(-100, 100), st.floats(-10, 10))
    def test_shifted_and_scaled_values_have_a_shifted_and_scaled_summary(self, values, shift, scale):
        before, after = summarise(values), summarise(scale * v + shift for v in values)
        ends = sorted((scale * before.low + shift, scale * before.high + shift))
        expected = (before.n, scale * before.mean + shift, abs(scale) * before.deviation, *ends)
        assert astuple(after) == close(expected, abs=1e-7)

    @given(st.lists(PERCENT, min_size=2, max_size=8).filter(lambda values: max(values) - min(values) > 1e-3))
    def test_more_confidence_needs_a_wider_interval(self, values):
        narrow, default, wide = (summarise(values, confidence) for confidence in (0.9, 0.95, 0.99))
        assert wide.low < default.low < narrow.low < narrow.mean < narrow.high < default.high < wide.high
        assert default == summarise(values)

    @given(PERCENT, st.integers(2, 8))
    def test_equal_values_have_no_deviation(self, value, n):
        assert astuple(summarise([value] * n)) == close((n, value, 0, value, value), abs=1e-10)

    def test_intervals_cover_as_often_as_they_say(self):
        samples = np.random.default_rng(0).normal(70, 3, (2000, 3))
        covered = np.mean([s.low < 70 < s.high for s in map(summarise, samples)])
        assert covered == pytest.approx(0.95, abs=0.015)

    def test_empty_input_is_refused(self):
        with pytest.raises(ValueError, match="no values"):
            summarise([])

    @pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf])
    def test_gaps_are_refused(self, gap):
        with pytest.raises(ValueError, match=f"1 of these are not, e.g. {gap}"):
            summarise([80, gap])

    def test_summary_is_immutable(self):
        with pytest.raises(FrozenInstanceError):
            SINGLE.mean = 90.0


@st.composite
def sides(draw, least=1):
    """Two sides with the same keys; some of their values are equal."""
    theirs = draw(st.lists(SHORT, min_size=least, max_size=8))
    ours = [draw(st.just(value) | SHORT) for value in theirs]
    return dict(enumerate(ours)), dict(enumerate(theirs))


class TestPaired:
    def test_worked_example(self):
        """Differences 1, 2, 0 and 3: mean 1.5, deviation √(5/3), t = √5.4 with three degrees of freedom.

        For three there is a closed form: p = 1 - 2/π (arctan u + u / (1 + u²)) with u = t / √3.
        """
        ours = {("SCAP", 0): 81.0, ("SCAP", 1): 72.0, ("ACPS", 0): 63.0, ("ACPS", 1): 54.0}
        theirs = {("SCAP", 0): 80.0, ("SCAP", 1): 70.0, ("ACPS", 0): 63.0, ("ACPS", 1): 51.0}
        result = paired(ours, theirs)
        assert (result.n, result.mean, result.deviation) == (4, 1.5, pytest.approx(math.sqrt(5 / 3)))
        assert (result.low, result.high) == pytest.approx((-0.5543, 3.5543), abs=1e-4)
        assert (result.wins, result.losses, result.ties) == (3, 0, 1)
        u = math.sqrt(1.8)
        assert result.p_value == pytest.approx(1 - 2 / math.pi * (math.atan(u) + u / 2.8), rel=1e-12)
        assert not result.is_single

    def test_keys_of_one_side_are_left_out(self):
        result = paired({"a": 1.0, "b": 5.0, "c": 9.0}, {"c": 7.0, "b": 6.0, "x": math.nan, "y": 0.0})
        assert (result.n, result.mean) == (2, 0.5)
        assert (result.wins, result.losses, result.ties) == (1, 1, 0)

    def test_a_single_pair_has_no_p_value(self):
        result = paired({"a": 82.0}, {"a": 80.0})
        assert (result.n, result.mean, result.wins, result.is_single) == (1, 2, 1, True)
        assert all(math.isnan(v) for v in (result.deviation, result.low, result.high, result.p_value))

    @pytest.mark.parametrize(("gain", "p_value"), [(0.0, 1.0), (1e-11, 1.0), (0.1, 0.0), (-0.1, 0.0)])
    @pytest.mark.parametrize("n", [2, 3, 7])
    def test_equal_differences(self, gain, p_value, n):
        """Equal but for rounding errors, which grow with the values."""
        theirs = {key: 5.0 + 13 * key for key in range(n)}
        result = paired({key: value + gain for key, value in theirs.items()}, theirs)
        assert result.p_value == p_value
        assert (result.wins, result.losses) == ((gain > 0.01) * n, (gain < -0.01) * n)
        assert result.wins + result.losses + result.ties == n

    def test_ties_end_where_rounding_errors_do(self):
        theirs = dict.fromkeys("abcd", 0.0)
        result = paired({"a": 0.9e-9, "b": -0.9e-9, "c": 1.1e-9, "d": -1.1e-9}, theirs)
        assert (result.wins, result.losses, result.ties) == (1, 1, 2)

    @given(sides(least=2))
    def test_agrees_with_scipy(self, both):
        ours, theirs = both
        result = paired(ours, theirs)
        if result.deviation > 1e-6:
            expected = stats.ttest_rel(list(ours.values()), list(theirs.values()))
            assert result.p_value == pytest.approx(expected.pvalue, rel=1e-8)
            assert (result.low, result.high) == pytest.approx(expected.confidence_interval(0.95), abs=1e-9)

    @given(sides())
    def test_swapping_sides_negates_the_result(self, both):
        ours, theirs = both
        one, other = paired(ours, theirs), paired(theirs, ours)
        assert other.mean == -one.mean
        assert (other.low, other.high) == close((-one.high, -one.low))
        assert (other.wins, other.losses, other.ties) == (one.losses, one.wins, one.ties)
        assert (other.n, other.deviation, other.p_value) == close((one.n, one.deviation, one.p_value))

    @given(sides(least=2), st.sampled_from([0.8, 0.9, 0.99]))
    def test_the_interval_leaves_zero_out_just_when_the_test_rejects(self, both, confidence):
        result = paired(*both, confidence)
        if abs(result.p_value - (1 - confidence)) > 1e-9:
            assert (result.low > 0 or result.high < 0) == (result.p_value < 1 - confidence)

    @given(sides(), st.randoms())
    def test_order_of_keys_does_not_matter(self, both, random):
        ours, theirs = both
        shuffled = dict(random.sample(list(theirs.items()), len(theirs)))
        assert astuple(paired(shuffled, ours)) == close(astuple(paired(theirs, ours)))

    @pytest.mark.parametrize(("ours", "theirs"), [({}, {}), ({"a": 1.0}, {"b": 1.0}), ({"a": 1.0}, {})])
    def test_disjoint_keys_are_refused(self, ours, theirs):
        with pytest.raises(ValueError, match="no key is on both sides"):
            paired(ours, theirs)

    def test_gaps_are_refused(self):
        with pytest.raises(ValueError, match="finite"):
            paired({"a": 1.0, "b": math.nan}, {"a": 1.0, "b": 2.0})


class TestRanks:
    def test_worked_example(self):
        rows = {"tent": 60.0, "ratp": 80.0, "shot": 70.0, "eata": 60.0, "t3a": 60.0}
        assert ranks(rows) == {"tent": 4, "ratp": 1, "shot": 2, "eata": 4, "t3a": 4}
        assert ranks({"a": 1.0, "b": 1.0, "c": 0.0}) == {"a": 1.5, "b": 1.5, "c": 3}
        assert ranks({}) == {}

    @given(TABLES)
    def test_ranks_sum_is_constant(self, rows):
        n = len(rows)
        found = ranks(rows)
        assert list(found) == list(rows)
        assert sum(found.values()) == n * (n + 1) / 2

    @given(TABLES)
    def test_agrees_with_scipy(self, rows):
        assert list(ranks(rows).values()) == stats.rankdata([-value for value in rows.values()]).tolist()

    def test_gaps_are_refused(self):
        with pytest.raises(ValueError, match="finite"):
            ranks({"a": 1.0, "b": math.nan})


class TestMeanRanks:
    def test_names_some_table_lacks_take_no_place(self):
        """``x`` is first in the first table, and ``a`` is nevertheless ranked 1 of 2 there."""
        found = mean_ranks([{"x": 9.0, "b": 7.0, "a": 8.0}, {"a": 5.0, "b": 5.0}, {"a": 3.0, "b": 4.0, "y": 1.0}])
        assert list(found) == ["b", "a"]
        assert (found["a"].n, found["a"].mean, found["a"].deviation) == (3, 1.5, 0.5)
        assert found["b"] == summarise([2, 1.5, 1])

    @given(st.lists(TABLES, min_size=1, max_size=4), st.sampled_from([0.9, 0.99]))
    def test_ranks_sum_is_constant(self, tables, confidence):
        common = set.intersection(*(set(table) for table in tables))
        if common:
            found = mean_ranks(tables, confidence)
            assert set(found) == common
            assert all(summary.n == len(tables) for summary in found.values())
            assert sum(s.mean for s in found.values()) == pytest.approx(len(common) * (len(common) + 1) / 2)

    def test_the_confidence_is_passed_on(self):
        tables = [{"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.0}]
        assert mean_ranks(tables, 0.8)["a"] == summarise([1, 2], 0.8)

    @pytest.mark.parametrize("tables", [[], [{}], [{"a": 1.0}, {"b": 1.0}]])
    def test_disjoint_keys_are_refused(self, tables):
        with pytest.raises(ValueError, match=f"in all of {len(tables)} tables"):
            mean_ranks(tables)


class TestBestTwo:
    @pytest.mark.parametrize(
        ("rows", "best", "second"),
        [
            ({"a": 80.0, "b": 79.0, "c": 78.0}, "a", "b"),
            ({"a": 80.04, "b": 79.96, "c": 79.94, "d": 79.0}, "ab", ""),
            ({"a": 80.0, "b": 79.0, "c": 79.04}, "a", "bc"),
            ({"a": 80.0, "b": 80.0}, "ab", ""),
            ({"a": 80.0}, "a", ""),
            ({"a": 0.0, "b": -0.04, "c": -0.06}, "ab", ""),
            ({}, "", ""),
        ],
    )
    def test_worked_examples(self, rows, best, second):
        assert best_two(rows) == (frozenset(best), frozenset(second))

    def test_numbers_in_the_middle_are_rounded_as_they_are_printed(self):
        """0.25 is printed as 0.2, 0.35 (a little less than that in binary) as 0.3, 0.75 as 0.8."""
        assert best_two({"a": 0.25, "b": 0.24, "c": 0.15}) == ({"a", "b"}, frozenset())
        assert best_two({"a": 0.35, "b": 0.3, "c": 0.2}) == ({"a", "b"}, frozenset())
        assert best_two({"a": 0.75, "b": 0.8, "c": 0.7}) == ({"a", "b"}, frozenset())

    def test_decimals(self):
        rows = {"a": 80.04, "b": 80.02, "c": 79.6}
        assert best_two(rows, decimals=2) == ({"a"}, {"b"})
        assert best_two(rows, decimals=0) == ({"a", "b", "c"}, frozenset())

    @given(st.dictionaries(st.text(max_size=2), st.integers(7000, 7100).map(lambda i: i / 400), min_size=1, max_size=8))
    @example({"a": 17.75, "b": 17.65, "c": 17.85})
    def test_marks_follow_print(self, rows):
        best, second = best_two(rows)
        assert best
        assert not best & second
        printed = {name: f"{value:.1f}" for name, value in rows.items()}
        levels = sorted(set(printed.values()), key=float, reverse=True)
        assert {printed[name] for name in best} == set(levels[:1])
        assert {printed[name] for name in second} == (set(levels[1:2]) if len(best) == 1 else set())
        marked = {printed[name] for name in best | second}
        assert not marked & {value for name, value in printed.items() if name not in best | second}

    def test_gaps_are_refused(self):
        with pytest.raises(ValueError, match="finite"):
            best_two({"a": 1.0, "b": math.nan})


class TestVerdict:
    @pytest.mark.parametrize(
        ("printed", "tolerance", "expected"),
        [
            (80.0, 0.0, "close"),
            (79.8, 0.2, "close"),
            (80.2, 0.2, "close"),
            (79.79, 0.2, "above"),
            (80.21, 0.2, "below"),
        ],
    )
    def test_one_value_has_the_tolerance_only(self, printed, tolerance, expected):
        assert verdict(printed, SINGLE, tolerance) == expected

    @pytest.mark.parametrize(
        ("printed", "tolerance", "expected"),
        [
            (79.5, 0.5, "close"),
            (79.4, 0.5, "within spread"),
            (78.0, 0.5, "within spread"),
            (82.0, 0.5, "within spread"),
            (77.9, 0.5, "above"),
            (82.1, 0.5, "below"),
            (77.9, 3.0, "close"),
            (76.9, 3.0, "above"),
        ],
    )
    def test_of_more_values_an_interval_that_reaches_farther_leaves_it_open(self, printed, tolerance, expected):
        assert verdict(printed, Summary(3, 80.0, 1.0, 78.0, 82.0), tolerance) == expected

    @given(PERCENT, SAMPLES, st.floats(0, 20), st.floats(0, 20))
    def test_more_tolerance_never_parts_what_agreed(self, printed, values, tolerance, more):
        ours = summarise(values)
        before, after = verdict(printed, ours, tolerance), verdict(printed, ours, tolerance + more)
        assert after in ("close", before)
        assert verdict(printed, ours, 101) == "close"

    @given(PERCENT, PERCENT, st.floats(0, 20))
    def test_disagreeing_seeds_never_count_as_close(self, printed, mean, tolerance):
        found = verdict(printed, Summary(3, mean, 100.0, mean - 250.0, mean + 250.0), tolerance)
        assert found == ("close" if abs(mean - printed) <= tolerance + 1e-9 else "within spread")

    @given(PERCENT, SAMPLES, st.floats(0, 20), st.floats(0, 50))
    def test_a_higher_printed_number_never_puts_us_higher(self, printed, values, tolerance, more):
        ours = summarise(values)
        order = {"below": -1, "within spread": 0, "close": 0, "above": 1}
        before, after = verdict(printed, ours, tolerance), verdict(printed + more, ours, tolerance)
        assert order[after] <= order[before]

    @given(PERCENT, SAMPLES, st.floats(0, 20))
    def test_it_says_on_which_side_our_mean_is(self, printed, values, tolerance):
        ours = summarise(values)
        found = verdict(printed, ours, tolerance)
        assert found in ("close", "within spread") or found == ("above" if ours.mean > printed else "below")

    def test_non_finite_numbers_are_refused(self):
        with pytest.raises(ValueError, match="finite"):
            verdict(math.nan, SINGLE, 0.5)
        for tolerance in (-0.1, math.nan):
            with pytest.raises(ValueError, match="tolerance"):
                verdict(80.0, SINGLE, tolerance)
