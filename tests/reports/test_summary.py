"""Grouping, seed statistics and the area of the Unfamiliar Period."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratp.errors import RatpError, RunDirectoryError
from ratp.evaluation.matrix import Matrix
from ratp.reports.summary import by_domain, group_runs, sections
from ratp.runs.record import RunRecord, read_run

GOLDEN = ((99.0, 60.0, 40.0), (95.0, 90.0, 50.0), (92.0, 85.0, 80.0))
SECOND = ((98.0, 62.0, 44.0), (94.0, 88.0, 52.0), (90.0, 83.0, 84.0))


def record(probes, accuracy=GOLDEN, domains=("scan", "photo", "font")):
    events = tuple(
        {"event": "probe", "stage": stage, "domain": domains[stage], "progress": p, "accuracy": {domains[stage]: value}}
        for stage, p, value in probes
    )
    config = {"method": "ratp", "seed": 0, "stream": "demo", "order": list(domains)}
    return RunRecord(Path("run"), config, {}, Matrix(domains, accuracy), events)


def means_of(group):
    """The mean accuracy matrix."""
    return tuple(tuple(cell.mean for cell in row) for row in group.accuracy)


def test_golden_matrix_gives_the_metrics_worked_out_by_hand(golden):
    (group,) = group_runs([golden])
    assert [group.spread("TDG", d).mean for d in ("photo", "font")] == [60.0, 45.0]
    assert [group.spread("FA", d).mean for d in ("scan", "photo")] == [93.5, 85.0]
    assert group.spread("TDG").mean == 52.5
    assert group.spread("TDA").mean == pytest.approx(269 / 3)
    assert group.spread("FA").mean == 89.25
    assert means_of(group) == golden.matrix.accuracy
    assert math.isnan(group.spread("TDG").deviation)
    assert math.isnan(group.spread("TDG", "scan").mean)


def test_seeds_are_averaged_with_the_sample_standard_deviation(make_run):
    (group,) = group_runs([make_run(GOLDEN, seed=0), make_run(SECOND, seed=1)])
    assert group.spread("TDG").mean == pytest.approx((52.5 + (62 + 48) / 2) / 2)
    assert group.spread("TDG").deviation == pytest.approx(statistics.stdev([52.5, 55.0]))
    cell = group.accuracy[1][1]
    assert (cell.n, cell.mean, cell.deviation) == (2, 89.0, pytest.approx(math.sqrt(2)))
    assert means_of(group)[2] == (91.0, 84.0, 82.0)
    assert group.status == "2 seeds"


def test_groups_keep_the_order_runs_were_given_in(make_run):
    runs = [
        make_run(method="tent"),
        make_run(method="ratp"),
        make_run(method="tent", seed=1),
        make_run(changed={"pca": False}),
    ]
    assert [(g.label, len(g.runs)) for g in group_runs(runs)] == [("tent", 2), ("ratp", 1), ("ratp (pca=False)", 1)]


def test_other_orders_and_streams_are_other_sections(make_run):
    runs = [make_run(), make_run(order=("photo", "scan", "font")), make_run(stream="other"), make_run(method="tent")]
    found = sections(group_runs(runs))
    assert [[g.label for g in section.groups] for section in found] == [["ratp", "tent"], ["ratp"], ["ratp"]]


def test_unfinished_runs_are_kept_apart_from_the_mean(make_run):
    (group,) = group_runs([make_run(seed=0), make_run(SECOND, seed=1), make_run(((10.0, 10.0, 10.0),), seed=2)])
    together, alone = group.parts()
    assert together.spread("TDA").mean == group.spread("TDA").mean == pytest.approx((269 + 270) / 6)
    assert (alone.name, alone.status, alone.finished) == ("ratp, seed 2", "1 of 3 stages", False)
    assert alone.spread("TDA").mean == 10.0
    assert math.isnan(alone.spread("FA").mean)
    (section,) = sections([group])
    assert "ratp, seed 2 (1 of 3 stages)" in section.notes()[0]


def test_a_group_of_unfinished_runs_only_has_no_mean(make_run):
    (group,) = group_runs([make_run(GOLDEN[:2], seed=0), make_run(GOLDEN[:1], seed=1)])
    assert group.spread("TDA").n == 0
    assert [part.status for part in group.parts()] == ["2 of 3 stages", "1 of 3 stages"]


def test_a_repeated_seed_counts_once_with_a_note(make_run):
    (group,) = group_runs([make_run(seed=0), make_run(seed=0), make_run(SECOND, seed=1)])
    found = group.spread("TDG")
    assert (found.n, found.mean, found.deviation) == (2, 53.75, pytest.approx(statistics.stdev([52.5, 55.0])))
    assert any("seed 0 appears more than once" in note for note in sections([group])[0].notes())


def test_differing_runs_are_reported(make_run):
    runs = [
        make_run(seed=0),
        make_run(seed=1, recipe={"epochs": 5}),
        make_run(method="tent", data={"scan": "sha-of-scan", "photo": "another", "font": "sha-of-font"}),
    ]
    notes = " ".join(sections(group_runs(runs))[0].notes())
    assert "recipe.epochs" in notes
    assert "same images of photo:" in notes


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("method_file", ("a" * 64, "b" * 64), ["mine (file aaaaaaaa)", "mine (file bbbbbbbb)"]),
        ("weights", (None, "c" * 64), ["mine (weights none)", "mine (weights cccccccc)"]),
        ("guard", ("act", "record"), ["mine (guard act)", "mine (guard record)"]),
    ],
)
def test_unlabelled_differences_make_another_row(key, values, expected, make_run):
    """An edited file of one's own, say: its seeds are not those of the file before."""
    runs = [make_run(method="mine", seed=seed, **{key: value}) for seed in (1, 2) for value in values]
    (section,) = sections(group_runs([*runs, make_run(method="other")]))
    assert [group.label for group in section.groups] == [*expected, "other"]
    assert [len(group.counted) for group in section.groups] == [2, 2, 1]
    assert [section.name_of(run) for run in section.runs][::2] == [*expected, "other"]
    assert section.notes() == []
    assert group_runs(section.runs) == list(section.groups)  # as often as they are grouped


