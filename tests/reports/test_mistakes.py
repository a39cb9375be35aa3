"""What the page says about a run's mistakes, the number of its test images, and many methods."""

from __future__ import annotations

import base64
import io
import json
import re
import warnings

import numpy as np
import pytest
from PIL import Image
from test_page import GOLDEN, Page

from ratp.reports.details_plots import losses_of
from ratp.reports.page import PictureWarning, page_html, write_report
from ratp.reports.summary import group_runs, sections
from ratp.runs.record import read_run

ORDER = ("scan", "photo", "font")

CLASSES = [f"kind{k}" for k in range(4)]
WORSE = ((99.0, 50.0, 30.0),) * 3


def counts(right, images, classes=4):
    """Counts in which every mistake takes class 1 for class 0, all with a confidence of 0.8."""
    wrong = images - right
    confusion = [[0, 0, right - 2], [1, 0, wrong], [classes - 1, classes - 1, 2]]
    bins = [[0, 0, 0.0]] * 12 + [[images, right, 0.8 * images]] + [[0, 0, 0.0]] * 2
    return {"confusion": confusion, "bins": bins}


def example(file, predicted, true=None):
    out = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(out, "JPEG")
    picture = base64.b64encode(out.getvalue()).decode()
    return {"file": file, "predicted": predicted, "true": true, "confidence": 0.75, "picture": picture}


def with_details(run, accuracy=GOLDEN, classes=4, examples=()):
    """Writes the counts behind an accuracy matrix of 200 images per domain, and pictures."""
    for stage, row in enumerate(accuracy):
        domains = {name: counts(round(2 * value), 200, classes) for name, value in zip(ORDER, row, strict=True)}
        about = {"schema": 1, "fingerprint": None, "domains": domains}
        (run.path / f"details-{stage}.json").write_text(json.dumps(about))
    if examples:
        (run.path / "examples.json").write_text(json.dumps({"schema": 1, "fingerprint": None, "domains": examples}))
    return read_run(run.path)


def images(same=True, unlabelled=()):
    return {
        name: {"trained": 200, "tested": None if name in unlabelled else 200, "same": same and name != ORDER[0]}
        for name in ORDER
    }


def page_of(runs):
    return Page(page_html(sections(group_runs(runs)), [{"matrix": "", "curves": ""}]))


@pytest.fixture(scope="module")
def detailed(run_in, tmp_path_factory):
    """The page of a run with details and pictures, and of a run that never adapts."""
    folder = tmp_path_factory.mktemp("runs")
    shown = {
        "photo": {
            "mistakes": [example("a<b.png", "kind0", "kind1")],
            "uncertain": [example("c.png", "kind2", "kind2")],
        },
        "font": {"mistakes": [], "uncertain": [example("d.png", "kind3")]},
    }
    run = with_details(run_in(folder / "0", classes=CLASSES, images=images()), examples=shown)
    plain = run_in(folder / "1", WORSE, method="source-only", classes=CLASSES, images=images())
    return Page(write_report([run, with_details(plain, WORSE)], folder / "report").read_text())


class TestMistakes:
    def test_every_domain_has_its_accuracy_calibration_and_worst_class(self, detailed):
        assert "photo 200 85.0 [79.4, 89.3] 5.0 kind1, 0.0 % kind1 taken for kind0" in detailed.text
        assert "scan 200 92.0 [87.4, 95.0] 12.0 kind1, 0.0 % kind1 taken for kind0" in detailed.text

    def test_classes_before_and_after_a_domain_is_learnt(self, detailed):
        assert (
            "Class Images before its stage after its stage after the last stage kind1 30 0.0 0.0 0.0" in detailed.text
        )

    def test_confusions_are_counted(self, detailed):
        assert "True class kind0 kind1 kind3 kind0 168 kind1 30 kind3 2" in detailed.text

    def test_pictures_name_file_prediction_and_truth(self, detailed):
        assert "kind0, 75 % is kind1 a<b.png" in detailed.text
        assert "kind2, 75 % right c.png" in detailed.text
        assert "kind3, 75 % d.png" in detailed.text

    def test_the_baseline_stands_beside_the_best(self, detailed):
        assert "TDA Right after it is learned 89.7 95 % interval" in detailed.text
        assert "best: ratp source-only: 59.7" in detailed.text
        assert "source-only, seed 0 Domain Test images" in detailed.text

    def test_it_loads_nothing_and_runs_nothing(self, detailed):
        assert not detailed.of("script")
        assert all(image["src"].startswith("data:image/") for image in detailed.of("img"))

    def test_of_many_classes_the_worst_are_shown(self, make_run):
        run = make_run(classes=[f"kind{k}" for k in range(40)], images=images())
        many = {"confusion": [[k, (k + 1) % 40, k + 1] for k in range(40)], "bins": counts(0, 820)["bins"]}
        many["bins"][12] = [820, 0, 656.0]
        about = {"schema": 1, "fingerprint": None, "domains": {"photo": many}}
        (run.path / "details-2.json").write_text(json.dumps(about))
        html = write_report([read_run(run.path)], run.path / "report").read_text()
        assert "the 15 worst of 40 classes" in html
        assert "The 15 most frequent mistakes" in html
        assert "kind39 kind0 40 100.0" in Page(html).text
        assert 'class="confusion"' not in html

    def test_runs_without_details_say_so(self, golden):
        assert "not recorded in these runs" in page_of([golden]).text

    def test_damaged_details_leave_the_rest(self, make_run, tmp_path):
        run = with_details(make_run(classes=CLASSES, images=images()))
        (run.path / "details-2.json").write_text('{"schema": 1, "fingerprint": null, "domains": {"photo": []}}')
        with pytest.warns(match="details-2.json is damaged"):
            html = write_report([read_run(run.path)], tmp_path).read_text()
        assert "52.5" in html


