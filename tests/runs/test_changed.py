"""What of a run is not as usual, by today's defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratp.evaluation.matrix import Matrix
from ratp.methods import METHODS
from ratp.runs.plan import resolve, with_current_defaults
from ratp.runs.record import RunRecord
from ratp.runs.request import RunRequest


def record(method, changes=None, explicit=None, config=None):
    """A run on the demo that says of itself what was changed."""
    plan = resolve(RunRequest("demo", method, changes=changes or {}, device="cpu"))
    about = {"preset": "official", "changed": plan.changed if explicit is None else explicit, "method_file": None}
    return RunRecord(Path("run"), {**plan.decisions(), **about, **(config or {})}, {}, Matrix(plan.order), ())


@pytest.mark.parametrize("method", METHODS)
def test_current_run_keeps_its_label(method):
    for changes in ({}, {"epochs": 3}):
        found = record(method, changes)
        assert with_current_defaults(found).label == found.label
        assert with_current_defaults(found).changed == changes


@pytest.mark.parametrize(
    ("changes", "explicit", "label"),
    [
        ({}, {"eval_bn": "batch"}, "adacon"),
        ({"eval_bn": "running"}, {}, "adacon (eval_bn=running)"),
        ({"lr": 0.5, "eval_bn": "running"}, {"lr": 0.5}, "adacon (lr=0.5, eval_bn=running)"),
    ],
)
def test_default_changed_since_the_run(changes, explicit, label):
    found = record("adacon", changes, explicit=explicit)
    assert with_current_defaults(found).label == label
    assert with_current_defaults(found).config == found.config


@pytest.mark.parametrize(
    "config",
    [
        {"stream": "folders"},
        {"stream": "elsewhere"},
        {"method": "mine"},
        {"method": "mine.py"},
        {"method_file": "0" * 64},
        {"preset": "none"},
        {"switches": {"eval_bn": "batch", "gone": 1}},
        {"switches": {"eval_bn": ["batch"]}},
        {"switches": None},
        {"recipe": [1]},
    ],
)
def test_unknown_switches_are_kept(config):
    found = record("adacon", explicit={"eval_bn": "batch"}, config=config)
    assert with_current_defaults(found) is found
