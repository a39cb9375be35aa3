"""Targets that streamed past before their stage, in terminal, page, tables and CSV."""

from __future__ import annotations

import csv
import io
import json

import pytest
from rich.console import Console

from ratp.errors import RunDirectoryError
from ratp.evaluation.online import Score
from ratp.reports.markup import csv_report, latex_report, markdown_report
from ratp.reports.page import write_report
from ratp.reports.summary import group_runs, sections
from ratp.reports.tables import online_tables, print_report


def score(accuracy, *, lost=0.0, t95=None, harm=0.0, images=1100):
    parts = {"1-64": accuracy - 5, "65-256": accuracy, "257-1024": accuracy + 5}
    return Score(images, parts, accuracy, 33.0, lost, t95, harm).to_json()


PASSES = {
    "photo": {"shuffled": score(40.0, lost=30.0, t95=320), "clustered": score(20.0, lost=90.0, harm=100.0)},
    "font": {"shuffled": score(60.0, lost=10.0, t95=640), "clustered": score(30.0, lost=70.0, t95=512, harm=50.0)},
}
OTHER = {name: {order: score(50.0, t95=256) for order in found} for name, found in PASSES.items()}


def cells(table):
    return {name: [entry.text for entry in entries] for name, entries in table.rows}


def tables_of(*runs):
    (section,) = sections(group_runs(runs))
    return online_tables(section)


class TestTables:
    def test_a_single_run_domain_by_domain(self, make_run):
        shuffled, clustered = tables_of(make_run(passes=PASSES))
        assert shuffled.heads == ("Domain", "1-64", "65-256", "257-1024", "all", "lost", "T95", "harm")
        assert cells(shuffled) == {
            "photo": ["35.0", "40.0", "45.0", "40.0", "30.0", "320", "0.0"],
            "font": ["55.0", "60.0", "65.0", "60.0", "10.0", "640", "0.0"],
            "average": ["45.0", "50.0", "55.0", "50.0", "20.0", "480", "0.0"],
        }
        # never reached on one domain: no mean over the other
        assert [row[5] for row in cells(clustered).values()] == ["–", "512", "–"]
        assert cells(clustered)["average"][6] == "75.0"

    def test_several_methods_over_seeds(self, make_run):
        runs = [make_run(passes=PASSES), make_run(passes=OTHER, seed=1), make_run(method="tent", passes=OTHER)]
        shuffled = tables_of(*runs, make_run(method="shot"))[0]
        assert list(cells(shuffled)) == ["ratp", "tent"]  # the one that was not measured is left out
        (_, ratp), (_, tent) = shuffled.rows
        assert [(entry.text, entry.spread) for entry in ratp[3:6]] == [
            ("50.0", " ± 0.0"),
            ("10.0", " ± 14.1"),
            ("368", " ± 158.4"),
        ]
        assert tent[3].text == "50.0" and shuffled.title.endswith("averages over domains")

    def test_a_domain_with_few_images_has_no_later_parts(self, make_run):
        few = Score(30, {"1-64": 50.0}, 50.0, 50.0, 0.0, None, 0.0).to_json()
        passes = {"photo": {"shuffled": few}, "font": PASSES["font"]}
        assert cells(tables_of(make_run(passes=passes))[0])["photo"] == ["50.0", "–", "–", "50.0", "0.0", "–", "0.0"]
        assert cells(tables_of(make_run(passes=passes))[0])["average"][2] == "65.0"

    def test_without_passes_there_are_no_tables(self, golden):
        assert tables_of(golden) == []


class TestReports:
    def test_terminal_of_eighty_columns(self, make_run):
        console = Console(file=io.StringIO(), width=80)
        print_report([make_run(passes=PASSES)], console)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= 80
        assert "Before its stage, images shuffled" in lines
        assert ["average", "45.0", "50.0", "55.0", "50.0", "20.0", "480", "0.0"] in [line.split() for line in lines]
        assert "a dash if none did" in " ".join(lines)

    def test_files(self, make_run, tmp_path):
        runs = [make_run(passes=PASSES), make_run(method="tent", passes=OTHER)]
        page = write_report(runs, tmp_path / "report").read_text()
        assert "How useful is it from the first image on?" in page and "images mostly class by class" in page
        assert "How useful is it" not in write_report([make_run()], tmp_path / "plain").read_text()
        assert "| ratp | 45.0 | 50.0 | 55.0 | 50.0 | 20.0 | 480 | 0.0 |" in " ".join(markdown_report(runs).split())
        assert latex_report(runs).count(r"\begin{table}") == 3

    def test_csv_has_every_number(self, make_run):
        rows = list(csv.DictReader(io.StringIO(csv_report([make_run(passes=PASSES)]))))
        found = {(row["metric"], row["domain"]): row["value"] for row in rows if row["metric"].startswith("online")}
        assert len(found) == 2 * 2 * 7
        assert found["online clustered T95", "photo"] == ""
        assert float(found["online shuffled lost", "photo"]) == 30

    @pytest.mark.parametrize("broken", [3, [], {"shuffled": 3}, {"shuffled": {"images": 3}}, {"shuffled": None}])
    def test_a_damaged_score_names_the_run(self, broken, make_run):
        run = make_run(passes={"photo": broken} if broken else {"photo": {"shuffled": json.loads('{"lost": "x"}')}})
        with pytest.raises(RunDirectoryError, match="a pass of its journal is unreadable"):
            tables_of(run)