class TestTestImages:
    def test_interval_and_number_of_images(self, make_run):
        text = page_of([make_run(images=images())]).text
        assert "photo 200 test images" in text
        assert "90.0 [85.1, 93.4]" in text
        assert "95 % interval" in text

    def test_over_seeds_the_deviation_stays(self, make_run):
        text = page_of([make_run(images=images()), make_run(WORSE, seed=1, images=images())]).text
        assert "95 % interval" not in text
        assert "±" in text

    @pytest.mark.parametrize(
        ("same", "said"), [(True, "on the same images that the model adapted to"), (False, "did not adapt to")]
    )
    def test_it_says_whether_the_model_adapted_to_them(self, make_run, same, said):
        assert said in page_of([make_run(images=images(same))]).text

    def test_runs_of_earlier_versions_have_no_interval(self, golden):
        text = page_of([golden]).text
        assert "interval" not in text
        assert "adapted to" not in text

    def test_without_a_baseline_the_model_before_adaptation_is_compared(self, golden):
        assert "before adaptation: 66.3" in page_of([golden]).text  # 99, 60 and 40

    def test_unlabelled_targets_have_no_count(self, make_run):
        nan = float("nan")
        rows = tuple((*row[:2], nan) for row in GOLDEN)
        text = page_of([make_run(rows, images=images(unlabelled=("font",)))]).text
        assert "font 200" not in text
        assert "95 % interval" in text


class TestManyMethods:
    def methods(self, make_run, count):
        rows = [tuple((99.0, 40.0 + k, 30.0 + (7 * k) % count) for _ in range(3)) for k in range(count)]
        return [make_run(row, method=f"method{k:02}", images=images()) for k, row in enumerate(rows)]

    def test_tables_are_sorted_without_scripts(self, make_run):
        page = page_of(self.methods(make_run, 8))
        overall = page.text.split("How does it do on each domain")[0]
        photo_and_font = {f"method{k:02}": (40 + k, 30 + 7 * k % 8) for k in range(8)}
        means = {m: (p + f) / 2 + (99 + p + f) / 3 + (99 + p) / 2 for m, (p, f) in photo_and_font.items()}
        shown = re.findall(r"method\d\d", overall.split("Sorted by")[0])[-8:]
        assert shown == sorted(means, key=means.get, reverse=True)
        by_tda = overall.split("sorted by TDA")[1].split("sorted by FA")[0]
        assert len(re.findall(r"method\d\d", by_tda)) == 8
        ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
        assert {link["href"] for link in page.of("a")} == {"#s1-TDG", "#s1-TDA", "#s1-FA"}
        assert all(link["href"][1:] in ids for link in page.of("a"))
        assert not page.of("script")

    def test_twenty_methods_fit_in_a_megabyte(self, make_run, tmp_path):
        runs = [with_details(run) for run in self.methods(make_run, 20)]
        html = write_report(runs, tmp_path).read_bytes()
        assert len(html) < 1_000_000


class TestLosses:
    def test_a_repeated_epoch_counts_once(self, make_run):
        run = make_run()
        line = {"event": "epoch", "stage": 1, "domain": "photo", "phase": "target", "epoch": 0, "means": {"total": 3.0}}
        lines = [line, {**line, "epoch": 1}, {**line, "means": {"total": 2.0}}]
        with (run.path / "journal.jsonl").open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in lines)
        assert losses_of(read_run(run.path)) == {1: [{"total": 2.0}, {"total": 3.0}]}

    def test_they_are_drawn(self, make_run, tmp_path):
        run = make_run()
        line = {"event": "epoch", "stage": 0, "domain": "scan", "phase": "source", "epoch": 0, "means": {"ce": 1.0}}
        with (run.path / "journal.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("error", PictureWarning)
            html = write_report([read_run(run.path)], tmp_path).read_text()
        assert "How did the losses go?" in html
        assert (tmp_path / "losses.png").is_file()
