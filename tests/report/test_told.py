"""What a run would reach that is told the domain of every image."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ratp.report.summary import group_runs, sections
from ratp.report.told import forgetting_as_told

TOLD = ({"scan": 99.0}, {"scan": 98.0, "photo": 90.0}, {"scan": 96.0, "photo": 88.0, "font": 80.0})


def with_told(run, rows):
    """The run with such rows at the ends of its stages."""
    told = iter(rows)
    ends = (e | {"accuracy_as_told": next(told)} if e["event"] == "stage_finished" else e for e in run.journal)
    return replace(run, journal=tuple(ends))


def test_it_is_the_mean_over_later_stages_then_over_domains(golden):
    assert forgetting_as_told(with_told(golden, TOLD)) == (97 + 88) / 2


def test_a_run_without_has_none_and_no_note(golden):
    assert math.isnan(forgetting_as_told(golden))
    (section,) = sections(group_runs([golden]))
    assert not any("told the domain" in note for note in section.notes())


def test_an_unfinished_run_has_none(make_run):
    run = make_run(((99.0, 60.0, 40.0), (95.0, 90.0, 50.0)))
    assert math.isnan(forgetting_as_told(with_told(run, TOLD)))


def test_reports_say_it_once_for_all_seeds(make_run):
    other = [row | {"photo": 90.0} if "font" in row else row for row in TOLD]
    runs = [with_told(make_run(seed=seed), rows) for seed, rows in enumerate((TOLD, other))]
    (section,) = sections(group_runs(runs))
    (note,) = [note for note in section.notes() if "told the domain" in note]
    assert note == "ratp: told the domain of every image, it would have FA 93.0."


@pytest.mark.parametrize("damage", [None, 5, [1], {"scan": None}, {"scan": 1e308}, {"scan": [98]}, {"other": 5.0}])
def test_what_is_no_accuracy_does_not_count(golden, damage):
    assert forgetting_as_told(with_told(golden, [*TOLD[:2], damage])) == 98.0
