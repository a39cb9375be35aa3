"""The FA a run would have if it knew the domain of every test image."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ratp.reports.summary import forgetting_with_domains_given, group_runs, sections

GIVEN = ({"scan": 99.0}, {"scan": 98.0, "photo": 90.0}, {"scan": 96.0, "photo": 88.0, "font": 80.0})


def with_domains_given(run, rows):
    """The run with such rows at the ends of its stages."""
    given = iter(rows)
    ends = (e | {"accuracy_as_told": next(given)} if e["event"] == "stage_finished" else e for e in run.journal)
    return replace(run, journal=tuple(ends))


def test_it_is_the_mean_over_later_stages_then_over_domains(golden):
    assert forgetting_with_domains_given(with_domains_given(golden, GIVEN)) == (97 + 88) / 2


def test_a_run_without_has_none_and_no_note(golden):
    assert math.isnan(forgetting_with_domains_given(golden))
    (section,) = sections(group_runs([golden]))
    assert not any("given the domain" in note for note in section.notes())


def test_an_unfinished_run_has_none(make_run):
    run = make_run(((99.0, 60.0, 40.0), (95.0, 90.0, 50.0)))
    assert math.isnan(forgetting_with_domains_given(with_domains_given(run, GIVEN)))


def test_reports_say_it_once_for_all_seeds(make_run):
    other = [row | {"photo": 90.0} if "font" in row else row for row in GIVEN]
    runs = [with_domains_given(make_run(seed=seed), rows) for seed, rows in enumerate((GIVEN, other))]
    (section,) = sections(group_runs(runs))
    (note,) = [note for note in section.notes() if "given the domain" in note]
    assert note == "ratp: given the domain of every image, its FA would be 93.0."


@pytest.mark.parametrize("damage", [None, 5, [1], {"scan": None}, {"scan": 1e308}, {"scan": [98]}, {"other": 5.0}])
def test_anything_but_an_accuracy_is_ignored(golden, damage):
    assert forgetting_with_domains_given(with_domains_given(golden, [*GIVEN[:2], damage])) == 98.0
