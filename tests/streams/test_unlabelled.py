"""Targets without labels, which is what targets are: a whole run, its report and its predictions."""

from __future__ import annotations

import csv
import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import CLASSES, accuracy_of, files_of, journal_of, ratp, same_tensors, tensors_of, toy_domains
from own_images import OPTIONS, assert_error, assert_ok, image_files, run_folders, write_files
from ratp.data.domain import UnlabelledDomain
from ratp.runs.events import StageStarted
from ratp.runs.plan import resolve
from ratp.runs.record import read_run
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.streams.stream import make_stream

WILD = ["wild", "sea"]


def make(folder):
    write_files(folder / "day", image_files())
    write_files(folder / "night", image_files(seed=1))
    write_files(folder / "wild", image_files(seed=2, flat=True))
    write_files(folder / "sea", {f"deep/{name}": data for name, data in image_files(seed=3, flat=True).items()})
    shutil.move(folder / "sea" / "deep", folder / "sea" / "sea")  # one more folder around them, as in a zip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a complete run of RaTP over labelled and unlabelled targets, and one over unlabelled ones."""
    folder = tmp_path_factory.mktemp("unlabelled")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make(folder)
        more = ("--probe", "--set", "randmix.kernel_sizes=3,5")
        result = assert_ok(run_folders("day", "wild", "night", "sea", method="ratp", more=more))
        Path("shown.txt").write_text(result.out + result.err)
        assert_ok(run_folders("day", *WILD, out="all", more=("--probe",)))
    return folder


@pytest.fixture
def here(finished, monkeypatch):
    """The folder, to be looked at."""
    monkeypatch.chdir(finished)
    return finished


@pytest.fixture
def mine(finished, tmp_path, monkeypatch):
    """A copy of the folder, to be changed."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "copy", symlinks=True)
    monkeypatch.chdir("copy")
    return Path.cwd()


def rows_of(name, run="run"):
    with Path(f"{run}/predictions-{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class TestRun:
    def test_unlabelled_domains_have_no_accuracy(self, here):
        matrix = json.loads(Path("run/matrix.json").read_text())
        assert matrix["domains"] == ["day", "wild", "night", "sea"]
        for row in matrix["accuracy"]:
            assert [value is None for value in row] == [False, True, False, True]

    def test_unlabelled_domains_have_no_metric(self, here):
        metrics = json.loads(Path("run/matrix.json").read_text())["metrics"]
        assert {name: sorted(metric["domains"]) for name, metric in metrics.items()} == {
            "TDG": ["night"],
            "TDA": ["day", "night"],
            "FA": ["day", "night"],
        }
        tda = metrics["TDA"]["domains"]
        assert metrics["TDA"]["average"] == pytest.approx((tda["day"] + tda["night"]) / 2)

    def test_unlabelled_domains_are_trained_on(self, here):
        stages = {event["domain"]: event for event in journal_of(Path("run"), "stage_started")}
        assert stages["wild"]["steps"] == stages["night"]["steps"] > 0
        assert stages["wild"]["images"] == stages["sea"]["images"] == 12

    def test_unlabelled_domains_are_not_probed(self, here):
        assert {event["domain"] for event in journal_of(Path("run"), "probe")} == {"day", "night"}

    def test_missing_labels_are_reported(self, here):
        assert "note: no labels, so no accuracy: wild, sea" in Path("shown.txt").read_text()

    def test_all_targets_unlabelled(self, here):
        matrix = json.loads(Path("all/matrix.json").read_text())
        assert [row[1:] for row in matrix["accuracy"]] == [[None, None]] * 3
        assert matrix["metrics"]["TDG"] == {"domains": {}, "average": None}
        assert math.isfinite(matrix["metrics"]["FA"]["average"])

    def test_labels_of_others_make_no_difference(self, here, tmp_path):
        """A flat folder of a labelled domain's files trains to the same weights."""
        names = {f"{name}-{k}.png": f"{name}/{k}.png" for name in CLASSES for k in range(3)}
        assert sorted(names) == sorted(image_files(flat=True))
        write_files(tmp_path / "night", image_files(seed=1, flat=True))
        more = ("--set", "randmix.kernel_sizes=3,5")
        for target, out in (("night", "labelled"), (tmp_path / "night", "flat")):
            assert_ok(run_folders("day", target, out=tmp_path / out, method="ratp", more=more))
        assert same_tensors(tensors_of(tmp_path / "labelled", "weights"), tensors_of(tmp_path / "flat", "weights"))

    def test_json_output_is_valid(self, here):
        words = ("--source", "day", "--targets", "wild", "night", "sea", "--out", "run", "--json")
        result = assert_ok(ratp("run", "folders", *words, *OPTIONS, "--set", "randmix.kernel_sizes=3,5"))
        assert json.loads(result.out)["matrix"]["accuracy"][0][1] is None
        assert result.err == ""