def test_runs_on_other_images_are_neither_seeds_nor_repetitions(make_run):
    images = [{"scan": "s", "photo": photo, "font": "f"} for photo in ("p", "q")]
    runs = [
        make_run(seed=0, data=images[0]),
        make_run(SECOND, seed=0, data=images[1]),
        make_run(seed=1, data=images[0]),
    ]
    (section,) = sections(group_runs(runs))
    assert [len(group.counted) for group in section.groups] == [2, 1]
    assert all(re.fullmatch(r"ratp \(images [0-9a-f]{8}\)", group.label) for group in section.groups)
    (note,) = section.notes()
    assert note.startswith("Not every run saw the same images of photo")


def test_differing_precision_is_reported(make_run):
    tf32, bf16 = (replace(make_run(seed=seed), environment={"precision": p}) for seed, p in enumerate(("tf32", "bf16")))
    (section,) = sections(group_runs([tf32, bf16, replace(make_run(method="shot"), environment={"precision": "bf16"})]))
    assert section.notes() == ["Not every run was computed in the same precision: bf16: ratp, shot; tf32: ratp."]
    assert sections(group_runs([bf16, make_run(method="old")]))[0].notes() == []


def test_images_left_out_are_named_once(make_run):
    notes = ["photo: left out 2:\n  a.png: empty\n  b.png: empty", "font: no images of cat."]
    (section,) = sections(group_runs([make_run(seed=0, notes=notes), make_run(seed=1, notes=notes)]))
    assert section.notes() == ["About the images: photo: left out 2; font: no images of cat."]
    (section,) = sections(group_runs([make_run(notes={"photo": None})]))
    assert section.notes() == []


def test_runs_alike_but_for_the_seed_need_no_note(make_run):
    assert sections(group_runs([make_run(seed=0), make_run(seed=1)]))[0].notes() == []


def test_explicit_default_makes_no_difference(make_run):
    explicit, by_default = make_run(seed=0, changed={"pca": True}), make_run(seed=1)
    (group,) = group_runs([replace(run, name="ratp") for run in (explicit, by_default)])
    assert not any("differ" in note for note in sections([group])[0].notes())


def test_nothing_to_report_is_an_error():
    with pytest.raises(RatpError, match="no runs"):
        sections([])


def test_area_of_a_constant_curve_is_the_constant():
    area = by_domain(record([(1, 0.0, 50.0), (1, 0.5, 50.0), (1, 1.0, 50.0)]), "Unfamiliar")
    assert area == {"photo": 50.0}


