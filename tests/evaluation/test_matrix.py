import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratp.errors import RatpError
from ratp.evaluation.matrix import METRICS, Matrix, describe_late
from ratp_reference import matrix as reference

EXAMPLE = Matrix(("S", "A", "B"), ((99.0, 60.0, 40.0), (95.0, 90.0, 50.0), (92.0, 85.0, 80.0)))
PERCENT = st.floats(0, 100)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def matrices(draw, complete=False):
    domains = draw(st.integers(1, 6))
    stages = domains if complete else draw(st.integers(0, domains))
    rows = st.tuples(*[PERCENT] * domains)
    return Matrix(tuple(f"D{i}" for i in range(domains)), tuple(draw(rows) for _ in range(stages)))


class TestMetrics:
    def test_worked_example(self):
        assert EXAMPLE.metric("TDG") == {"A": 60, "B": 45}
        assert EXAMPLE.metric("TDA") == {"S": 99, "A": 90, "B": 80}
        assert EXAMPLE.metric("FA") == {"S": 93.5, "A": 85}
        assert EXAMPLE.averages() == pytest.approx({"TDG": 52.5, "TDA": 269 / 3, "FA": 89.25})

    def test_published_averages(self):
        """The averages the paper prints are plain means over domains, the source included in TDA."""
        names = ("MT", "MM", "SN", "SD", "US")
        own = (99.4, 90.2, 69.1, 81.8, 93.4)
        rows = tuple(tuple(own[d] if s == d else 50.0 for d in range(5)) for s in range(5))
        assert Matrix(names, rows).average("TDA") == pytest.approx(86.8, abs=0.05)

    @given(matrices())
    def test_metrics_agree_with_the_reference(self, matrix):
        expected = reference.metrics(matrix.accuracy, len(matrix.domains))
        for metric in METRICS:
            by_domain = {f"D{d}": value for d, value in expected[metric].items()}
            assert matrix.metric(metric) == pytest.approx(by_domain)
            average = sum(by_domain.values()) / len(by_domain) if by_domain else math.nan
            assert matrix.average(metric) == pytest.approx(average, nan_ok=True)

    @given(matrices(complete=True))
    def test_metrics_of_a_finished_run_are_defined_for_the_right_domains(self, matrix):
        assert matrix.complete
        assert tuple(matrix.metric("TDG")) == matrix.domains[1:]
        assert tuple(matrix.metric("TDA")) == matrix.domains
        assert tuple(matrix.metric("FA")) == matrix.domains[:-1]

    @given(matrices(complete=True))
    def test_the_last_domain_generalises_from_its_column_above_the_diagonal(self, matrix):
        column = [row[-1] for row in matrix.accuracy[:-1]]
        if column:
            assert matrix.metric("TDG")[matrix.domains[-1]] == pytest.approx(sum(column) / len(column))

    @given(matrices())
    def test_averages_lie_between_the_smallest_and_the_largest_accuracy(self, matrix):
        values = [value for row in matrix.accuracy for value in row]
        for average in matrix.averages().values():
            assert math.isnan(average) or min(values) - 1e-9 <= average <= max(values) + 1e-9

    @given(value=PERCENT, domains=st.integers(2, 6))
    def test_equal_accuracies_have_themselves_as_averages(self, value, domains):
        matrix = Matrix(tuple(f"D{i}" for i in range(domains)), ((value,) * domains,) * domains)
        assert matrix.averages() == pytest.approx(dict.fromkeys(METRICS, value))

    @given(matrices(complete=True), st.randoms())
    def test_names_follow_their_columns(self, matrix, random):
        names = list(matrix.domains)
        random.shuffle(names)
        renamed = Matrix(tuple(names), matrix.accuracy)
        translation = dict(zip(matrix.domains, names, strict=True))
        for metric in METRICS:
            assert renamed.metric(metric) == {translation[n]: v for n, v in matrix.metric(metric).items()}

    def test_an_unknown_metric_is_named(self):
        with pytest.raises(RatpError, match=r"'tdg'.*TDG, TDA, FA"):
            EXAMPLE.metric("tdg")


class TestPartial:
    def test_unstarted_run_has_no_metrics(self):
        matrix = Matrix(("S", "A"))
        assert not matrix.complete
        assert all(matrix.metric(metric) == {} for metric in METRICS)
        assert all(math.isnan(value) for value in matrix.averages().values())

    def test_after_the_source_only_generalisation_and_its_own_accuracy_are_known(self):
        matrix = Matrix(("S", "A", "B")).with_row([99, 60, 40])
        assert matrix.metric("TDG") == {"A": 60, "B": 40}
        assert matrix.metric("TDA") == {"S": 99}
        assert matrix.metric("FA") == {}

    def test_rows_are_added_to_a_new_matrix(self):
        grown = Matrix(EXAMPLE.domains)
        for stage, row in enumerate(EXAMPLE.accuracy):
            assert (grown.stages, grown.complete) == (stage, False)
            before, grown = grown, grown.with_row(list(row))
            assert before.stages == stage
        assert grown == EXAMPLE
        with pytest.raises(RatpError):
            grown.with_row([1, 2, 3])


@st.composite
def with_unlabelled(draw):
    """A matrix, and the same with the columns of some targets empty."""
    matrix = draw(matrices())
    hidden = draw(st.sets(st.integers(1, 6)))
    rows = tuple(tuple(math.nan if d in hidden else v for d, v in enumerate(row)) for row in matrix.accuracy)
    return matrix, Matrix(matrix.domains, rows), {f"D{d}" for d in hidden}


