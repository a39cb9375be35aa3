"""REPRODUCIBILITY.md: what counts for a cell of the paper, what agrees, what depends on SYN."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers import load_tool
from published import Published, cells
from ratp.errors import RatpError
from ratp.evaluation.matrix import METRICS, Matrix, summarise
from ratp.runs.plan import resolve
from ratp.runs.record import RunRecord
from ratp.runs.request import RunRequest
from ratp.streams.benchmarks import DIGITS, PACS

ROOT = Path(__file__).resolve().parents[2]
tool = load_tool("reproducibility")

ORDER = PACS.orders["default"]
CELL = Published("main", 2, "pacs", ORDER, "default", "TDA", "A", "shot", 85.0)


def record(
    path="shot.json",
    stream="pacs",
    order=ORDER,
    method="shot",
    preset="official",
    changed=None,
    level=80.0,
    accuracy=None,
    **config,
):
    """A run whose accuracies are all the same, unless they are given."""
    changed = changed or {}
    request = RunRequest("pacs" if stream == "folders" else stream, method, ">".join(order), preset, subset=True)
    plan = resolve(replace(request, changes=changed, weights="none", device="cpu"))
    defaults = {
        **plan.decisions(),
        "ratp": "0.1.0",
        "stream": stream,
        "preset": preset,
        "changed": changed,
        "data": {code: f"{code:0>64}" for code in order},
        "weights": None if stream == "digits" else "f" * 64,
    }
    rows = accuracy or [[level] * len(order)] * len(order)
    environment = {"precision": "tf32", "device_name": "a device", "packages": {"torch": "2.11.0"}}
    return RunRecord(Path(path), defaults | config, environment, Matrix(tuple(order), tuple(map(tuple, rows))), ())


def write_results(folder, *runs):
    """A folder of results with the given runs in it."""
    for run in runs:
        place = folder / run.config["stream"]
        place.mkdir(parents=True, exist_ok=True)
        run.export(place / run.path)
    return folder


def row(page, *starts):
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {' | '.join(starts)} |")]
    return [text.strip() for text in line.strip("|").split("|")]


def found(cell, *runs):
    (item,) = [item for item in tool.compare(tool.collect(runs)) if item.cell == cell]
    return item


def main_cell(metric, domain, method="shot"):
    (cell,) = [
        c
        for c in cells()
        if (c.experiment, c.stream, c.order, c.metric, c.domain, c.method)
        == ("main", "pacs", ORDER, metric, domain, method)
    ]
    return cell


def test_the_page_is_up_to_date():
    page = (ROOT / tool.PAGE).read_text(encoding="utf-8")
    assert page == tool.page(ROOT / "results"), "run `make docs`"
    assert str(ROOT) not in page


class TestWhatCounts:
    def test_a_finished_official_run_without_changes_does(self):
        assert found(main_cell("TDA", "A"), record(level=80.0)).ours.mean == 80.0

    @pytest.mark.parametrize(
        "other",
        [
            {"changed": {"epochs": 3}},
            {"changed": {"sgd.momentum": 0.5}},
            {"method": "bmd"},
            {"method_file": "a" * 64},
            {"order": PACS.orders["reverse"]},
            {"stream": "folders"},
            {"accuracy": [[80.0] * 4] * 3},
            {"weights": None},
        ],
    )
    def test_no_other_run_does(self, other):
        item = found(main_cell("TDA", "A"), record(**other))
        assert (item.ours, item.verdict, str(item)) == (None, "not run", f"– ({item.cell.value:.1f})")

    def test_nor_does_one_of_another_preset(self):
        cell = main_cell("TDA", "A", "ratp")
        assert found(cell, record(method="ratp")).ours.n == 1
        assert found(cell, record(method="ratp", preset="paper")).ours is None

    def test_a_method_with_its_own_head_counts_beside_itself_on_the_same_network(self):
        cell = main_cell("TDA", "A")
        runs = [record("a.json", level=70.0), record("b.json", preset="own-head", level=90.0)]
        items = [item for item in tool.compare(tool.collect(runs)) if item.cell == cell]
        assert [(item.preset, item.ours.mean) for item in items] == [("official", 70.0), ("own-head", 90.0)]
        changed = record(preset="own-head", changed={"epochs": 3})
        assert [item.ours for item in tool.compare(tool.collect([changed])) if item.cell == cell] == [None]

    def test_values_decide_not_what_was_asked_for(self):
        momentum = record().config["switches"]["sgd.momentum"]
        assert found(main_cell("TDA", "A"), record(changed={"sgd.momentum": momentum})).ours.n == 1
        earlier = record(changed={"sgd.momentum": momentum + 0.5})
        earlier = replace(earlier, config={**earlier.config, "changed": {}})  # when that was what the preset had
        assert found(main_cell("TDA", "A"), earlier).ours is None

    def test_only_files_directly_in_a_streams_folder_are_read(self, tmp_path):
        for folder in ("pacs/earlier", "demo"):
            (tmp_path / folder).mkdir(parents=True)
            record().export(tmp_path / folder / "shot.json")
        assert row(tool.page(tmp_path), "same network", "all", "")[4] == "0"
        record().export(tmp_path / "pacs" / "shot.json")
        assert row(tool.page(tmp_path), "same network", "all", "")[4] == "13"

    def test_ratp_on_one_source_and_one_target_counts_as_the_paper_has_it(self):
        pair = ("P", "A")
        (cell,) = [c for c in cells() if (c.experiment, c.order, c.method) == ("stationary", pair, "ratp")]
        assert found(cell, record(order=pair, method="ratp")).ours is None
        assert found(cell, record(order=pair, method="ratp", changed=tool.STATIONARY)).ours.n == 1
        assert found(replace(cell, method="shot", value=87.2), record(order=pair)).ours.n == 1
        assert found(main_cell("TDA", "A", "ratp"), record(method="ratp", changed=tool.STATIONARY)).ours is None

    def test_what_ratp_leaves_out_there_are_switches_of_it(self):
        request = RunRequest(
            "pacs", order="P>A", subset=True, changes=tool.STATIONARY, weights="none", device="cpu", method="ratp"
        )
        assert resolve(request).changed == tool.STATIONARY

    def test_two_files_of_one_run_are_refused_by_name(self, tmp_path):
        write_results(tmp_path, record("one.json"), record("two.json", level=70.0))
        with pytest.raises(RatpError, match=r"(?s)two\.json.*one\.json"):
            tool.page(tmp_path)

    @pytest.mark.parametrize("other", [{"changed": {"epochs": 3}}, {"seed": 2023}, {"order": PACS.orders["1"]}])
    def test_files_of_other_runs_are_not(self, tmp_path, other):
        assert tool.page(write_results(tmp_path, record("one.json"), record("two.json", **other)))

    @pytest.mark.parametrize(
        ("other", "name"),
        [({"data": dict.fromkeys(ORDER, "0" * 64)}, "P"), ({"weights": "0" * 64}, "weights")],
    )
    def test_other_images_or_weights_in_one_stream_are_refused_by_name(self, other, name):
        with pytest.raises(RatpError, match=rf"two\.json and one\.json do not share {name}"):
            tool.collect([record("one.json"), record("two.json", seed=2023, **other)])


class TestNumbers:
    # Rows: after P, A, C and S.
    ACCURACY = ((99.0, 60.0, 40.0, 30.0), (98.0, 80.0, 44.0, 32.0), (97.0, 79.0, 70.0, 34.0), (96.0, 78.0, 69.0, 60.0))

    @pytest.mark.parametrize(
        ("metric", "domain", "value"),
        [("TDG", "S", 32.0), ("TDA", "C", 70.0), ("FA", "A", 78.5), ("FA", "P", 97.0), ("TDA", "average", 77.25)],
    )
    def test_a_cell_is_read_off_the_matrix(self, metric, domain, value):
        assert found(main_cell(metric, domain), record(accuracy=self.ACCURACY)).ours.mean == pytest.approx(value)

    def test_seeds_are_summarised(self):
        runs = [record(f"{seed}.json", seed=seed, level=level) for seed, level in ((1, 80.0), (2, 82.0), (3, 84.0))]
        assert found(main_cell("TDA", "A"), *runs).ours == summarise([80.0, 82.0, 84.0])

    def test_a_mean_over_orders_needs_a_seed_that_all_were_run_with(self):
        (cell,) = [c for c in cells() if (c.table, c.metric, c.method, c.order) == (7, "FA", "shot+", ())]
        runs = [
            record(f"{name}-{seed}.json", order=PACS.orders[str(name)], method="shot+", seed=seed, level=50.0 + name)
            for name in range(1, 11)
            for seed in ((1, 2) if name < 10 else (2, 3))
        ]
        assert found(cell, *runs).ours == summarise([55.5])
        assert found(cell, *runs[:-2]).ours is None


class TestCells:
    @pytest.mark.parametrize(
        ("values", "verdict", "text"),
        [
            ([85.0], "close", "85.0 (85.0) +0.0"),
            ([84.96], "close", "85.0 (85.0) +0.0"),
            ([87.0], "close", "87.0 (85.0) +2.0"),
            ([83.2], "close", "83.2 (85.0) −1.8"),
            ([87.5], "above", "87.5 (85.0) +2.5 ▲"),
            ([70.0], "below", "70.0 (85.0) −15.0 ▼"),
            ([81.9, 82.0, 82.1], "below", "82.0 ± 0.1 (85.0) −3.0 ▼"),
            ([79.0, 82.0, 85.0], "within spread", "82.0 ± 3.0 (85.0) −3.0 ~"),
        ],
    )
    def test_a_cell_says_how_ours_lies_to_the_paper_s(self, values, verdict, text):
        item = tool.Compared(CELL, summarise(values))
        assert (item.verdict, str(item)) == (verdict, text)

    def test_what_depends_on_syn_is_marked(self):
        cell = replace(CELL, stream="digits", order=DIGITS.orders["default"], domain="US")
        assert str(tool.Compared(cell, summarise([85.0]))) == "85.0 (85.0) +0.0 †"
        assert str(tool.Compared(replace(cell, domain="SN"), summarise([85.0]))) == "85.0 (85.0) +0.0"


class TestSYN:
    @pytest.mark.parametrize("name", DIGITS.orders)
    def test_a_number_depends_on_it_if_other_images_of_it_would_change_it(self, name):
        order = DIGITS.orders[name]
        syn = order.index("SD")
        before = Matrix(order, ((50.0,) * 5,) * 5)
        after = Matrix(order, tuple(tuple(60.0 if s >= syn or d == syn else 50.0 for d in range(5)) for s in range(5)))
        for metric in METRICS:
            changed = {n: value != before.metric(metric)[n] for n, value in after.metric(metric).items()}
            changed["average"] = after.average(metric) != before.average(metric)
            for domain, expected in changed.items():
                cell = Published("main", 1, "digits", order, name, metric, domain, "ratp", 0.0)
                assert tool.depends_on_syn(cell) == expected, (metric, domain)

    def test_a_mean_over_orders_of_digits_does_and_no_other_stream(self):
        assert all(tool.depends_on_syn(c) for c in cells() if c.stream == "digits" and not c.order)
        assert not any(tool.depends_on_syn(c) for c in cells() if c.stream != "digits")


class TestPage:
    def test_what_was_run_stands_beside_the_paper_and_the_rest_of_the_paper_alone(self, tmp_path):
        page = tool.page(write_results(tmp_path, record(accuracy=TestNumbers.ACCURACY)))
        section = page.split("### pacs, P>A>C>S")[1].split("###")[0]
        assert row(section, "SHOT", "same network", "1", "TDG")[4:6] == ["–", "60.0 (68.2) −8.2 ▼"]
        assert row(section, "SHOT", "same network", "1", "FA")[-2:] == ["–", "81.5 (80.1) +1.4"]
        assert row(section, "RaTP", "same network", "–", "TDA")[4:6] == ["– (99.5)", "– (87.5)"]
        assert "configs/paper/pacs.toml" in section

    def test_every_number_of_the_paper_is_there(self, tmp_path):
        text = tool.page(tmp_path)
        assert text.count("– (") == len(cells()) + 1  # and where it is explained

    def test_ten_orders_have_a_column_a_method(self, tmp_path):
        other = PACS.orders["2"]
        runs = [record("a.json", method="tent"), record("b.json", method="ratp", order=other)]
        section = tool.page(write_results(tmp_path, *runs)).split("### pacs (table 7)")[1].split("###")[0]
        assert "| order | metric | n | SHOT+ | SHOT++ | Tent | AdaCon | EATA | L2D | PDEN | RaTP |" in section
        ran = row(section, "6 P>A>C>S", "TDG")
        assert (ran[2], ran[5], ran[-1]) == ("– / – / 1 / – / – / – / – / –", "80.0 (56.2) +23.8 ▲", "– (62.6)")
        assert row(section, "2 A>C>S>P", "FA")[-1] == "80.0 (77.9) +2.1 ▲"
        assert row(section, "1 A>C>P>S", "FA")[2] == "–"

    def test_the_summary_counts_cells(self, tmp_path):
        page = tool.page(write_results(tmp_path, record(accuracy=TestNumbers.ACCURACY)))
        printed, ours, *verdicts = map(int, row(page, "same network", "Main orders", "pacs")[3:])
        assert (printed, ours) == (338, 13)
        assert sum(verdicts) == ours
        assert row(page, "same network", "all", "")[3:5] == ["1884", "13"]
        assert row(page, "same network", "all of RaTP", "")[4] == "0"

    def test_each_protocol_has_rows_and_a_summary_of_its_own(self, tmp_path):
        runs = [record("a.json", level=70.0), record("b.json", preset="own-head", level=90.0)]
        page = tool.page(write_results(tmp_path, *runs))
        section = page.split("### pacs, P>A>C>S")[1].split("###")[0]
        for name, level in (("same network", "70.0"), ("own head", "90.0")):
            assert row(section, "SHOT", name, "1", "TDA")[5].startswith(level)
            assert row(page, name, "Main orders", "pacs")[4] == "13"
        assert "| momentum | Main orders |" not in page

    def test_numbers_that_the_paper_does_not_explain_are_marked(self, tmp_path):
        page = tool.page(tmp_path)
        section = page.split("### pacs, P>A>C>S")[1].split("###")[0]
        assert row(section, "SNR ‡", "same network", "–", "TDA")
        assert "1.8 points from PDEN's, 2.2 points from L2D's and 16.6 points from SHOT's" in page

    def test_every_file_is_named_with_what_it_was_made_with(self, tmp_path):
        runs = [record("a.json"), record("b.json", seed=2023), record("c.json", method="adabn")]
        page = tool.page(write_results(tmp_path, *runs)).split("## Where our numbers come from")[1]
        made_with = ["official", "tf32", "a device", "2.11.0", "0.1.0"]
        assert row(page, "SHOT", "pacs")[2:] == [*made_with, "P>A>C>S: 2022 `a.json`, 2023 `b.json`"]
        newer = replace(runs[0], environment={**runs[0].environment, "code": "abc"})
        page_of_newer = tool.page(write_results(tmp_path / "newer", newer)).split("## Where our numbers come from")[1]
        assert row(page_of_newer, "SHOT", "pacs")[6] == "0.1.0 `abc`"
        assert f"P `{'0' * 12}`" in page
        assert f"weights `{'f' * 12}`" in page
        assert page.rstrip().endswith("Files used for no cell: `pacs/c.json`.")

    def test_a_folder_without_results_has_nothing_run(self, tmp_path):
        page = tool.page(tmp_path)
        assert row(page, "same network", "all", "")[3:] == ["1884", *["0"] * 5]
        assert "Files used for no cell: none." in page