class TestPredictions:
    @pytest.mark.parametrize("name", WILD)
    def test_every_file_once_with_a_class_of_the_source(self, here, name):
        rows = rows_of(name)
        assert [row["file"] for row in rows] == sorted(image_files(flat=True))
        assert {row["class"] for row in rows} <= set(CLASSES)
        assert all(1 / len(CLASSES) <= float(row["confidence"]) <= 1 for row in rows)

    def test_predictions_for_all_targets_with_the_true_class_where_it_is_known(self, here):
        assert sorted(path.name for path in Path("run").glob("*.csv")) == [
            "predictions-night.csv",
            "predictions-sea.csv",
            "predictions-wild.csv",
        ]
        assert "true_class" not in rows_of("wild")[0]
        night = rows_of("night")
        assert all(row["file"].startswith(f"{row['true_class']}/") for row in night)
        run = read_run("run")
        right = sum(row["class"] == row["true_class"] for row in night)
        assert 100 * right / len(night) == run.matrix.accuracy[-1][run.config["order"].index("night")]

    def test_predictions_are_of_the_final_model(self, here):
        request = RunRequest(
            "folders",
            source="day",
            targets=("wild", "night", "sea"),
            changes=dict(word.split("=") for word in [*OPTIONS, "randmix.kernel_sizes=3,5"] if "=" in word),
            device="cpu",
        )
        run = Run(resolve(request), "run")
        list(run.events())
        logits = run.method.predict(run.stream.targets[0].images)
        classes = [run.stream.classes[k] for k in logits.argmax(dim=1).tolist()]
        assert [row["class"] for row in rows_of("wild")] == classes

    def test_path_of_predictions_is_reported(self, here):
        assert "Predictions: run/predictions-wild.csv" in Path("shown.txt").read_text()

    def test_lost_predictions_are_rewritten(self, mine):
        before = files_of(Path("all"))
        Path("all/predictions-wild.csv").unlink()
        assert_ok(run_folders("day", *WILD, out="all"))
        after = files_of(Path("all"))
        assert before.keys() == after.keys()
        assert {name for name in after if after[name] != before[name]} == {"journal.jsonl", "checksums.json"}
        assert ratp("verify", "all").code == 0

    def test_domains_made_in_python_count_their_images(self, tmp_path):
        source, target, third = toy_domains()
        stream = make_stream("own", [source, target.unlabelled(), third], 1)
        assert stream.tests[1] is None
        assert isinstance(stream.targets[0], UnlabelledDomain)
        assert stream.fingerprints["mud"] == target.unlabelled().fingerprint()


class TestResume:
    def test_resume_at_every_stage(self, mine):
        whole = files_of(Path("all"))
        for stages in (1, 2):
            request = RunRequest(
                "folders",
                method="source-only",
                source="day",
                targets=WILD,
                changes=dict(word.split("=") for word in OPTIONS if "=" in word),
                device="cpu",
            )
            run = Run(resolve(request), f"part{stages}", probe=True)
            for event in run.events():
                if isinstance(event, StageStarted) and event.stage == stages:
                    break
            assert not list(Path(f"part{stages}").glob("predictions-*"))
            assert_ok(run_folders("day", *WILD, out=f"part{stages}", more=("--probe",)))
            for name in ("matrix.json", "weights.safetensors", "predictions-wild.csv", "predictions-sea.csv"):
                assert Path(f"part{stages}/{name}").read_bytes() == whole[name]
            assert accuracy_of(Path(f"part{stages}")) == accuracy_of(Path("all"))