class TestUnlabelledDomains:
    """Their columns are empty, and nothing else is."""

    @given(with_unlabelled())
    def test_unlabelled_domains_do_not_affect_metrics(self, both):
        whole, matrix, hidden = both
        for metric in METRICS:
            expected = {name: value for name, value in whole.metric(metric).items() if name not in hidden}
            assert matrix.metric(metric) == expected
            mean = math.fsum(expected.values()) / len(expected) if expected else math.nan
            assert matrix.average(metric) == pytest.approx(mean, nan_ok=True)

    @given(with_unlabelled())
    def test_round_trip(self, both):
        _, matrix, _ = both
        text = json.dumps(matrix.to_json(), allow_nan=False)
        again = Matrix.from_json(json.loads(text))
        assert json.dumps(again.to_json(), allow_nan=False) == text
        assert repr(again) == repr(matrix)  # NaN is not equal to itself

    def test_worked_example(self):
        matrix = Matrix(("S", "A", "B")).with_row((99, math.nan, 40)).with_row((95, math.nan, 50))
        assert matrix.metric("TDG") == {"B": 45}
        assert matrix.metric("TDA") == {"S": 99}
        assert matrix.metric("FA") == {"S": 95}
        assert matrix.to_json()["accuracy"] == [[99, None, 40], [95, None, 50]]

    @pytest.mark.parametrize("row", [(95, 90, 50), (95, math.nan, math.nan)])
    def test_every_stage_has_no_unlabelled_metric(self, row):
        with pytest.raises(RatpError, match="accuracies on other domains"):
            Matrix(("S", "A", "B"), ((99, math.nan, 40),)).with_row(row)


class TestDomainsWhoseImagesAreGone:
    def test_metrics_are_over_what_was_measured(self):
        matrix = Matrix(("S", "A", "B"), ((99, 30, 40), (95, 60, 50), (math.nan, 70, 80)))
        assert matrix.metric("TDG") == {"A": 30, "B": 45}
        assert matrix.metric("TDA") == {"S": 99, "A": 60, "B": 80}
        assert matrix.metric("FA") == {"S": 95, "A": 70}
        assert matrix.gone == {"S": "A"} and not matrix.late
        assert describe_late(matrix) == "S is not measured after the stage of A"
        assert Matrix.from_json(matrix.to_json()).gone == matrix.gone

    def test_they_do_not_come_back(self):
        with pytest.raises(RatpError, match="accuracies on other domains"):
            Matrix(("S", "A", "B"), ((99, 30, 40), (math.nan, 60, 50), (90, 70, 80)))


class TestFiles:
    @given(matrices())
    def test_round_trip(self, matrix):
        assert Matrix.from_json(json.loads(json.dumps(matrix.to_json(), allow_nan=False))) == matrix

    def test_metrics_are_spelled_out(self):
        written = EXAMPLE.to_json()["metrics"]
        assert written["FA"] == {"domains": {"S": 93.5, "A": 85.0}, "average": 89.25}
        assert Matrix(("S", "A")).to_json()["metrics"]["FA"] == {"domains": {}, "average": None}

    def test_domain_can_be_named_average(self):
        """Image folders are named by their users."""
        matrix = Matrix(("S", "average"), ((90.0, 20.0), (80.0, 70.0)))
        assert matrix.metric("TDA") == {"S": 90, "average": 70}
        assert "70.0" in json.dumps(matrix.to_json()["metrics"]["TDA"])

    @pytest.mark.parametrize("part", ["metrics", "accuracy"])
    def test_inconsistent_metrics_are_damage(self, part):
        data = EXAMPLE.to_json()
        if part == "metrics":
            data["metrics"]["TDA"]["average"] += 1e-9
        else:
            data["accuracy"][0][0] += 1e-9
        with pytest.raises(RatpError, match="metrics of the matrix are not those of its accuracies"):
            Matrix.from_json(data)

    @given(domains=JSON, accuracy=JSON)
    @example(domains=["S"], accuracy=[[10**400]])
    @example(domains=["S"], accuracy=[[True]])
    @example(domains=["S"], accuracy=5)
    @example(domains=3, accuracy=[])
    def test_invalid_matrix_is_refused(self, domains, accuracy):
        try:
            matrix = Matrix.from_json({"domains": domains, "accuracy": accuracy})
        except RatpError:
            return
        assert all(math.isnan(value) or 0 <= value <= 100 for row in matrix.accuracy for value in row)

    @pytest.mark.parametrize("data", [{}, {"domains": ["S"]}, {"accuracy": []}, [], None, "matrix"])
    def test_incomplete_matrix_is_refused(self, data):
        with pytest.raises(RatpError, match="not an accuracy matrix"):
            Matrix.from_json(data)

    def test_string_is_not_a_list_of_domains(self):
        with pytest.raises(RatpError):
            Matrix.from_json({"domains": "SAB", "accuracy": []})


class TestRefusals:
    @pytest.mark.parametrize(
        ("accuracy", "message"),
        [
            (((1.0,),), "row 0 holds 1 values for 2 domains"),
            (((1.0, 2.0, 3.0),), "row 0 holds 3 values"),
            (((1.0, 2.0),) * 3, "3 rows for 2 domains"),
            (((1.0, 2.0), (1.0, -0.1)), "row 1 .*outside"),
            (((1.0, 100.1),), "row 0 .*outside"),
            (((1.0, math.nan), (1.0, 2.0)), "row 1 .*other domains"),
            (((1.0, 2.0), (1.0, math.nan)), "row 1 .*other domains"),
            (((1.0, math.inf),), "outside"),
        ],
    )
    def test_bad_accuracies(self, accuracy, message):
        with pytest.raises(RatpError, match=message):
            Matrix(("S", "A"), accuracy)

    def test_duplicate_domain_names(self):
        """Equal names would be indistinguishable, and the averages would lose one of them."""
        with pytest.raises(RatpError):
            Matrix(("S", "A", "A"))
