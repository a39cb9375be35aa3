"""Targets thinned by class: which images remain, that nothing else changes, and that every result says so."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import TINY, each_method, journal_of, no_processes, ratp, same_tensors, toy_domain, toy_domains, toy_plan
from own_images import assert_error, assert_ok, config_of, image_files, run_folders, write_files
from ratp.data.domain import LabelledDomain
from ratp.errors import ConfigError
from ratp.reports.page import write_report
from ratp.reports.study import write_study
from ratp.reports.study_parts import several_orders, sweeps
from ratp.reports.summary import group_runs, sections
from ratp.runs.plan import resolve
from ratp.runs.record import read_run
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.streams.own import own_stream
from ratp.studies.execute import run_study
from ratp.studies.file import read_study
from tiny_study import grid, study_file

KINDS = ("half", "few", "long-tail", "90/10")
BIG = {"ink": 80, "mud": 120, "fog": 160}


def stream_of(kind="none", domains=None, **changes):
    method, seed = changes.pop("method", "ratp"), changes.pop("seed", 2022)
    domains = domains or toy_domains(**BIG)
    return toy_plan(method, domains, seed=seed, changes={"label_shift": kind, **changes}).load_stream()


def contents(images):
    return [image.numpy().tobytes() for image in images]


def sizes(domain):
    """Images per class that occurs, most first."""
    return sorted(Counter(domain.labels.tolist()).values(), reverse=True)


def many_classes(name, counts):
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    images = torch.randint(256, (len(labels), 3, 32, 32), generator=torch.Generator().manual_seed(len(name)))
    return LabelledDomain(name, images.to(torch.uint8), labels, tuple(map(str, range(len(counts)))))


@pytest.fixture(scope="module")
def demo():
    changes = ({**TINY, "label_shift": kind} for kind in ("none", *KINDS))
    plans = [resolve(RunRequest(changes=values, device="cpu")) for values in changes]
    return {plan.recipe.label_shift: plan.load_stream() for plan in plans}


class TestWhatRemains:
    """On the demo, every target has 60 test images of each of ten classes, and 180 to train on."""

    def test_half_of_the_classes(self, demo):
        assert [sizes(test) for test in demo["half"].tests[1:]] == [[60] * 5] * 3
        assert [len(target) for target in demo["half"].targets] == [5 * 180] * 3

    def test_few_classes(self, demo):
        assert [sizes(test) for test in demo["few"].tests[1:]] == [[60] * 2] * 3

    def test_long_tail(self, demo):
        expected = [max(round(60 * math.exp(-math.log(50) * k / 9)), 1) for k in range(10)]
        assert expected[0] == 60 and expected[-1] == 1
        assert [sizes(test) for test in demo["long-tail"].tests[1:]] == [expected] * 3

    def test_nine_tenths_of_the_images_from_half_of_the_classes(self, demo):
        for test in demo["90/10"].tests[1:]:
            assert sizes(test)[:5] == [60] * 5
            assert sum(sizes(test)[:5]) / len(test) == pytest.approx(0.9, abs=0.01)

    @pytest.mark.parametrize(("counts", "share"), [((900, 1), 0.9), ((40, 400), 0.9), ((400, 40), 0.9)])
    def test_nine_tenths_of_unbalanced_classes(self, counts, share):
        """Whichever class is the frequent one; with a single image of the other, nine of it remain."""
        domains = [many_classes("a", (20, 20)), many_classes("b", counts)]
        test = stream_of("90/10", domains).tests[1]
        assert sizes(test)[0] / len(test) == pytest.approx(share, abs=0.01)
        assert set(test.labels.tolist()) == {0, 1}

    @pytest.mark.parametrize(("classes", "half", "few"), [(2, 1, 1), (3, 2, 2), (7, 4, 2), (20, 10, 4)])
    def test_odd_and_small_numbers_of_classes(self, classes, half, few):
        domains = [many_classes(name, (10,) * classes) for name in ("a", "bb")]
        assert [sizes(stream_of(kind, domains).tests[1]) for kind in ("half", "few")] == [[10] * half, [10] * few]

    def test_labels_stay_with_their_images_in_order(self, demo):
        for kind in KINDS:
            for plain, test in zip(demo["none"].tests[1:], demo[kind].tests[1:], strict=True):
                label = dict(zip(contents(plain.images), plain.labels.tolist(), strict=True))
                assert [label[image] for image in contents(test.images)] == test.labels.tolist()
                order = [image for image in contents(plain.images) if image in set(contents(test.images))]
                assert order == contents(test.images)

    def test_targets_lose_different_classes(self, demo):
        assert len({tuple(sorted(set(test.labels.tolist()))) for test in demo["half"].tests[1:]}) > 1

    def test_training_and_test_images_have_the_same_classes(self, demo):
        for kind in ("half", "few"):
            for answer, test in zip(demo[kind].answers, demo[kind].tests[1:], strict=True):
                assert set(answer.labels.tolist()) == set(test.labels.tolist())

    def test_a_share_is_held_out_of_what_remains(self):
        whole, held = stream_of("half"), stream_of("half", hold_out=0.25)
        for target, test, everything in zip(held.targets, held.tests[1:], whole.targets, strict=True):
            assert len(test) == round(0.25 * len(everything))
            assert sorted(contents(target.images) + contents(test.images)) == sorted(contents(everything.images))

    def test_named_classes(self):
        stream = stream_of(missing_classes="mud: north, west; fog:east")
        assert set(stream.tests[1].labels.tolist()) == {1, 2}
        assert set(stream.tests[2].labels.tolist()) == {0, 2, 3}

    def test_named_classes_and_half_of_the_others(self):
        stream = stream_of("half", missing_classes="mud:north,west")
        assert [len(set(test.labels.tolist())) for test in stream.tests[1:]] == [1, 2]
        assert not {0, 3} & set(stream.tests[1].labels.tolist())


class TestWhatDecides:
    @pytest.mark.parametrize("kind", KINDS)
    def test_all_methods_and_seeds_see_the_same_images(self, kind):
        first, *others = (
            stream_of(kind, method=method, seed=seed) for method, seed in (("ratp", 1), ("ratp", 2), ("tent", 3))
        )
        for other in others:
            for one, two in zip(first.targets, other.targets, strict=True):
                assert torch.equal(one.images, two.images)
            assert {n: h for n, h in other.fingerprints.items() if n != "ink"} == {
                n: h for n, h in first.fingerprints.items() if n != "ink"
            }

    def test_another_order_or_fewer_domains_change_nothing(self):
        ink, mud, fog = toy_domains(**BIG)
        usual, other, fewer = (stream_of("half", domains) for domains in ([ink, mud, fog], [ink, fog, mud], [ink, fog]))
        assert torch.equal(usual.tests[2].labels, other.tests[1].labels)
        assert torch.equal(usual.tests[2].images, fewer.tests[1].images)

    def test_its_own_seed_draws_others(self):
        found = [stream_of("half", label_shift_seed=seed).tests[1].labels.tolist() for seed in range(4)]
        assert len({tuple(labels) for labels in found}) > 1

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_source_stays_as_it_is(self, kind):
        plain, shifted = stream_of(), stream_of(kind)
        assert torch.equal(plain.source.images, shifted.source.images)
        assert torch.equal(plain.tests[0].images, shifted.tests[0].images)
        assert plain.fingerprints["ink"] == shifted.fingerprints["ink"]

    def test_images_in_memory_are_shifted_too(self):
        source, *targets = toy_domains(**BIG)
        request = RunRequest(changes={**TINY, "label_shift": "half"}, device="cpu")
        stream = resolve(request, stream=own_stream(source, targets)).load_stream()
        assert [sizes(test) for test in stream.tests[1:]] == [[30, 30], [40, 40]]


class TestMistakes:
    def test_without_labels(self):
        ink, mud, _ = toy_domains(**BIG)
        request = RunRequest(changes={**TINY, "label_shift": "half"}, device="cpu")
        with pytest.raises(ConfigError, match="'mud' has no labels, and label_shift=half chooses images by"):
            resolve(request, stream=own_stream(ink, mud.unlabelled())).load_stream()

    def test_too_few_images(self):
        with pytest.raises(ConfigError, match=r"'mud': label_shift=half leaves 4 of its 8 images, and at least 8"):
            stream_of("half", toy_domains(ink=40, mud=8, fog=40))

    def test_a_single_class(self):
        domains = [toy_domain("ink", 40), toy_domain("mud", 40, classes=(2,))]
        with pytest.raises(ConfigError, match=r"'mud' has images of 1 class\(es\), and label_shift=few needs two"):
            stream_of("few", domains)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("mud:norht", "unknown class in missing_classes of 'mud': 'norht'. Did you mean 'north'"),
            ("ink:north", "unknown target in missing_classes: 'ink'"),
            ("north", "must name targets and classes, e.g. fog:A,B; got 'north'"),
            ("mud:north,", "must name targets and classes"),
            ("mud:north;", "must name targets and classes"),
            ("mud:north,east,south,west", "missing_classes leaves 0 of its 120 images"),
        ],
    )
    def test_named_classes(self, text, message):
        with pytest.raises(ConfigError) as caught:
            stream_of(missing_classes=text)
        assert message in str(caught.value)

    def test_unknown_shift(self):
        with pytest.raises(ConfigError, match=r"unknown value of label_shift: 'hlaf'\. Did you mean 'half'"):
            resolve(RunRequest(changes={"label_shift": "hlaf"}))


@pytest.mark.parametrize("method", each_method())
@pytest.mark.parametrize("guard", ["record", "act"])
def test_every_method_learns_from_few_classes(method, guard, tmp_path):
    plan = replace(toy_plan(method, changes={"label_shift": "few"}), guard=guard)
    record = Run(plan, tmp_path).execute()
    assert record.matrix.complete
    assert [event["images"] for event in journal_of(tmp_path, "stage_started")] == [32, 16, 18]
    assert [event["domain"] for event in record.guarded] == ["mud", "fog"]


class TestResults:
    def test_without_a_shift_a_run_is_what_it_was(self):
        recipe = toy_plan().decisions()["recipe"]
        assert not {"label_shift", "label_shift_seed", "missing_classes"} & recipe.keys()

    def test_every_result_names_it(self, tmp_path):
        runs = []
        for kind in ("none", "half"):
            for method in ("source-only", "adabn"):
                plan = toy_plan(method, changes={"label_shift": kind})
                runs.append(Run(plan, tmp_path / f"{method}-{kind}").execute())
        plain, shifted = runs[0], runs[2]
        assert shifted.config["recipe"]["label_shift"] == shifted.config["changed"]["label_shift"] == "half"
        assert shifted.label.endswith(", label_shift=half)")
        assert shifted.stream == "toy, label_shift=half"
        assert plain.config["data"]["ink"] == shifted.config["data"]["ink"]
        assert plain.config["data"]["mud"] != shifted.config["data"]["mud"]
        assert toy_plan(changes={"label_shift": "90/10"}).title == "toy-90/10-ratp-2022"
        # never compared in one table with runs on other images
        assert [(s.stream, len(s.groups)) for s in sections(group_runs(runs))] == [("toy", 2), (shifted.stream, 2)]
        write_report(runs, tmp_path / "report")
        for name in ("index.html", "report.md", "report.tex", "metrics.csv"):
            text = (tmp_path / "report" / name).read_text().replace("\\_", "_").replace("\\", "")
            assert "toy, label_shift=half" in text, name

    def test_the_source_network_is_shared(self, tmp_path, monkeypatch):
        monkeypatch.setenv("RATP_CACHE", str(tmp_path / "cache"))
        states = []
        for kind in ("none", "half"):
            Run(toy_plan("source-only", changes={"label_shift": kind}), tmp_path / kind, reuse_source=True).execute()
            states.append(tmp_path / kind / "state.safetensors")
        ends = [journal_of(path.parent, "stage_finished")[0]["statistics"] for path in states]
        assert ["from_cache" in statistics for statistics in ends] == [False, True]


def test_a_study_compares_only_what_saw_the_same_images(tmp_path, monkeypatch):
    """Tables over several orders keep the shifts apart; a sweep over them has them side by side."""
    monkeypatch.setenv("RATP_CACHE", str(tmp_path / "cache"))
    lines = ('methods = ["source-only"]', 'orders = ["scan>photo", "photo>scan"]', "subset = true")
    path = study_file(tmp_path, grid(*lines, 'sweep = { label_shift = ["half", "few"] }'))
    study = read_study(path, tmp_path / "runs", RunRequest(weights="none", device="cpu"))
    with no_processes():
        run_study(study)
    record = study.results()
    assert [orders.stream for orders in several_orders(record)] == [
        f"demo{shift}" for shift in ("", ", label_shift=half", ", label_shift=few")
    ]
    (sweep,) = sweeps(record)
    assert sweep.stream == "demo" and sorted(sweep.values.values()) == ["few", "half"]
    assert len(sweep.lines) == 2
    page = write_study(record, tmp_path / "report").read_text()
    assert "TDA on demo, label_shift=half in 2 orders, averages over domains (%)" in page


class TestOwnFolders:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for seed, name in enumerate(("day", "rain", "night")):
            write_files(Path(name), image_files(count=6, seed=seed))

    def test_run(self):
        assert_ok(run_folders("day", "rain", "night", out="plain"))
        result = assert_ok(run_folders("day", "rain", "night", more=("--set", "label_shift=half")))
        assert result.out.startswith("folders, label_shift=half: day > rain > night")
        assert "rain: label_shift=half leaves 12 of 24 images, 6 per class, none of " in " ".join(result.err.split())
        assert [e["images"] for e in journal_of(Path("run"), "stage_started")] == [20, 12, 12]
        before, after = config_of("plain")["data"], config_of()["data"]
        assert {name: before[name] == after[name] for name in before} == {"day": True, "rain": False, "night": False}

    def test_the_usual_folder_names_it(self):
        words = ("--source", "day", "--targets", "rain", "--set", "label_shift=90/10", "--set", "network.backbone=dtn")
        sizes_ = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
        result = ratp("run", "folders", *words, *sizes_, "--method", "source-only", "--device", "cpu")
        assert_ok(result)
        (folder,) = Path("runs").iterdir()
        assert folder.name.startswith("folders-90_10-source-only-2022-")

    @pytest.mark.filterwarnings("ignore:continues first")
    def test_named_classes_continue_with_a_further_domain(self):
        shift = ("--set", "missing_classes=rain:north,west")
        assert_ok(run_folders("day", "rain", out="first", more=shift))
        assert_ok(run_folders("day", "rain", "night", out="next", more=(*shift, "--after", "first")))
        assert read_run(Path("next")).stream == "folders, missing_classes=rain:north,west"
        assert_error(
            run_folders("day", "rain", "night", out="other", more=("--after", "first")),
            "missing_classes",
            out="other",
        )

    def test_a_target_without_labels(self):
        more = ("--unlabelled", "night", "--set", "label_shift=half")
        assert_error(run_folders("day", "rain", "night", more=more), "domain 'night' has no labels")


def test_the_labels_of_what_remains_reach_no_method(tmp_path):
    """Scrambled among the classes that remain, they leave the same images, and change no weight."""
    ink, mud, fog = toy_domains(**BIG)
    scrambled = replace(mud, labels=torch.where(mud.labels == 3, 3, (mud.labels + 1) % 3))
    states = []
    for target in (mud, scrambled):
        plan = toy_plan("ratp", [ink, target, fog], changes={"missing_classes": "mud:west"})
        run = Run(plan, tmp_path / str(len(states)))
        run.execute()
        states.append(run.method.state())
    assert same_tensors(*states)