def test_area_of_lines_and_of_irregular_spacing():
    straight = [(1, 0.0, 20.0), (1, 1.0, 80.0)]
    bent = [(2, 0.0, 0.0), (2, 0.1, 50.0), (2, 0.5, 70.0), (2, 1.0, 90.0)]
    area = by_domain(record(straight + bent), "Unfamiliar")
    assert area["photo"] == pytest.approx(50.0)
    assert area["font"] == pytest.approx(0.1 * 25 + 0.4 * 60 + 0.5 * 80)


def test_area_leaves_out_the_source_and_stages_under_way():
    probes = [(0, 0.0, 10.0), (0, 1.0, 90.0), (1, 0.0, 40.0), (1, 1.0, 60.0), (2, 0.0, 30.0)]
    assert by_domain(record(probes, GOLDEN[:2]), "Unfamiliar") == {"photo": 50.0}
    assert by_domain(record([]), "Unfamiliar") == {}


def test_restarted_stage_counts_its_last_attempt():
    interrupted = [(1, 0.0, 10.0), (1, 0.5, 10.0), (1, 0.0, 60.0), (1, 1.0, 60.0)]
    assert by_domain(record(interrupted), "Unfamiliar")["photo"] == pytest.approx(60.0)


@given(st.dictionaries(st.floats(0, 1), st.floats(0, 100), min_size=1, max_size=12))
def test_area_lies_between_the_lowest_and_the_highest_accuracy(curve):
    area = by_domain(record([(1, p, curve[p]) for p in sorted(curve)]), "Unfamiliar")["photo"]
    assert min(curve.values()) - 1e-9 <= area <= max(curve.values()) + 1e-9


@given(st.floats(0, 100), st.floats(0, 100), st.lists(st.floats(0, 1), max_size=8))
def test_area_of_a_line_does_not_depend_on_where_it_was_probed(start, end, between):
    points = sorted({0.0, 1.0, *between})
    probes = [(1, p, (1 - p) * start + p * end) for p in points]
    area = by_domain(record(probes), "Unfamiliar")["photo"]
    assert area == pytest.approx((start + end) / 2, abs=1e-6)


def test_area_survives_the_export_to_a_result_file(make_run, tmp_path):
    run = make_run(probes={"photo": [(0.0, 40.0), (0.3, 70.0), (1.0, 80.0)]})
    run.export(tmp_path / "result.json")
    assert by_domain(read_run(tmp_path / "result.json"), "Unfamiliar") == by_domain(run, "Unfamiliar")


@pytest.mark.parametrize("broken", [{"progress": "half"}, {"progress": 1.5}, {"accuracy": {"photo": 101}}])
def test_a_damaged_probe_names_the_run(golden, broken):
    probe = {"event": "probe", "stage": 1, "domain": "photo", "progress": 0.5, "accuracy": {"photo": 50.0}, **broken}
    with (golden.path / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps(probe) + "\n")
    with pytest.raises(RunDirectoryError, match="damaged"):
        by_domain(read_run(golden.path), "Unfamiliar")


def test_common_settings_are_stated_once(make_run):
    common = {"epochs": "4", "size": "32"}
    runs = [
        make_run(method="ratp", changed=common),
        make_run(method="ratp", changed={**common, "augment": "False"}),
        make_run(method="tent", changed={**common, "lr": "0.1"}),
    ]
    (section,) = sections(group_runs(runs))
    assert [group.label for group in section.groups] == ["ratp", "ratp (augment=False)", "tent (lr=0.1)"]
    assert [section.name_of(run) for run in section.runs] == [group.label for group in section.groups]
    assert "Changed in every run: epochs=4, size=32." in section.notes()


def test_runs_with_names_say_what_was_changed_in_them(make_run):
    common = {"epochs": "4"}
    runs = [
        replace(make_run(method="ratp", changed=common), name="ratp"),
        replace(make_run(method="ratp", changed={**common, "augment": "False"}), name="plain"),
        replace(make_run(method="ratp", changed={**common, "r_con": "0.5"}), name="ratp, r_con=0.5"),
    ]
    (section,) = sections(group_runs(runs))
    assert [group.label for group in section.groups] == ["ratp", "plain", "ratp, r_con=0.5"]
    assert section.notes()[:2] == ["Changed in every run: epochs=4.", "Changed in plain: augment=False."]
    assert not any("r_con" in note for note in section.notes())


def test_a_label_alone_says_everything(make_run):
    (section,) = sections(group_runs([make_run(changed={"epochs": "4"}), make_run(changed={"epochs": "4"}, seed=1)]))
    assert [group.label for group in section.groups] == ["ratp (epochs=4)"]
    assert section.notes() == []
