"""The paper's numbers: they are the ones it prints, and they fit our methods, streams and orders."""

import json
from pathlib import Path
from statistics import mean

import pytest

from published import SPELLING, cells, printed
from ratp.evaluation.matrix import METRICS
from ratp.methods import METHODS
from ratp.streams.benchmarks import DIGITS, DOMAINNET10, PACS

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
SPECS = {"Digits": DIGITS, "PACS": PACS, "DomainNet": DOMAINNET10}
STREAMS = {spec.name: spec for spec in SPECS.values()}

# Averages that are not the mean of what they are printed beside, by table, order, metric and method.
WRONG_AVERAGES = {
    (2, ("S", "C", "A", "P"), "FA", "pcl"): 74.63,
    (3, ("Qu", "Sk", "Cl", "In", "Pa", "Re"), "TDA", "ratp"): 56.87,
    (7, (), "TDG", "ratp"): 70.56,
    (9, (), "TDA", "shot++"): 78.74,
}


def key(cell):
    return cell.experiment, cell.stream, cell.order, cell.metric, cell.domain, cell.method


def parts(average):
    """The cells an average is taken over: domains in the main tables, orders in the others."""
    same = [c for c in cells() if (c.table, c.metric, c.method) == (average.table, average.metric, average.method)]
    if average.order:
        return [c for c in same if c.order == average.order and c.domain != "average"]
    return [c for c in same if c.order]


def flattened(tables):
    """All numbers of tables.json under our names."""
    for paper, spec in SPECS.items():
        for table in tables["main"][paper]:
            for metric in METRICS:
                for column, row in table[metric].items():
                    domain = "average" if column == "Avg" else column
                    for method, value in row.items():
                        yield ("main", spec.name, tuple(table["order"]), metric, domain, method), value
        for metric, columns in tables["orders"][paper].items():
            for column, row in columns.items():
                order = () if column == "Avg" else tuple(tables["domain_orders"][paper][column])
                for method, value in row.items():
                    yield ("orders", spec.name, order, metric, "average", method), value
    for method, row in tables["stationary"].items():
        for column, value in row.items():
            order = () if column == "Avg" else tuple(column.split(">"))
            yield ("stationary", "pacs", order, "TDA", order[-1] if order else "average", method), value


def test_they_are_those_of_the_paper():
    path = SHARED / "paper" / "tables.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    found = {(*place, SPELLING[method]): value for *place, method, value in ((*key(c), c.value) for c in cells())}
    assert found == dict(flattened(json.loads(path.read_text(encoding="utf-8"))))


def test_no_cell_is_there_twice():
    assert len({key(cell) for cell in cells()}) == len(cells()) == 1884


def test_every_method_is_one_of_ours_and_has_a_spelling():
    assert {cell.method for cell in cells()} == SPELLING.keys() <= METHODS.keys()
    assert len(set(SPELLING.values())) == len(SPELLING)


def test_every_domain_and_order_is_one_of_the_stream():
    for cell in cells():
        spec = STREAMS[cell.stream]
        assert set(cell.order) <= spec.domains.keys()
        assert cell.domain == "average" or cell.domain in cell.order
        assert cell.order_name is None or cell.order == spec.orders[cell.order_name]


@pytest.mark.parametrize("spec", STREAMS.values(), ids=STREAMS)
def test_the_named_orders_are_those_of_the_stream(spec):
    named = {c.order_name: c.order for c in cells() if c.stream == spec.name and c.order_name}
    assert named == spec.orders
    assert {c.order_name for c in cells() if c.stream == spec.name and c.experiment == "orders" and c.order} == {
        str(number) for number in range(1, 11)
    }


def test_a_main_table_has_the_domains_each_metric_is_defined_on():
    for cell in cells():
        if cell.experiment == "main" and cell.domain == "average":
            missing = {"TDG": cell.order[:1], "TDA": (), "FA": cell.order[-1:]}[cell.metric]
            assert {part.domain for part in parts(cell)} == set(cell.order) - set(missing)


def test_one_source_and_one_target_are_all_pairs_of_pacs():
    pairs = {c.order for c in cells() if c.experiment == "stationary" and c.order}
    assert pairs == {(a, b) for a in PACS.domains for b in PACS.domains if a != b}


def test_averages_are_means_but_for_known_mistakes_of_the_paper():
    averages = [c for c in cells() if c.domain == "average" and (c.experiment == "main" or not c.order)]
    wrong = {}
    for cell in averages:
        value = mean(part.value for part in parts(cell))
        if abs(value - cell.value) > 0.05 + 1e-9:
            wrong[cell.table, cell.order, cell.metric, cell.method] = round(value, 2)
    assert wrong == WRONG_AVERAGES


def test_main_and_ten_orders_print_the_same_but_for_one_known_mistake_of_the_paper():
    differing = []
    for cell in cells():
        main = printed(cell.stream, cell.order, cell.metric, "average", cell.method)
        if cell.experiment == "orders" and main is not None and main != cell.value:
            differing.append((cell.stream, cell.order_name, cell.metric, cell.method, main, cell.value))
    assert differing == [("domainnet10", "7", "TDA", "l2d", 42.7, 41.7)]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("digits", DIGITS.orders["default"], "TDG", "SN", "ratp"), 43.7),
        (("pacs", PACS.orders["reverse"], "FA", "average", "shot"), 85.9),
        (("pacs", PACS.orders["1"], "TDA", "average", "shot++", "orders"), 89.4),
        (("pacs", (), "TDA", "average", "ratp", "orders"), 83.8),
        (("pacs", (), "TDA", "average", "ratp", "stationary"), 85.0),
        (("pacs", ("S", "P"), "TDA", "P", "adacon", "stationary"), 61.3),
        (("digits", DIGITS.orders["default"], "TDG", "MT", "ratp"), None),
        (("pacs", PACS.orders["1"], "TDA", "average", "shot++"), None),
        (("demo", (), "TDA", "average", "ratp"), None),
    ],
)
def test_a_number_is_found_by_its_place(place, value):
    assert printed(*place) == value