class TestReport:
    @pytest.fixture(scope="class")
    @staticmethod
    def report(finished):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return assert_ok(ratp("report", finished / "run", finished / "all", "--out", finished / "report"))

    def line(self, text, start):
        return next(line for line in text.splitlines() if line.strip().startswith(start))

    def test_on_the_terminal(self, report):
        assert self.line(report.out, "after wild").count("–") == 2
        assert self.line(report.out, "TDG").count("–") == 3
        assert "nan" not in report.out.lower().replace("finance", "")

    def test_in_markdown(self, report, here):
        text = Path("report/report.md").read_text()
        assert "nan" not in text
        assert self.line(text, "| after night").count("–") == 2
        assert "day > wild > night > sea" in text

    def test_in_csv(self, report, here):
        with Path("report/metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        empty = {(row["domain"], row["metric"]) for row in rows if row["value"] == ""}
        assert empty == {("wild", "accuracy"), ("sea", "accuracy")}
        assert all(math.isfinite(float(row["value"])) for row in rows if row["value"])

    def test_in_latex(self, report, here):
        text = Path("report/report.tex").read_text()
        assert "nan" not in text
        assert "& wild & -- \\\\" in text

    def test_on_the_page(self, report, here):
        page = Path("report/index.html").read_text()
        assert ">nan<" not in page.lower()
        assert page.count(">–</td>") >= 8

    def test_as_plots(self, report, here):
        for name in ("matrix", "curves", "unfamiliar", "matrix-2", "curves-2"):
            assert Path(f"report/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "nan" not in Path("report/matrix.svg").read_text().lower().replace("nano", "")

    def test_from_an_exported_result(self, report, here, tmp_path):
        assert_ok(ratp("report", "all", "--export", tmp_path / "results", "--out", tmp_path / "a", "-q"))
        (result,) = (tmp_path / "results").iterdir()
        again = assert_ok(ratp("report", result, "--out", tmp_path / "b"))
        assert self.line(again.out, "after wild").count("–") == 2


class TestFoldersThatAreNoClasses:
    """A camera's dates, say."""

    @pytest.fixture(autouse=True)
    def _cam(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write_files(Path("day"), image_files())
        write_files(Path("cam/2024-01-01"), image_files(seed=1, flat=True))
        write_files(Path("cam/2024-01-02/late"), image_files(seed=2, flat=True))
        write_files(Path("cam"), {"first.png": image_files(seed=3)["north/0.png"]})
        write_files(Path("wild"), image_files(seed=4, flat=True))

    @pytest.mark.parametrize("name", ["cam", "cam/", "./cam"])
    def test_all_images_below_are_taken(self, name):
        assert_ok(run_folders("day", "cam", more=("--unlabelled", name)))
        files = [row["file"] for row in rows_of("cam")]
        assert len(files) == 25
        assert {"first.png", "2024-01-01/north-0.png", "2024-01-02/late/north-0.png"} <= {*files}
        assert_ok(run_folders("day", "cam", more=("--unlabelled", name)))
        assert "another run" in run_folders("day", "wild", more=("--unlabelled", "wild")).err

    def test_advice_is_given(self):
        assert_error(run_folders("day", "cam"), "beside and in class folders", "--unlabelled")
        Path("cam/first.png").unlink()
        assert_error(run_folders("day", "cam"), "'2024-01-01' (12 images", "--unlabelled cam")

    def test_stream_file_can_say_so(self):
        domains = "[domains]\nday = 'day'\ncam = { path = 'cam', unlabelled = true }\nwild = { path = 'wild' }\n"
        Path("yard.toml").write_text(f"order = ['day', 'cam', 'wild']\n{domains}")
        assert_ok(ratp("run", "yard.toml", "--out", "run", "--method", "source-only", *OPTIONS))
        assert len(rows_of("cam")) == 25
        assert len(rows_of("wild")) == 12

    def test_option_matters_only_where_it_changes_something(self):
        """A run on images that have no folders goes on, whether they are called unlabelled or not."""
        assert_ok(run_folders("day", "wild"))
        assert_ok(run_folders("day", "wild", more=("--unlabelled", "wild")))
        request = RunRequest("folders", source="day", targets=["cam", "wild"])
        plans = [resolve(replace(request, unlabelled=names)) for names in ((), "cam", [Path("cam")], ["cam", "wild"])]
        digests = [plan.digest() for plan in plans]
        assert digests[1] == digests[2]
        assert len({*digests}) == 3

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["folders", "--unlabelled", "day"], "the source 'day' needs its labels"),
            (["folders", "--unlabelled", "cma"], "unknown target in --unlabelled: 'cma'. Did you mean 'cam'?"),
            (["folders", "--unlabelled", ""], "unknown target in --unlabelled"),
            (["demo", "--unlabelled", "photo"], "demo comes with its labels"),
        ],
    )
    def test_mistakes(self, words, expected):
        own = ["--source", "day", "--targets", "cam"] if words[0] == "folders" else []
        assert_error(ratp("run", *words, *own, "--out", "run"), expected)
