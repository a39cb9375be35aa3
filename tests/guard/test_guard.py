"""The guard: signs that need no label, and runs in which a bad domain is undone as if it had never come."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from sklearn.datasets import load_sample_images

import ratp.runs.states
from helpers import (
    CLASSES,
    QUICK,
    accuracy_of,
    each_method,
    journal_of,
    same_tensors,
    slow,
    tensors_of,
    toy_domain,
    toy_plan,
)
from helpers import (
    ratp as command,
)
from own_images import OPTIONS, encode, image_files, write_files
from ratp._core.environment import Randomness
from ratp.cli.progress import follow
from ratp.data.domain import LabelledDomain
from ratp.errors import ConfigError, RunDirectoryError
from ratp.guard.watch import (
    LIMITS,
    Indicators,
    Predictions,
    View,
    broken,
    class_spread,
    compare,
    decide,
    kept,
    picture_structure,
    recognition,
    skill,
    variety,
)
from ratp.methods.source_only import SourceOnly
from ratp.reports.page import write_report
from ratp.reports.tables import print_report
from ratp.runs.events import StageFinished
from ratp.runs.plan import resolve
from ratp.runs.record import read_run
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.streams.stream import LoadedDomain
from ratp.studies.file import read_study

FAULT = 15
# Enough to learn the toy domains.
LEARNS = {"epochs": 4, "steps": 20, "batch": 16, "lr": 0.05}
LEARNS |= {"network.width": 0.1, "network.hidden": 32, "network.dim": 16}
GOOD = Indicators(
    images=500,
    structure=0.9,
    recognition=0.5,
    variety_before=0.9,
    variety=0.95,
    largest_before=0.3,
    largest=0.2,
    missing_before=0,
    missing=0,
    confidence_before=0.6,
    confidence=0.9,
    agreement=0.6,
    source_before=0.97,
    source=0.9,
    source_agreement=0.9,
    source_skill=0.9,
    source_kept=0.92,
    memory_before=0.97,
    memory=0.9,
    memory_agreement=0.9,
    memory_kept=0.92,
    memory_confidence_before=0.9,
    memory_confidence=0.9,
    spread_before=1.0,
    spread=1.0,
)


def images_of(kind, count=60):
    """Images that are no domain of the toy stream."""
    generator = Randomness(0).generator(kind)
    if kind == "blank":
        return torch.randint(256, (count, 3, 1, 1), generator=generator).expand(-1, -1, 32, 32).to(torch.uint8)
    return torch.randint(256, (count, 3, 32, 32), generator=generator).to(torch.uint8)


def bad_domain(kind, name="bad"):
    if kind == "one class":
        return replace(toy_domain("mud", 60, classes=(2,)), name=name)
    return LabelledDomain(name, images_of(kind), torch.arange(60) % 4, CLASSES)


def make_plan(method="shot", domains=("ink", "mud", "fog"), guard="act", changes=LEARNS):
    """A run on toy domains; those not given by name are as they are."""
    found = [toy_domain(item, 120 if item == "ink" else 60) if isinstance(item, str) else item for item in domains]
    return replace(toy_plan(method, found, changes=changes), guard=guard)


class TestSigns:
    @given(st.integers(2, 8), st.integers(2, 40), st.integers(0, 10**6))
    def test_variety_is_none_where_all_is_one_class_and_does_not_depend_on_order_or_names(self, classes, count, seed):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(5 * classes) % classes
        certain = torch.eye(classes)[torch.zeros(count, dtype=torch.int64)]
        assert variety(certain, labels) == 0
        some = torch.rand(count, classes, generator=generator).softmax(dim=1)
        mixed = some[torch.randperm(count, generator=generator)][:, torch.randperm(classes, generator=generator)]
        assert variety(some, labels) > 0
        assert variety(mixed, labels) == pytest.approx(variety(some, labels))

    def test_variety_is_one_where_classes_come_as_in_the_source(self):
        labels = torch.tensor([0, 0, 0, 1, 2])
        assert variety(torch.eye(3)[labels], labels) == pytest.approx(1)
        assert variety(torch.eye(3)[:1], torch.zeros(4, dtype=torch.int64)) == 1  # there is but one class
        assert variety(torch.eye(100)[:20], torch.arange(100)) == pytest.approx(1)  # twenty images, twenty classes

    @given(st.floats(0.4, 1), st.integers(0, 100), st.integers(0, 100))
    def test_retention_is_one_without_change_and_falls_with_accuracy(self, before, some, other):
        labels = torch.arange(40) % 4
        assert kept(before, before, labels) == pytest.approx(1)
        assert kept(before, 0.25, labels) == pytest.approx(0)
        assert (kept(before, some / 100, labels) < kept(before, other / 100, labels)) == (some < other)

    def test_ignorant_model_has_no_retention(self):
        assert kept(0.3, 0.0, torch.arange(40) % 4) is None
        assert skill(0.3, torch.arange(40) % 4) == pytest.approx(0.05 / 0.75)
        assert kept(0.8, 0.8, torch.tensor([0, 0, 0, 0, 1])) is None  # always the same answer is right as often
        assert kept(1.0, 1.0, torch.zeros(4, dtype=torch.int64)) is None

    def test_pictures_have_structure_and_noise_and_blank_images_have_none(self):
        assert abs(picture_structure(images_of("noise"))) < 0.02
        assert picture_structure(images_of("blank")) == 0
        ramp = (torch.arange(32) * 8).expand(4, 3, 32, 32).to(torch.uint8)
        assert picture_structure(ramp[:, :, :, ::1]) > 0.4  # rows differ by nothing, columns by little
        pictures = toy_domain("ink").images
        assert picture_structure(pictures) > 0.5
        assert picture_structure(255 - pictures) == pytest.approx(picture_structure(pictures))
        assert picture_structure(pictures[:, :, :1, :1]) == 0  # a single pixel has no neighbour

    @given(size=st.integers(1, 50), seed=st.integers(0, 99))
    def test_broken_images_have_the_same_pixels_in_another_order(self, size, seed):
        whole = torch.randint(256, (3, 3, size, size), generator=torch.Generator().manual_seed(seed))
        found = list(broken(whole, torch.Generator().manual_seed(seed)))
        assert len(found) == 1 + (size >= 12) + (size >= 24) + (size >= 48)
        for image in found:
            assert torch.equal(image.flatten(2).sort(dim=2).values, whole.flatten(2).sort(dim=2).values)
            assert size < 12 or not torch.equal(image, whole)
        if size == 12:  # pieces stay whole
            assert whole[0, 0, :6, :6].tolist() in found[0][0, 0].unfold(0, 6, 6).unfold(1, 6, 6).flatten(0, 1).tolist()

    def test_recognition_is_measured_on_source_images(self):
        assert recognition(0.15, 0.3) == 0.5
        assert recognition(-0.03, 0.3) == pytest.approx(-0.1)
        assert recognition(0.0, 0.05) is None  # pieces of source images do as well: then they tell nothing

    def test_collapsed_classes_have_no_spread(self):
        labels = torch.tensor([0, 0, 1, 1])
        assert class_spread(torch.eye(2)[labels], labels) == pytest.approx(1)
        assert class_spread(torch.ones(4, 3), labels) == pytest.approx(0)
        assert class_spread(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), labels) == pytest.approx(2)
        assert class_spread(None, labels) is None
        assert class_spread(torch.ones(2, 3), labels[:2]) is None

    def test_signs_of_two_models_worked_out_by_hand(self):
        right = torch.eye(2)[[0, 1, 0, 1]]
        wrong = torch.eye(2)[[0, 0, 0, 0]]
        labels = torch.tensor([0, 1, 0, 1])
        before = View(Predictions(right), Predictions(right, right), Predictions(right))
        after = View(Predictions(wrong), Predictions(wrong, wrong), Predictions(wrong))
        signs = compare(before, after, structure=1.0, source_labels=labels, memory_labels=labels)
        assert (signs.variety_before, signs.variety) == (1, 0)
        assert (signs.largest_before, signs.largest, signs.missing_before, signs.missing) == (0.5, 1, 0, 1)
        assert (signs.source_before, signs.source, signs.source_agreement, signs.source_kept) == (1, 0.5, 0.5, 0)
        assert (signs.memory, signs.memory_agreement, signs.memory_kept, signs.agreement) == (0.5, 0.5, 0, 0.5)
        assert (signs.spread_before, signs.spread) == (1, 0)
        assert len(decide(replace(signs, images=60)).reasons) == 3  # one class, source and exemplars forgotten


class TestDecision:
    def test_good_signs_are_accepted(self):
        assert decide(GOOD).reasons == ()

    @pytest.mark.parametrize(
        "sign", ["structure", "recognition", "variety_before", "variety", "source_kept", "memory_kept"]
    )
    def test_every_limit_refuses_below_it_and_not_at_it(self, sign):
        limit = getattr(LIMITS, sign)
        assert decide(replace(GOOD, **{sign: limit})).reasons == ()
        assert len(decide(replace(GOOD, **{sign: limit - 0.01})).reasons) == 1

    @pytest.mark.parametrize("unknown", [{"images": LIMITS.images - 1}, {"source_skill": 0.0, "source_kept": None}])
    def test_few_images_and_a_model_that_knows_nothing_say_nothing_about_the_domain(self, unknown):
        assert decide(replace(GOOD, recognition=0.0, variety_before=0.0, variety=0.0, **unknown)).reasons == ()

    @pytest.mark.parametrize(
        ("recognition", "agreement", "refused"),
        [(0.5, 0.3, True), (0.5, 0.4, False), (0.2, 0.3, False), (None, 0.3, False)],
    )
    def test_changing_more_answers_than_the_model_doubted(self, recognition, agreement, refused):
        found = decide(replace(GOOD, recognition=recognition, agreement=agreement)).reasons
        assert any("contradicts what the previous one was sure of" in reason for reason in found) == refused

    def test_a_model_that_recognises_nothing_as_a_whole_says_nothing_about_the_classes_of_a_domain(self):
        assert decide(replace(GOOD, recognition=None, variety_before=0.0)).reasons == ()

    def test_the_view_of_a_model_that_knows_less_counts_less(self):
        seen = replace(GOOD, variety_before=0.5)
        assert decide(seen).reasons
        assert not decide(replace(seen, source_skill=0.4)).reasons
        assert decide(replace(seen, source_skill=0.4, variety_before=0.2)).reasons

    def test_missing_signs_are_not_a_reason(self):
        bare = replace(GOOD, **dict.fromkeys(n for n in vars(GOOD) if n.startswith(("memory", "spread"))))
        assert decide(bare).reasons == ()
        assert "memory" not in decide(bare).to_json()["signs"]
        assert "spread" not in decide(replace(GOOD, spread=float("nan"))).to_json()["signs"]  # JSON has no such number


@pytest.mark.faults(FAULT, "the guard undoes a stage on noise, blank images or one class and restores the old model")
@pytest.mark.parametrize("kind", ["noise", slow("blank"), slow("one class")])
def test_bad_domain_is_undone_completely(kind, tmp_path):
    guarded = Run(make_plan(domains=("ink", "mud", bad_domain(kind), "fog")), tmp_path / "guarded")
    states = [tensors_of(guarded.folder) for event in guarded.events() if isinstance(event, StageFinished)]
    assert same_tensors(states[1], states[2])
    rows = accuracy_of(guarded.folder)
    assert rows[1] == rows[2]
    assert rows[3][:2] == [100, 100]
    judged = [event["guard"]["rolled_back"] for event in journal_of(guarded.folder, "stage_finished")[1:]]
    assert judged == [False, True, False]
    Run(make_plan(domains=("ink", "mud", "fog")), tmp_path / "without").execute()
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(guarded.folder, name), tensors_of(tmp_path / "without", name))


@pytest.mark.slow
@pytest.mark.faults(FAULT, "the guard undoes a stage on unrelated images and restores the old model")
def test_unrelated_pictures_are_undone_but_not_real_ones(tmp_path):
    """Crops of two photographs, a temple and a flower, for a model of digits."""
    photographs = [torch.tensor(image).permute(2, 0, 1) for image in load_sample_images().images]
    crops = [
        photograph[:, y : y + 96 : 3, x : x + 96 : 3]
        for photograph in photographs
        for y in range(0, 330, 40)
        for x in range(0, 540, 40)
    ]
    sizes = {"network.width": 0.25, "epochs": 3, "steps": 40, "lr": 0.005}
    plan = resolve(RunRequest("demo", "shot", "scan>font>photo", changes=sizes, subset=True, device="cpu", guard="act"))

    def load(codes, size, options):
        found = [item.domain for item in plan.spec.load(codes, size, options)]
        other = LabelledDomain("other", torch.stack(crops), torch.arange(len(crops)) % 10, found[0].classes)
        return [LoadedDomain(domain) for domain in (found[0], other, found[2])]

    run = Run(replace(plan, spec=replace(plan.spec, load=load)), tmp_path / "run")
    states = [tensors_of(run.folder) for event in run.events() if isinstance(event, StageFinished)]
    verdicts = [event["guard"] for event in journal_of(run.folder, "stage_finished")[1:]]
    assert [verdict["rolled_back"] for verdict in verdicts] == [True, False]
    assert any("recognises nothing in its images" in reason for reason in verdicts[0]["reasons"])
    assert same_tensors(states[0], states[1])


class Forgetful(SourceOnly):
    """Loses all it knows on a domain, without a number that is none."""

    name = "forgetful"

    def target_phases(self, domain):
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(1))
        return super().target_phases(domain)


@pytest.mark.faults(FAULT, "the guard undoes a stage that makes the model forget the source")
def test_ruinous_stage_is_undone(tmp_path):
    plan = replace(make_plan("source-only"), method=Forgetful)
    Run(plan, tmp_path / "act").execute()
    assert accuracy_of(tmp_path / "act") == [[100, 100, 100]] * 3
    message = journal_of(tmp_path / "act", "stage_finished")[1]["guard"]
    assert any("forgot the source" in reason for reason in message["reasons"])
    Run(replace(plan, guard="record"), tmp_path / "record").execute()
    assert accuracy_of(tmp_path / "record")[1][0] < 60
    noted = journal_of(tmp_path / "record", "stage_finished")[1]["guard"]
    assert noted == {**message, "rolled_back": False}


@pytest.mark.parametrize("method", ["ratp", "tent", "t3a"])
def test_judging_changes_no_bit(method, tmp_path):
    for guard in ("off", "record"):
        Run(make_plan(method, guard=guard, changes={}), tmp_path / guard).execute()
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(tmp_path / "off", name), tensors_of(tmp_path / "record", name))
    assert (tmp_path / "off" / "matrix.json").read_bytes() == (tmp_path / "record" / "matrix.json").read_bytes()
    assert all("guard" not in event for event in journal_of(tmp_path / "off"))
    assert [("guard" in event) for event in journal_of(tmp_path / "record", "stage_finished")] == [False, True, True]


@pytest.mark.parametrize("method", each_method())
def test_every_method_can_be_guarded(method, tmp_path):
    plan = make_plan(method, domains=("ink", bad_domain("noise")), changes=QUICK.get(method, {}))
    run = Run(plan, tmp_path / "run")
    states = [tensors_of(run.folder) for event in run.events() if isinstance(event, StageFinished)]
    assert same_tensors(states[0], states[1])
    verdict = journal_of(run.folder, "stage_finished")[1]["guard"]
    assert verdict["reasons"]
    assert verdict["rolled_back"] == (method != "source-only"), "where nothing was learned, there is nothing to undo"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pcl", "tent"])
def test_a_domain_that_is_known_in_part_raises_no_alarm(method, tmp_path):
    sizes = {"network.width": 0.1, "epochs": 2, "steps": 25, "lr": 0.05}
    order = "scan>photo"
    plan = resolve(RunRequest("demo", method, order, changes=sizes, subset=True, device="cpu", guard="act"))
    record = Run(plan, tmp_path / "run").execute()
    assert [event["guard"]["reasons"] for event in record.guarded] == [[]]
    assert all(event["guard"]["signs"]["source_before"] > 0.5 for event in record.guarded)


@pytest.mark.faults(FAULT, "if a run is killed before it writes the guard's verdict, it reaches the same one again")
def test_decision_is_repeated_after_a_kill(tmp_path, monkeypatch):
    plan = make_plan(domains=("ink", bad_domain("noise"), "fog"), changes={})
    Run(plan, tmp_path / "whole").execute()
    write = ratp.runs.states.write_tensors

    def die(path, *rest):
        if path.name == "state.safetensors" and path.exists():
            raise KeyboardInterrupt
        write(path, *rest)

    monkeypatch.setattr(ratp.runs.states, "write_tensors", die)
    with pytest.raises(KeyboardInterrupt):
        Run(plan, tmp_path / "cut").execute()
    monkeypatch.undo()
    Run(plan, tmp_path / "cut").execute()
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(tmp_path / "cut", name), tensors_of(tmp_path / "whole", name))
    message = [[e.get("guard") for e in journal_of(tmp_path / n, "stage_finished")] for n in ("cut", "whole")]
    assert message[0] == message[1]
    assert accuracy_of(tmp_path / "cut") == accuracy_of(tmp_path / "whole")


def test_a_decision_outlives_the_journal(tmp_path):
    plan = make_plan(domains=("ink", bad_domain("noise"), "fog"), changes={})
    events = Run(plan, tmp_path / "run").events()
    next(event for event in events if isinstance(event, StageFinished) and event.stage == 1)
    events.close()
    (tmp_path / "run" / "journal.jsonl").write_text("")
    Run(plan, tmp_path / "run").execute()
    assert [e["guard"]["rolled_back"] for e in journal_of(tmp_path / "run", "stage_finished")[1:]] == [True, False]


class TestPlan:
    def own(self, folder, **requested):
        for seed, name in enumerate(("day", "rain")):
            write_files(folder / name, image_files(seed=seed))
        requested = {"stream": str(folder), "order": "day>rain", "device": "cpu", "weights": "none", **requested}
        return resolve(RunRequest(changes={"network.backbone": "dtn"}, **requested))

    def test_it_acts_on_own_images_and_records_elsewhere(self, tmp_path):
        assert self.own(tmp_path).guard == "act"
        assert self.own(tmp_path, guard="off").guard == "off"
        assert resolve(RunRequest(device="cpu")).guard == "record"
        assert resolve(RunRequest(device="cpu", guard="act")).guard == "act"
        with pytest.raises(ConfigError, match="guard"):
            resolve(RunRequest(device="cpu", guard="maybe"))

    def test_only_a_guard_that_acts_is_part_of_what_a_run_is(self, tmp_path):
        plans = {mode: resolve(RunRequest(device="cpu", guard=mode)) for mode in ("off", "record", "act")}
        assert plans["off"].decisions() == plans["record"].decisions()
        assert "guard" not in plans["record"].decisions()
        assert plans["act"].decisions() == {**plans["record"].decisions(), "guard": "act"}
        assert plans["off"].digest() == plans["record"].digest() != plans["act"].digest()

    def test_folders_of_own_images_keep_their_names(self, tmp_path):
        usual, without = self.own(tmp_path), self.own(tmp_path, guard="off")
        before = {name: value for name, value in usual.decisions().items() if name != "guard"}
        text = json.dumps({**before, "weights": "none"}, sort_keys=True)
        assert usual.digest() == hashlib.sha256(text.encode()).hexdigest() != without.digest()

    def test_study_records_by_default_and_keeps_guarded_results_apart(self, tmp_path):
        self.own(tmp_path / "own")
        file = tmp_path / "study.toml"
        grid = f'[[grid]]\nstream = "{tmp_path / "own"}"\norders = ["day>rain"]\nmethods = ["source-only"]\n'
        file.write_text(grid + '[[grid]]\nstream = "demo"\nmethods = ["source-only"]\nguard = "act"\n')
        study = read_study(file, base=RunRequest(device="cpu", weights="none"))
        assert [entry.plan.guard for entry in study.entries] == ["record", "act"]
        unguarded = replace(study.entries[1].plan, guard="off")
        record = Run(replace(toy_plan("source-only"), guard="off"), tmp_path / "run").execute()
        results = {
            guard: replace(record, config=plan.decisions())
            for guard, plan in {"act": study.entries[1].plan, "off": unguarded}.items()
        }
        assert study.with_results([results["off"]]).entries[1].result is None
        assert study.with_results([results["act"]]).entries[1].result is not None

    def test_run_older_than_the_guard_resumes_without_it(self, tmp_path):
        unasked = make_plan(guard="act", changes={})
        unasked = replace(unasked, request=replace(unasked.request, guard="auto"))
        events = Run(replace(unasked, guard="record"), tmp_path / "run").events()
        next(event for event in events if isinstance(event, StageFinished))
        events.close()
        resumed = Run(unasked, tmp_path / "run")
        assert resumed.plan.guard == "record"
        assert resumed.execute().matrix.complete
        requested = replace(unasked, request=replace(unasked.request, guard="act"))
        with pytest.raises(RunDirectoryError, match="guard: off or record there, act requested"):
            Run(requested, tmp_path / "run").execute()

    def test_guarded_run_is_not_resumed_unguarded(self, tmp_path):
        Run(make_plan(guard="act", changes={}), tmp_path / "run").execute()
        with pytest.raises(RunDirectoryError, match="guard: act there, off or record requested"):
            Run(make_plan(guard="off", changes={}), tmp_path / "run").execute()


@pytest.fixture(scope="module")
def guarded_run(tmp_path_factory):
    """A run with a rolled-back stage, and its output."""
    folder, output = tmp_path_factory.mktemp("guarded") / "run", io.StringIO()
    plan = make_plan(domains=("ink", bad_domain("noise"), "fog"), changes={})
    follow(Run(plan, folder), Console(file=output, width=400), quiet=False)
    return read_run(folder), output.getvalue()


class TestTold:
    def test_rollback_message_says_what_why_and_what_to_do(self, guarded_run):
        lines = guarded_run[1].splitlines()
        (start,) = (place for place, line in enumerate(lines) if "rolled back" in line)
        (end,) = (place for place, line in enumerate(lines) if "learns from them anyway." in line)
        paragraph = lines[start : end + 1]
        assert "bad was rolled back: its images are noise or blank" in " ".join(map(str.strip, paragraph))
        assert "--guard off" in " ".join(map(str.strip, paragraph))
        assert all(line.startswith("  ") and len(line) <= 80 for line in paragraph)

    def test_reports_and_results_show_the_rollback(self, guarded_run, tmp_path):
        record, _ = guarded_run
        page = write_report([record], tmp_path).read_text()
        assert "Did every stage do good?" in page
        assert "<strong>bad</strong> was rolled back (shot" in page and "): its images are noise" in page
        printed = io.StringIO()
        print_report([record], Console(file=printed, width=300))
        assert "the guard rolled back bad: its images are noise" in printed.getvalue()
        record.export(tmp_path / "result.json")
        assert json.loads((tmp_path / "result.json").read_text())["journal"][1]["guard"]["rolled_back"] is True
        assert read_run(tmp_path / "result.json").rollbacks == record.rollbacks

    def test_unguarded_reports_do_not_mention_the_guard(self, tmp_path):
        record = Run(make_plan(guard="off", changes={}), tmp_path / "run").execute()
        assert "Did every stage do good?" not in write_report([record], tmp_path / "report").read_text()

    def test_quiet_still_reports_the_rollback(self, tmp_path):
        write_files(tmp_path / "day", image_files(count=8, seed=1))
        chance = np.random.default_rng(0)
        noise = (Image.fromarray(chance.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(30))
        write_files(tmp_path / "noise", {f"{k}.png": encode(picture, "PNG") for k, picture in enumerate(noise)})
        how = ["folders", "--source", tmp_path / "day", "--targets", tmp_path / "noise", *OPTIONS, "--quiet"]
        result = command("run", *how, "--out", tmp_path / "run")
        assert (result.code, result.out) == (0, "")
        assert "note: " in result.err and "the guard rolled back noise: its images are noise" in result.err

    def test_command_line_has_a_guard_option(self, tmp_path):
        write_files(tmp_path / "day", image_files(count=8, seed=1))
        write_files(tmp_path / "rain", image_files(count=8, seed=2))
        how = ["run", "folders", "--source", tmp_path / "day", "--targets", tmp_path / "rain", *OPTIONS, "--quiet"]
        assert command(*how, "--out", tmp_path / "a", "-m", "source-only").code == 0
        assert json.loads((tmp_path / "a" / "config.json").read_text())["guard"] == "act"
        assert command(*how, "--out", tmp_path / "b", "-m", "source-only", "--guard", "off").code == 0
        assert "guard" not in json.loads((tmp_path / "b" / "config.json").read_text())
