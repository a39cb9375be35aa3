"""The report of a study: its tables, figures and page, and what it says of runs that are missing."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from helpers import ratp
from ratp.errors import RatpError
from ratp.evaluation.matrix import Matrix
from ratp.reports.study import print_study, write_study
from ratp.reports.study_parts import several_orders, sweeps, variants
from ratp.reports.study_plots import sweep_curves, variant_bars
from ratp.runs.record import RunRecord
from ratp.studies.file import read_study
from ratp.studies.record import AskedRun, Row, StudyRecord, distinct_labels

AB, BA = ("a", "b", "c"), ("c", "b", "a")
MARKS = {"strong": "**", "u": "_", "sup": "^"}


def record(averages, order=AB, seed=1, stream="demo", oracle=False):
    """A run with the given TDG, TDA and FA on every domain that has them."""
    tdg, tda, fa = averages
    rows = [[tda if s == d else tdg if s < d else fa for d in range(len(order))] for s in range(len(order))]
    config = {
        "stream": stream,
        "order": list(order),
        "method": "ratp",
        "preset": "official",
        "seed": seed,
        "changed": {},
        "uses_target_labels": oracle,
    }
    return RunRecord(Path("nowhere"), config, {}, Matrix(tuple(order), tuple(map(tuple, rows))), ())


def make_entry(label, averages, order=AB, seed=1, *, rows=None, state="waiting", reason="", settings="", **values):
    """A run of a study; without averages, one that is missing."""
    found = record(averages, order, seed, **values) if averages else None
    rows = rows or (Row(0, label),)
    finished = "finished" if found else state
    return AskedRun(rows, values.get("stream", "demo"), order, seed, finished, reason, found, settings)


def make_sweep(values, name="r_con", **options):
    """A run a value; ``values`` holds their averages."""
    return [make_entry("", v, rows=(Row(0, f"ratp, {name} {k}", (name, k)),), **options) for k, v in values.items()]


def study(*runs, title="A study", **values):
    return StudyRecord(title, tuple(runs), **values)


TWO_ORDERS = (
    make_entry("ratp", (50, 80, 70), AB, 1),
    make_entry("ratp", (54, 84, 74), AB, 2),
    make_entry("ratp", (60, 90, 80), BA, 1),
    make_entry("ratp", None, BA, 2, state="interrupted"),
    make_entry("shot", (48, 85, 60), AB, 1),
    make_entry("shot", (50, 85, 62), AB, 2),
    make_entry("shot", (54, 81, 66), BA, 1),
    make_entry("shot", None, BA, 2, state="failed", reason="Traceback\nout of memory"),
    make_entry("tent", (40, 70, 50), AB, 1),
    make_entry("tent", None, AB, 2),
    make_entry("tent", None, BA, 1),
    make_entry("tent", None, BA, 2),
    make_entry("base", (30, 60, 40), AB, 1),
    make_entry("base", (31, 61, 41), BA, 1),
    make_entry("bound", (99, 99, 99), AB, 1, oracle=True),
    make_entry("bound", (98, 98, 98), BA, 1, oracle=True),
)


class Page(HTMLParser):
    """Collects the cells of all tables as text in which marks are spelled out, and the attributes of all tags."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.rows, self.cell, self.words = [], [], None, ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.cell = ""
        self.handle_data(MARKS.get(tag, ""))

    def handle_endtag(self, tag):
        self.handle_data(MARKS.get(tag, ""))
        if tag in ("td", "th"):
            self.rows[-1].append(" ".join(self.cell.split()))
            self.cell = None

    def handle_data(self, data):
        self.words += data
        if self.cell is not None:
            self.cell += data

    def of(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The report of two orders, of a variant and of a sweep."""
    runs = [
        *TWO_ORDERS,
        make_entry("", (45, 75, 65), AB, 1, rows=(Row(1, "plain"),)),
        make_entry("", (44, 74, 64), AB, 1, rows=(Row(1, "without x", is_variant=True),)),
        *(make_entry("", (40 + v, 70, 60), AB, 1, rows=(Row(2, f"ratp, k {v}", ("k", v)),)) for v in (1, 2)),
    ]
    return write_study(study(*runs), tmp_path_factory.mktemp("study") / "report").parent


@pytest.fixture(scope="module")
def page(folder):
    return Page((folder / "index.html").read_text())


@pytest.fixture(scope="module")
def markdown(folder):
    return (folder / "report.md").read_text()


@pytest.fixture(scope="module")
def latex(folder):
    return (folder / "report.tex").read_text()


def lines_of(text, title):
    """Name and cells of every row of the Markdown table under a title."""
    table = text.split(f"### {title}")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split(" |")] for line in table.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def print_report(found, width=80):
    file = io.StringIO()
    print_study(found, Console(file=file, width=width))
    return file.getvalue()


class TestIntervals:
    def test_intervals_stay_within_accuracies(self, tmp_path):
        runs = [make_entry("ratp", (30, 60, 99), seed=1), make_entry("ratp", (50, 99, 60), seed=2)]
        markdown = (write_study(study(*runs), tmp_path).parent / "report.md").read_text()
        (cells,) = lines_of(markdown, "demo: a > b > c, averages").values()
        assert [cell.split("[")[1] for cell in cells[1:]] == ["0.0, 100.0]"] * 3

    def test_intervals_are_students_t(self, tmp_path):
        runs = [make_entry("ratp", (tdg, 80, 70), seed=tdg) for tdg in (50, 52, 54)]
        text = (write_study(study(*runs), tmp_path).parent / "report.md").read_text()
        half = 4.302653 * 2 / 3**0.5  # the quantile of two degrees of freedom
        rows = lines_of(text, "demo: a > b > c, averages over domains")
        assert rows["ratp"] == [
            "3",
            f"52.0 [{52 - half:.1f}, {52 + half:.1f}]",
            "80.0 [80.0, 80.0]",
            "70.0 [70.0, 70.0]",
        ]

    def test_single_seed_has_no_interval_and_is_marked(self, markdown, latex, page):
        row = lines_of(markdown, "demo: a > b > c, averages over domains")["tent"]
        assert row == ["1", "40.0¹", "70.0¹", "50.0¹"]
        assert "¹ from a single seed." in markdown
        assert r"tent & $1$ & $40.0^{1}$ & $70.0^{1}$ & $50.0^{1}$ \\" in latex
        assert "$^{1}$ from a single seed." in latex
        assert ["tent", "1", "40.0^1^", "70.0^1^", "50.0^1^"] in page.rows
        assert "^1^ from a single seed." in page.words

    def test_the_best_and_second_best_are_marked_and_never_an_oracle(self, markdown, latex, page):
        rows = lines_of(markdown, "demo: a > b > c, averages over domains")
        assert [rows[name][2].split(" [")[0] for name in ("ratp", "shot", "tent")] == ["*82.0*", "**85.0**", "70.0¹"]
        assert rows["bound (knows target labels)"][1:] == ["99.0¹", "99.0¹", "99.0¹"]
        assert r"shot & $2$ & $\underline{49.0}\ [" in latex
        assert r"ratp & $2$ & $\mathbf{52.0}\ [" in latex
        shown = next(row for row in page.rows if row[0] == "shot" and "[" in row[2])
        assert shown[2].startswith("_49.0_ [") and shown[3].startswith("**85.0** [")


class TestOrders:
    def test_every_order_then_mean_and_mean_rank(self, markdown):
        rows = lines_of(markdown, "TDG on demo in 2 orders")
        assert rows["ratp"] == ["**52.0** ± 2.8", "**60.0**¹", "**56.0** ± 5.7", "**1.0**"]
        assert rows["shot"] == ["*49.0* ± 1.4", "*54.0*¹", "*51.5* ± 3.5", "*2.0*"]
        assert rows["base"] == ["30.0¹", "31.0¹", "30.5 ± 0.7", "3.0"]
        assert rows["bound (knows target labels)"] == ["99.0¹", "98.0¹", "98.5 ± 0.7", "–"]
        assert lines_of(markdown, "TDA on demo in 2 orders")["ratp"][3] == "**1.5**"
        assert "Orders: 1: a > b > c; 2: c > b > a." in markdown

    def test_a_missing_order_has_no_number_no_mean_and_no_rank(self, markdown):
        assert lines_of(markdown, "TDG on demo in 2 orders")["tent"] == ["40.0¹", "–", "–", "–"]

    def test_the_first_label_is_compared_order_by_order(self, markdown):
        """Differences 2 and 4 in one order make 3, which counts once beside 6 in the other."""
        rows = lines_of(markdown, "TDG on demo: ratp minus the others")
        half = 12.706205 * 1.5
        p = 1 - 2 / math.pi * math.atan(3)  # of one degree of freedom
        assert rows["shot"] == ["2", f"+4.5 [{4.5 - half:+.1f}, {4.5 + half:+.1f}]", "2", "0", f"{p:.3f}"]
        assert rows["tent"] == ["1", "+10.0", "1", "0", "–"]
        assert lines_of(markdown, "TDA on demo: ratp minus the others")["shot"][2:4] == ["1", "1"]

    def test_one_order_has_no_such_tables(self, tmp_path):
        found = study(make_entry("ratp", (50, 80, 70)), make_entry("shot", (40, 80, 70)))
        assert several_orders(found) == []
        assert "minus the others" not in (write_study(found, tmp_path).parent / "report.md").read_text()

    def test_a_label_that_is_asked_for_in_one_order_stays_out(self):
        (orders,) = several_orders(study(*TWO_ORDERS, make_entry("once", (1, 2, 3))))
        assert "once" not in orders.lines

    def test_streams_are_never_mixed(self):
        runs = [make_entry("ratp", (50, 80, 70), order) for order in (AB, BA)]
        runs += [make_entry("ratp", (10, 20, 30), order, stream="other") for order in (AB, BA)]
        first, second = several_orders(study(*runs))
        assert (first.stream, first.mean("ratp", "TDG").mean) == ("demo", 50)
        assert (second.stream, second.mean("ratp", "TDG").mean) == ("other", 10)

    def test_a_setting_of_several_names_is_no_rival_of_itself(self):
        """Its default is among the swept values, a variant changes nothing, and either asks for another seed."""
        names = Row(0, "ratp, r_con 0.8", ("r_con", 0.8)), Row(1, "ratp"), Row(2, "full", is_variant=True)
        runs = [
            make_entry("", (60, 90, 80), order, seed, rows=names[:1] if seed == 3 else names, settings="r_con=0.8")
            for order in (AB, BA)
            for seed in (1, 2, 3)
        ]
        runs += [make_entry("shot", (50, 80, 70), order, settings="shot") for order in (AB, BA)]
        (orders,) = several_orders(study(*runs))
        assert {label: rank.mean for label, rank in orders.ranks("TDG").items()} == {"ratp": 1, "shot": 2}
        assert [run.seed for run in orders.lines["ratp"][AB].runs] == [1, 2, 3]

    def test_label_without_rival_has_no_rank(self):
        (orders,) = several_orders(study(*TWO_ORDERS[:4], *TWO_ORDERS[-2:]))
        assert orders.ranks("TDG") == {}

    def test_nothing_takes_the_place_of_a_first_label_without_results(self):
        runs = [make_entry("first", None, AB), make_entry("first", None, BA), *TWO_ORDERS[:8]]
        (orders,) = several_orders(study(*runs))
        assert orders.first == "first"
        assert list(orders.lines) == ["ratp", "shot"]


class TestMissing:
    def test_missing_runs_are_named_with_count_and_reason(self, markdown, page):
        rows = markdown.split("### Runs that are not finished")[1].split("\n\n")[1].splitlines()[2:]
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        assert cells == [
            ["ratp", "demo", "1 of 4", "1 order × 1 seed (c>b>a; seed 2)", "interrupted"],
            ["shot", "demo", "1 of 4", "1 order × 1 seed (c>b>a; seed 2)", "failed: out of memory"],
            [
                "tent",
                "demo",
                "3 of 4",
                "1 order × 1 seed (a>b>c; seed 2); 1 order × 2 seeds (c>b>a; seeds 1, 2)",
                "waiting",
            ],
        ]
        assert all(row in page.rows for row in cells)
        assert "15 of 20 runs are finished. 5 are missing and left out everywhere." in markdown

    def test_a_label_without_any_result_has_no_row_elsewhere(self, tmp_path):
        found = study(
            make_entry("ratp", (50, 80, 70)),
            make_entry("ratp", (50, 80, 70), BA),
            *(make_entry("new", None, o) for o in (AB, BA)),
        )
        text = (write_study(found, tmp_path).parent / "report.md").read_text()
        assert [line for line in text.splitlines() if "new" in line] == [
            next(line for line in text.splitlines() if "all, 2 orders × 1 seed" in line)
        ]

    def test_every_missing_run_is_a_line_of_a_file(self, folder):
        rows = list(csv.DictReader(io.StringIO((folder / "missing.csv").read_text())))
        assert [(r["label"], r["order"], r["seed"], r["state"]) for r in rows][:2] == [
            ("ratp", "c>b>a", "2", "interrupted"),
            ("shot", "c>b>a", "2", "failed"),
        ]
        assert len(rows) == 5

    def test_finished_study_mentions_no_missing_runs(self, tmp_path):
        text = (write_study(study(make_entry("ratp", (50, 80, 70))), tmp_path).parent / "report.md").read_text()
        assert "1 of 1 runs are finished." in text
        assert "missing" not in text.lower()

    def test_a_study_without_results_is_refused(self, tmp_path):
        for found in (study(), study(make_entry("ratp", None))):
            with pytest.raises(RatpError, match="no runs"):
                write_study(found, tmp_path / "report")
            with pytest.raises(RatpError, match="no runs"):
                print_report(found)
        assert not (tmp_path / "report").exists()


class TestVariants:
    def test_one_bar_per_label_and_metric(self):
        rows = (Row(0, "ratp"),)
        runs = [make_entry("ratp", (50 + s, 80, 70), seed=s, rows=rows) for s in (0, 2)]
        runs.append(make_entry("", (40, 60, 50), rows=(Row(0, "without $x$", is_variant=True),)))
        (ax,) = variant_bars(variants(study(*runs))[0]).axes
        assert [patch.get_width() for patch in ax.patches] == [51, 80, 70, 40, 60, 50]
        assert [label.get_text() for label in ax.get_yticklabels()] == ["ratp", r"without \$x\$"]
        assert {text.get_text() for text in ax.texts} == {"51.0", "80.0", "70.0", "40.0", "60.0", "50.0"}
        assert len(ax.containers) - len(ax.patches) == 3, "error bars where there are several seeds"

    def test_oracle_is_labelled(self):
        named_rows = [
            Row(0, name, is_variant=True) for name in ("true labels", "the true labels of all targets at once")
        ]
        runs = [make_entry("", (60, 90, 80), rows=(row,), oracle=True) for row in named_rows]
        (ax,) = variant_bars(variants(study(make_entry("ratp", (50, 80, 70)), *runs))[0]).axes
        names = [" ".join(label.get_text().split()) for label in ax.get_yticklabels()]
        assert names == [
            "ratp",
            "true labels (knows target labels)",
            "the true labels of all targets at once (knows target labels)",
        ]

    def test_panel_per_order_says_what_is_missing(self):
        runs = [make_entry("ratp", (50, 80, 70), order) for order in (AB, BA)]
        runs += [make_entry("x", v, o, rows=(Row(0, "x", is_variant=True),)) for v, o in (((1, 2, 3), AB), (None, BA))]
        first, second = variant_bars(variants(study(*runs))[0]).axes
        assert "missing" not in [text.get_text() for text in first.texts]
        assert "missing" in [text.get_text() for text in second.texts]
        assert len(second.patches) == 3

    @pytest.mark.parametrize(
        ("titles", "expected"),
        [({0: "<b>RandMix</b>"}, "<b>RandMix</b>, demo"), ({}, "Methods and variants of grid 1, demo")],
    )
    def test_chart_is_named_after_its_grid(self, tmp_path, titles, expected):
        runs = [make_entry("ratp", (50, 80, 70)), make_entry("", (40, 60, 50), rows=(Row(0, "x", is_variant=True),))]
        page = Page((write_study(study(*runs, titles=titles), tmp_path).parent / "index.html").read_text())
        assert expected in page.words

    def test_a_grid_without_variants_has_no_chart(self):
        assert variants(study(*TWO_ORDERS)) == []


class TestSweeps:
    @pytest.mark.parametrize(("titles", "about"), [({0: "How sure", 1: "Another"}, "How sure, "), ({}, "")])
    def test_figure_and_table_are_named_after_their_grid(self, tmp_path, titles, about):
        runs = make_sweep({0.9: (52, 83, 73), 0.5: (50, 81, 71)})
        page = (write_study(study(*runs, titles=titles), tmp_path).parent / "index.html").read_text()
        assert f"<h3>{about}r_con, demo</h3>" in page
        assert f"<h3>{about}r_con on demo: " in page

    def test_the_curves_run_over_the_values_and_the_default_is_marked(self):
        runs = make_sweep({0.9: (52, 83, 73), 0.5: (50, 81, 71), 0.7: None})
        (found,) = sweeps(study(*runs, usual={(0, "r_con"): 0.5}))
        (ax,) = sweep_curves(found).axes
        *curves, default = ax.lines
        assert [list(line.get_xdata()) for line in curves] == [[0.5, 0.7, 0.9]] * 3
        assert [line.get_ydata()[0] for line in curves] == [50, 81, 71]
        assert [line.get_ydata()[2] for line in curves] == [52, 83, 73]
        assert all(y != y for y in (line.get_ydata()[1] for line in curves)), "a missing value is a gap"
        assert default.get_xdata()[0] == 0.5
        assert ax.get_xlabel() == "r_con"

    def test_the_default_among_the_values_is_one_row_of_the_averages(self, tmp_path):
        rows = Row(0, "ratp"), Row(0, "ratp, r_con 0.5", ("r_con", 0.5))
        runs = [make_entry("", (50, 81, 71), rows=rows), *make_sweep({0.9: (52, 83, 73)})]
        markdown = (write_study(study(*runs), tmp_path).parent / "report.md").read_text()
        assert list(lines_of(markdown, "demo: a > b > c, averages")) == ["ratp", "ratp, r_con 0.9"]
        assert list(lines_of(markdown, "r_con on demo: a > b > c")) == ["0.5", "0.9"]

    def test_a_default_that_is_not_among_the_values_is_not_marked(self):
        (found,) = sweeps(study(*make_sweep({0.9: (52, 83, 73), 0.5: (50, 81, 71)}), usual={(0, "r_con"): 0.6}))
        assert len(sweep_curves(found).axes[0].lines) == 3

    @pytest.mark.parametrize("values", [("a", "b"), (True, False), (0.0, 0.001, 1.0)])
    def test_words_and_crowded_numbers_stand_at_even_distances(self, values):
        (found,) = sweeps(study(*make_sweep(dict.fromkeys(values, (50, 81, 71)))))
        (ax,) = sweep_curves(found).axes
        assert list(ax.get_xticks()) == list(range(len(values)))

    def test_table_has_a_row_per_value_and_names_the_default(self, tmp_path):
        runs = make_sweep({0.9: (52, 83, 73), 0.5: (50, 81, 71), 0.7: (51, 83, 75)})
        page = write_study(study(*runs, usual={(0, "r_con"): 0.5}), tmp_path)
        rows = lines_of((page.parent / "report.md").read_text(), "r_con on demo: a > b > c")
        assert rows == {
            "0.5 (usual)": ["1", "50.0¹", "81.0¹", "71.0¹"],
            "0.7": ["1", "*51.0*¹", "**83.0**¹", "**75.0**¹"],
            "0.9": ["1", "**52.0**¹", "**83.0**¹", "*73.0*¹"],
        }

    def test_values_that_know_target_labels_are_marked(self, tmp_path):
        runs = [
            *make_sweep({"t2pl": (50, 81, 71)}, "labels"),
            *make_sweep({"true": (60, 91, 81)}, "labels", oracle=True),
        ]
        found = study(*runs, usual={(0, "labels"): "true"})
        (ax,) = sweep_curves(sweeps(found)[0]).axes
        ticks = [" ".join(label.get_text().split()) for label in ax.get_xticklabels()]
        assert ticks == ["t2pl", "true (knows target labels)"]
        rows = lines_of((write_study(found, tmp_path).parent / "report.md").read_text(), "labels on demo: a > b > c")
        assert list(rows) == ["t2pl", "true (usual, knows target labels)"]

    def test_missing_value_is_named(self):
        (ax,) = sweep_curves(sweeps(study(*make_sweep({0.9: (52, 83, 73), 0.5: None})))[0]).axes
        assert [label.get_text() for label in ax.get_xticklabels()] == ["0.5", "0.9"]


class TestFiles:
    def test_all_files_exist_and_are_readable(self, folder):
        names = {path.name for path in folder.iterdir()}
        texts = {"index.html", "report.md", "report.tex", "metrics.csv", "tables.csv", "missing.csv"}
        figures = ("matrix", "curves", "matrix-2", "curves-2", "variants-2", "sweep-3-k")
        assert names == texts | {f"{name}.{kind}" for name in figures for kind in ("png", "svg")}
        for path in folder.glob("*.png"):
            with Image.open(path) as image:
                image.verify()
        for path in folder.glob("*.svg"):
            assert ET.fromstring(path.read_bytes()).tag.endswith("svg")

    def test_the_page_is_one_file_that_loads_nothing(self, folder, page):
        assert not re.search(r"https?://|url\(|@import", (folder / "index.html").read_text())
        assert len(page.of("img")) == 6
        assert all(image["src"].startswith("data:image/") and image["alt"] for image in page.of("img"))

    def test_the_averages_of_an_order_have_one_table(self, markdown, page):
        """With intervals, before the sections, whose tables of single domains end with the deviations."""
        assert "Which does best overall, and how sure is that?" in page.words
        assert "Which method does best overall?" not in page.words
        assert "| Method" not in markdown
        assert "Mean ± sample standard deviation over seeds. Without ±: from a single seed." in page.words
        assert "- Mean ± sample standard deviation over seeds. Without ±: from a single seed." in markdown
        assert "Uses target labels" in markdown

    def test_files_hold_the_unfamiliar_period_if_measured(self, tmp_path):
        probe = {"event": "probe", "stage": 1, "domain": "b"}
        probes = tuple({**probe, "progress": at, "accuracy": {"b": 50 + at}} for at in (0, 1))
        run = make_entry("ratp", (50, 80, 70))
        probed = replace(run, record=replace(run.record, journal=probes))
        folder = write_study(study(probed, make_entry("shot", (40, 70, 60))), tmp_path).parent
        rows = lines_of((folder / "report.md").read_text(), "demo: a > b > c, averages over domains")
        assert (rows["ratp"][-1], rows["shot"][-1]) == ("50.5¹", "–")

    def test_the_sections_of_a_plain_report_follow(self, markdown, page):
        assert markdown.count("### Accuracy matrix (%): ratp, 2 seeds") == 1
        assert "## demo: c > b > a" in markdown
        assert "How was it run?" in page.words

    def test_csv_holds_the_numbers_unrounded(self, folder):
        rows = list(csv.DictReader(io.StringIO((folder / "tables.csv").read_text())))
        found = {(r["table"], r["order"], r["row"], r["column"]): r for r in rows}
        mean = found["TDG by order", "", "ratp", "mean"]
        assert (float(mean["value"]), int(mean["n"])) == (56.0, 2)
        assert float(mean["deviation"]) == pytest.approx(32**0.5)
        assert found["TDG by order", "", "tent", "c>b>a"]["value"] == ""
        assert float(found["averages", "a>b>c", "shot", "TDG"]["value"]) == 49.0
        assert float(found["TDG paired", "", "shot", "Difference"]["value"]) == 4.5

    def test_names_are_text_and_never_markup(self, tmp_path):
        label, title = "[<b>x_1</b>] *50% & {y}|$z$", "<script>alert(1)</script> *A* \\cmd #1"
        runs = [make_entry(label, (50 + i, 80, 70), order) for i, order in enumerate((AB, BA))]
        runs += [make_entry("other", (40, 60, 50), order) for order in (AB, BA)]
        runs.append(make_entry("", (40, 70, 60), rows=(Row(0, f"{label} variant", is_variant=True),)))
        runs.append(make_entry(label, None, AB, 2, state="failed", reason="<i>no|way</i>"))
        folder = write_study(study(*runs, title=title), tmp_path).parent
        page = Page((folder / "index.html").read_text())
        assert not page.of("script") and not page.of("b") and not page.of("i")
        assert title in page.words
        assert label in {row[0] for row in page.rows}
        text = (folder / "report.md").read_text()
        assert "<script" not in text and "<b>" not in text and "<i>" not in text
        assert text.startswith(r"# &lt;script>alert(1)&lt;/script> \*A\* \\cmd \#1")
        assert r"\[&lt;b>x_1&lt;/b>\] \*50% &amp; {y}\|\$z\$" in text
        latex = (folder / "report.tex").read_text()
        escaped = r"{[}\textless{}b\textgreater{}x\_1\textless{}/b\textgreater{}] {*}50\% \& \{y\}\textbar{}\$z\$"
        assert f"    {escaped} & " in latex
        assert r"{*}A{*} \textbackslash{}cmd \#1" in latex


class TestTerminal:
    @pytest.mark.parametrize("width", [60, 80, 120])
    def test_no_line_is_wider_than_the_terminal(self, width):
        assert max(map(len, print_report(study(*TWO_ORDERS), width).splitlines())) <= width

    def test_domains_without_labels_are_named_in_every_report(self, tmp_path):
        known = replace(record((0, 0, 0), ("a", "b")), matrix=Matrix(("a", "b"), ((80, math.nan), (70, math.nan))))
        found = study(*(replace(make_entry(label, (0, 0, 0), ("a", "b")), record=known) for label in ("ratp", "shot")))
        note = "No labels, so no accuracy: b. Averages are over the others."
        page = write_study(found, tmp_path)
        assert note in print_report(found)
        assert all(note in (tmp_path / name).read_text() for name in ("report.md", "report.tex", page.name))

    def test_terminal_prints_each_order_then_means_over_orders(self):
        text = print_report(study(*TWO_ORDERS))
        assert text.count("Comparison, averages over domains (%)") == 2
        assert "after a" not in text
        first, over = text.split("demo: 2 orders")
        assert "52.0 ± 2.8*" in next(line for line in first.splitlines() if line.startswith("ratp"))
        line = next(line for line in over.splitlines() if line.startswith("ratp")).split()
        assert line == ["ratp", "56.0*", "1.0", "86.0*", "1.5", "76.0*", "1.0"]
        line = next(line for line in over.splitlines() if line.startswith("tent")).split()
        assert line == ["tent", *["–"] * 6]
        assert "±" not in over
        assert "Means only: no room for deviations over orders." in over
        assert "Mean ± sample standard deviation over orders." in print_report(study(*TWO_ORDERS), 120)
        assert "11 of 16 runs are finished." in text
        assert "shot, demo: 1 order × 1 seed (c>b>a; seed 2); failed: out of memory" in " ".join(text.split())


def labels_of(*runs):
    """Names that distinguish all of them."""
    return [
        [row.label for row in rows] for rows in distinct_labels([(run.rows, run.stream, run.settings) for run in runs])
    ]


def test_a_label_that_grids_use_for_different_runs_names_the_grid():
    """Even if they share no order and seed: a mean over different things is a mean of nothing."""
    for place in ({}, {"seed": 2}, {"order": BA}):
        other = make_entry("", (40, 70, 60), rows=(Row(1, "ratp"), Row(1, "x")), settings="another rate", **place)
        assert labels_of(make_entry("ratp", (50, 80, 70)), other) == [["ratp, grid 1"], ["ratp, grid 2", "x"]]
    elsewhere = make_entry("ratp", (50, 80, 70), stream="other", settings="its values")
    assert labels_of(make_entry("ratp", (50, 80, 70)), elsewhere) == [["ratp"], ["ratp"]]
    same = make_entry("ratp", (50, 80, 70), seed=2), make_entry("ratp", (50, 80, 70), BA)
    assert labels_of(make_entry("ratp", (50, 80, 70)), *same) == [["ratp"]] * 3


@pytest.fixture
def file(tmp_path):
    """A study on the demo stream with a variant and a sweep."""
    path = tmp_path / "some.toml"
    path.write_text(
        'title = "Some runs"\n[[grid]]\nstream = "demo"\nmethods = ["ratp"]\nsweep = { r_con = [0.6, 0.9] }\n'
        '[[grid.variant]]\nname = "without RandMix"\nmethod = "ratp"\nset = { augment = false }\n'
    )
    return path


def test_a_study_knows_its_variants_and_the_default_of_what_it_sweeps(file, tmp_path):
    results = read_study(file, tmp_path / "runs").results()
    rows = {row.label: row for run in results.runs for row in run.rows}
    assert {label for label, row in rows.items() if row.is_variant} == {"without RandMix"}
    assert rows["ratp, r_con 0.9"].sweep == ("r_con", 0.9)
    default = next(run.plan.config.r_con for run in read_study(file).entries if run.rows[0].label == "ratp")
    assert results.usual == {(0, "r_con"): default}
    assert {run.state for run in results.runs} == {"waiting"}


def test_command_reports_known_results_and_refuses_none(file, tmp_path):
    folder, known = tmp_path / "runs", tmp_path / "known"
    refused = ratp("study", "report", file, "--out", folder)
    assert refused.code == 2
    assert f"Next: ratp study run {file} --out {folder}" in refused.err
    assert f"no run of some is finished in {folder}" in refused.err
    known.mkdir()
    entry = read_study(file, folder).entries[0]
    result = record((50, 80, 70), entry.plan.order, entry.plan.seed).to_json()
    result["config"] |= {"schema": 1, **entry.plan.decisions()}
    del result["sha256"]
    (known / "one.json").write_text(json.dumps(result))
    done = ratp("study", "report", file, "--out", folder, "--known", known, "--to", tmp_path / "report")
    assert done.code == 0, done.err
    assert "50.0" in next(line for line in done.out.splitlines() if line.startswith("ratp "))
    assert f"1 of {len(read_study(file).entries)} runs are finished." in done.out
    assert (tmp_path / "report" / "index.html").is_file()
