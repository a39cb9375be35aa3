"""Exported results made to take too long, to end in a traceback, or to be computed by a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
from contextlib import suppress
from pathlib import Path

import pytest
from test_json_files import ODD, places, replace_at, report

from helpers import ratp
from ratp.errors import RatpError
from ratp.reports.markup import csv_report
from ratp.reports.page import PictureWarning
from ratp.runs.predictions import Prediction, as_csv
from ratp.runs.record import read_run

GUARD = {"reasons": [], "rolled_back": False, "signs": {"structure": 0.5}}


def result(order):
    """A result on these domains, whose last stage the guard judged."""
    config = {"stream": "s", "order": order, "method": "m", "preset": "official", "seed": 1, "changed": {}}
    row = [50.0] * len(order)
    return {
        "kind": "ratp result",
        "schema": 1,
        "config": {**config, "schema": 1},
        "environment": {},
        "matrix": {"domains": order, "accuracy": [row] * len(order)},
        "journal": [{"event": "stage_finished", "stage": 1, "domain": "b", "seconds": 1.0, "guard": GUARD}],
    }


@pytest.fixture
def save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda data: Path("result.json").write_text(json.dumps(data))


@pytest.mark.faults(31, "plots of very many domains are left out, and a report of too many refused")
def test_many_domains(save):
    save(result([f"d{number}" for number in range(60)]))
    with pytest.warns(PictureWarning, match="60 domains, and pictures show up to 24"):
        assert ratp("report", "result.json", "-q").code == 0
    assert not list(Path("report").glob("*.png"))
    save(result([f"d{number}" for number in range(201)]))
    done = ratp("report", "result.json", "-q")
    assert done.code == 2
    assert "has 201 domains: a report shows up to 200" in " ".join(done.err.split())


@pytest.mark.faults(31, "wrong values of the guard, or anywhere else, give one sentence")
@pytest.mark.parametrize("guard", [{"signs": [1]}, {"reasons": 1}, {"reasons": [1]}, {"reasons": "x"}])
def test_wrong_guard(save, guard):
    data = result(["a", "b"])
    data["journal"][0]["guard"] = guard
    save(data)
    done = ratp("report", "result.json", "-q")
    assert (done.code, done.err.strip()) == (2, "error: result.json is damaged: invalid journal.")


@pytest.mark.faults(31, "wrong values of the guard, or anywhere else, give one sentence")
def test_every_wrong_value(save):
    data = result(["a", "b"])
    for number, at in enumerate(list(places(data))[1:]):
        for odd in ODD[number % 4 :: 4]:
            save(replace_at(data, at, odd))
            with suppress(RatpError):
                report("result.json")


@pytest.mark.faults(31, "names that a spreadsheet would compute, or a terminal obey, are texts in CSV files")
@pytest.mark.parametrize("name", ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "=\x1b[31m"])
def test_formulas(save, name):
    save(result(["a", name]))
    text = csv_report([read_run("result.json")]) + as_csv([Prediction(name, name, 0.5)])
    assert "\x1b" not in text
    assert not [cell for row in csv.reader(io.StringIO(text)) for cell in row if cell.startswith(tuple("=+-@"))]
    assert as_csv([Prediction("-1", "-2.5", 0.5)]).endswith("\n./-1,-2.5,0.5000\n")
