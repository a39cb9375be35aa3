"""A run gives what its plan says, writes it down whole, and cannot be disturbed: by probes, labels or death."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open

import ratp._core.files
import ratp.evaluation.accuracy as measures
from helpers import (
    QUICK,
    TINY,
    Outcome,
    accuracy_of,
    all_finite,
    domains_of,
    each_method,
    files_of,
    journal_of,
    same_tensors,
    tensors_of,
    tiny_plan,
    toy_domain,
    toy_domains,
    toy_method,
    toy_plan,
)
from helpers import ratp as ratp_command
from ratp import __version__
from ratp._core.environment import Randomness
from ratp.config import decisive
from ratp.data.domain import LabelledDomain
from ratp.errors import ConfigError, RatpError, RunDirectoryError, TrainingError
from ratp.evaluation.accuracy import accuracy
from ratp.methods import METHODS
from ratp.methods.shared.online import SMALLEST_BATCH, classify_by_batch
from ratp.runs.events import Probed, StageFinished, StageStarted, Trained
from ratp.runs.record import read_run
from ratp.runs.run import JournalWarning, Run
from ratp.training.phases import SupervisedPhase
from ratp.training.recipe import classify

DOMAINS = ("ink", "mud", "fog")
STAGES = len(DOMAINS)
STEPS = TINY["epochs"] * TINY["steps"]
# RaTP on toy domains hands out a start, its steps and an end for each stage.
EVENTS = STAGES * (STEPS + 2)

every_method = pytest.mark.parametrize("method", each_method())


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """A complete, undisturbed run on toy domains, by method, trained on first use."""

    class Folders(dict):
        def __missing__(self, method):
            self[method] = tmp_path_factory.mktemp("untouched") / method
            Run(toy_plan(method), self[method]).execute()
            return self[method]

    return Folders()


def assert_same_result(folder, other):
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(folder, name), tensors_of(other, name))
    assert (folder / "matrix.json").read_bytes() == (other / "matrix.json").read_bytes()


def assert_whole_journal(folder, method="ratp"):
    """Every epoch, start and end of a stage once, in order, as in a run that was never disturbed."""
    trained = [stage for stage in range(STAGES) if stage == 0 or method == "ratp"]
    epochs = [(e["stage"], e["epoch"]) for e in journal_of(folder, "epoch")]
    assert epochs == [(stage, epoch) for stage in trained for epoch in range(TINY["epochs"])]
    for kind in ("stage_started", "stage_finished"):
        assert [(e["stage"], e["domain"]) for e in journal_of(folder, kind)] == list(enumerate(DOMAINS))
    rows = [list(e["accuracy"].values()) for e in journal_of(folder, "stage_finished")]
    assert rows == accuracy_of(folder)
    assert len(journal_of(folder, "run_finished")) == 1


def epochs_of(run, stage):
    """Epochs of each phase of a stage."""
    if stage == 0:
        return [phase.epochs for phase in run.method.source_phases(run.stream.source)]
    if run.config["uses_target_labels"]:
        return [phase.epochs for phase in run.method.labelled_target_phases(run.stream.answers[stage - 1])]
    return [phase.epochs for phase in run.method.target_phases(run.stream.targets[stage - 1])]


def logits_of(network, images, run):
    """What a network says with the statistics the run's results were measured with."""
    if run.plan.method.evaluation_statistics(run.plan.config) == "running":
        return classify(network, images, run.method.scaling)
    generator = Randomness(run.plan.seed).generator("evaluation")
    return classify_by_batch(network, images, run.method.scaling, SMALLEST_BATCH, generator)


def stop_after(run, count):
    """Takes ``count`` events of a run, then abandons it as a crash would; returns them."""
    events = run.events()
    taken = [next(events) for _ in range(count)]
    events.close()
    return taken


@pytest.fixture(scope="module", params=each_method())
def run(request, tmp_path_factory):
    """A complete run on the embedded stream."""
    run = Run(tiny_plan(request.param), tmp_path_factory.mktemp("demo") / "run")
    run.execute()
    return run


@pytest.fixture(scope="module", params=each_method())
def probed(request, tmp_path_factory):
    """A complete run on toy domains that was measured meanwhile, and its events."""
    run = Run(toy_plan(request.param), tmp_path_factory.mktemp("probed") / "run", probe=True)
    return run, list(run.events())


class TestDirectory:
    """What a run on the embedded stream leaves on disk."""

    def test_run_folder_contents(self, run):
        files = {"config.json", "environment.json", "journal.jsonl", "matrix.json"}
        files |= {"state.safetensors", "weights.safetensors", "checksums.json", "examples.json"}
        files |= {f"details-{stage}.json" for stage in range(len(run.stream.order))}
        assert files_of(run.folder).keys() == files | (
            {"samples.safetensors"} if run.plan.method.name in ("arc", "ratp", "codag", "mpm") else set()
        )

    def test_config_lists_every_value(self, run):
        config = json.loads((run.folder / "config.json").read_text())
        assert config["recipe"] == decisive(run.plan.recipe)
        assert config["switches"] == decisive(run.plan.config)
        assert config["order"] == ["scan", "photo", "font", "street"]
        assert config["changed"] == TINY | QUICK.get(run.plan.method.name, {})
        expected = (
            config["method"],
            config["stream"],
            config["seed"],
            config["preset"],
            config["ratp"],
            config["schema"],
        )
        assert expected == (run.plan.method.name, "demo", 2022, "official", __version__, 1)
        assert config["data"] == {domain.name: domain.fingerprint() for domain in domains_of(run.plan)}
        assert len(config["fingerprint"]) == 64

    def test_the_environment_names_versions_and_device(self, run):
        environment = json.loads((run.folder / "environment.json").read_text())
        assert (environment["ratp"], environment["device"]) == (__version__, "cpu")
        assert environment["packages"]["torch"] == torch.__version__.split("+")[0]
        assert environment["threads"] == torch.get_num_threads()
        assert environment["determinism"] == "bitwise on one machine"

    def test_journal_has_a_line_per_epoch_and_stage(self, run):
        domains = ["scan", "photo", "font", "street"]
        kinds = [e["event"] for e in journal_of(run.folder)]
        assert kinds[0] == "run_started"
        assert kinds[-1] == "run_finished"
        assert [(e["domain"], e["epoch"]) for e in journal_of(run.folder, "epoch")] == [
            (d, e) for stage, d in enumerate(domains) for epochs in epochs_of(run, stage) for e in range(epochs)
        ]
        assert [e["domain"] for e in journal_of(run.folder, "stage_started")] == domains
        assert [e["domain"] for e in journal_of(run.folder, "stage_finished")] == domains
        assert not journal_of(run.folder, "probe")
        first = journal_of(run.folder, "epoch")[0]
        assert first["means"]["total"] > 0
        assert first["statistics"]["lr"] == run.plan.recipe.lr
        assert all(e["seconds"] >= 0 for e in journal_of(run.folder) if "seconds" in e)

    def test_matrix_has_a_row_per_stage_and_the_metrics(self, run):
        matrix = json.loads((run.folder / "matrix.json").read_text())
        assert matrix["domains"] == ["scan", "photo", "font", "street"]
        assert [len(row) for row in matrix["accuracy"]] == [4] * 4
        assert matrix["metrics"]["TDA"]["domains"]["font"] == matrix["accuracy"][2][2]
        assert matrix["metrics"]["TDG"]["domains"]["photo"] == matrix["accuracy"][0][1]
        assert matrix["metrics"]["FA"]["domains"]["font"] == matrix["accuracy"][3][2]

    def test_the_weights_are_the_network_of_the_state(self, run):
        weights = tensors_of(run.folder, "weights")
        state = tensors_of(run.folder)
        assert all_finite(state)
        assert same_tensors(weights, {n[8:]: t for n, t in state.items() if n.startswith("network.")})
        with safe_open(run.folder / "weights.safetensors", framework="pt") as file:
            about = " ".join(file.metadata().values()).replace("\\", "")  # JSON within JSON or not
        assert json.dumps(list("0123456789")) in about
        assert json.loads((run.folder / "config.json").read_text())["fingerprint"] in about

    def test_the_weights_alone_give_the_last_row_of_the_matrix(self, run):
        if run.plan.method.name in ("rmt", "roid"):
            pytest.skip("the teacher predicts too, or the prior of a batch")
        network = run.plan.build_method(run.stream).network  # some methods add layers of their own
        network.load_state_dict(tensors_of(run.folder, "weights"))
        for test, expected in zip(run.stream.tests, accuracy_of(run.folder)[-1], strict=True):
            predicted = logits_of(network, test.images, run).argmax(dim=1)
            assert 100 * float((predicted == test.labels).double().mean()) == pytest.approx(expected, abs=1e-9)

    def test_samples_hold_images_and_their_copies(self, run):
        if run.plan.method.name != "ratp":
            pytest.skip("only methods that augment keep samples")
        samples = tensors_of(run.folder, "samples")
        originals, source = samples.pop("original"), run.stream.source.images
        assert torch.equal(originals[[0, -1]], source[[0, -1]])  # folders come class by class: not the first alone
        assert len(samples) == 3
        assert all(t.shape == (10, 3, 32, 32) and t.dtype == torch.uint8 for t in samples.values())

    def test_round_trip(self, run):
        record = read_run(run.folder)
        assert record == run.record()
        assert record.matrix == run.matrix
        assert record.matrix.complete


class TestMeasuring:
    """A stage is measured on all domains, unless the model is known to be the one before."""

    def measured(self, plan, folder, monkeypatch):
        """The names of the domains as they were measured."""
        seen = []
        real = measures._percent_correct
        monkeypatch.setattr(
            measures,
            "_percent_correct",
            lambda logits, test, giver: seen.append(test.name) or real(logits, test, giver),
        )
        run = Run(plan, folder)
        run.execute()
        return run, seen

    def test_source_only_is_measured_once(self, tmp_path, monkeypatch):
        run, seen = self.measured(toy_plan("source-only"), tmp_path / "run", monkeypatch)
        assert seen == [*DOMAINS]
        again = [accuracy(run.method, test) for test in run.stream.tests]
        assert accuracy_of(run.folder) == [again] * STAGES

    @pytest.mark.parametrize("method", ["adabn", "t3a"])
    def test_methods_that_learn_from_targets_are_measured_every_stage(self, method, tmp_path, monkeypatch):
        _, seen = self.measured(toy_plan(method), tmp_path / "run", monkeypatch)
        assert seen == [*DOMAINS] * STAGES

    def test_subclass_of_source_only_is_measured_every_stage(self, tmp_path, monkeypatch):
        plan = toy_plan("source-only")
        mine = replace(plan, method=type("Mine", (plan.method,), {"name": "mine"}))
        _, seen = self.measured(mine, tmp_path / "run", monkeypatch)
        assert seen == [*DOMAINS] * STAGES

    def test_only_methods_without_phases_on_targets_say_so(self):
        assert [name for name, method in METHODS.items() if method.ignores_targets] == ["source-only"]


class TestSeeds:
    @every_method
    def test_the_same_seed_gives_the_same_bits(self, untouched, method, tmp_path):
        torch.manual_seed(99)  # what the program around a run draws from torch is no concern of the run
        before = torch.random.get_rng_state()
        Run(toy_plan(method), tmp_path / "run").execute()
        assert_same_result(tmp_path / "run", untouched[method])
        assert torch.equal(torch.random.get_rng_state(), before)

    @every_method
    def test_another_seed_gives_other_weights(self, untouched, method, tmp_path):
        Run(toy_plan(method, seed=2023), tmp_path / "run").execute()
        mine, theirs = tensors_of(tmp_path / "run", "weights"), tensors_of(untouched[method], "weights")
        assert not any(
            torch.equal(mine[name], theirs[name]) for name in mine if name.endswith("weight") and mine[name].ndim > 1
        )


class TestProbe:
    def test_probing_changes_no_bit(self, probed, untouched):
        run, _ = probed
        assert_same_result(run.folder, untouched[run.plan.method.name])

    def test_probes_before_during_and_after_a_stage(self, probed):
        run, _ = probed
        for stage, name in enumerate(DOMAINS):
            progress = [e["progress"] for e in journal_of(run.folder, "probe") if e["stage"] == stage]
            epochs = sum(epochs_of(run, stage)) or 1
            assert progress == [epoch / epochs for epoch in range(epochs + 1)]
            assert {e["domain"] for e in journal_of(run.folder, "probe") if e["stage"] == stage} == {name}

    def test_probe_curve_starts_and_ends_at_the_matrix(self, probed):
        run, _ = probed
        accuracy = accuracy_of(run.folder)
        for stage, name in enumerate(DOMAINS):
            curve = [e["accuracy"][name] for e in journal_of(run.folder, "probe") if e["stage"] == stage]
            assert curve[-1] == accuracy[stage][stage]
            if stage:
                assert curve[0] == accuracy[stage - 1][stage]

    def test_probe_events_equal_written_ones(self, probed):
        run, events = probed
        written = [(e["stage"], e["progress"], e["accuracy"]) for e in journal_of(run.folder, "probe")]
        assert [(e.stage, e.progress, e.accuracy) for e in events if isinstance(e, Probed)] == written

    def test_probe_is_journalled_once_after_resume(self, probed, tmp_path):
        run, events = probed
        stop_after(Run(run.plan, tmp_path / "run", probe=True), len(events) - 2)
        Run(run.plan, tmp_path / "run", probe=True).execute()
        assert [e["accuracy"] for e in journal_of(tmp_path / "run", "probe")] == [
            e["accuracy"] for e in journal_of(run.folder, "probe")
        ]


class TestEvents:
    def test_events_are_complete(self, tmp_path):
        run = Run(toy_plan(), tmp_path / "run")
        events = list(run.events())
        assert len(events) == EVENTS
        for stage, name in enumerate(DOMAINS):
            start, *steps, end = events[stage * (STEPS + 2) : (stage + 1) * (STEPS + 2)]
            assert isinstance(start, StageStarted)
            assert (start.stage, start.domain, start.steps) == (stage, name, STEPS)
            assert start.images == len(run.stream.source if stage == 0 else run.stream.targets[stage - 1])
            assert all(isinstance(step, Trained) and step.stage == stage for step in steps)
            assert [(s.tick.epoch, s.tick.step, s.tick.epoch_done) for s in steps] == [
                (0, 1, False), (0, 2, True), (1, 1, False), (1, 2, True),
            ]  # fmt: skip
            assert isinstance(end, StageFinished)
            assert dict(end.accuracy) == dict(zip(DOMAINS, accuracy_of(run.folder)[stage], strict=True))

    def test_means_are_over_the_epoch_so_far(self, tmp_path, monkeypatch):
        losses, real = [], SupervisedPhase.step

        def noted(phase):
            result = real(phase)
            losses.append(result["total"].item())
            return result

        monkeypatch.setattr(SupervisedPhase, "step", noted)
        run = Run(toy_plan("source-only", changes={"steps": 3, "epochs": 1}), tmp_path / "run")
        seen = [float(e.tick.means["total"]) for e in run.events() if isinstance(e, Trained)]
        assert seen == pytest.approx([sum(losses[: i + 1]) / (i + 1) for i in range(3)], rel=1e-6)


class TestInterrupted:
    """However a run stops, the same plan on the same folder ends like an undisturbed run."""

    @pytest.mark.parametrize("count", range(EVENTS + 1))
    def test_stopped_after_any_event(self, untouched, count, tmp_path):
        folder = tmp_path / "run"
        taken = stop_after(Run(toy_plan(), folder), count)
        finished = sum(isinstance(e, StageFinished) for e in taken)

        continued = list(Run(toy_plan(), folder).events())
        assert {e.stage for e in continued if isinstance(e, StageStarted)} == set(range(finished, STAGES))
        assert sum(isinstance(e, Trained) for e in [*taken, *continued]) == STAGES * STEPS  # no step runs twice
        assert_same_result(folder, untouched["ratp"])
        assert_whole_journal(folder)

    @pytest.mark.parametrize("count", [1, 3, STEPS + 1, STEPS + 2, STEPS + 3, STEPS + 4])
    def test_stopped_without_training_on_targets(self, untouched, count, tmp_path):
        stop_after(Run(toy_plan("source-only"), tmp_path / "run"), count)
        Run(toy_plan("source-only"), tmp_path / "run").execute()
        assert_same_result(tmp_path / "run", untouched["source-only"])
        assert_whole_journal(tmp_path / "run", "source-only")

    def test_stopped_repeatedly(self, untouched, tmp_path):
        folder = tmp_path / "run"
        for count in (3, STEPS + 2, 2, STEPS + 4, 1):
            stop_after(Run(toy_plan(), folder), count)
        Run(toy_plan(), folder).execute()
        assert_same_result(folder, untouched["ratp"])
        assert_whole_journal(folder)
        resumed = [e["finished_stages"] for e in journal_of(folder, "run_resumed")]
        assert resumed == sorted(resumed) and resumed[-1] == 2

    @pytest.mark.parametrize("stage", range(STAGES))
    @pytest.mark.parametrize("cut", ["whole line", "half a line"])
    def test_state_is_ahead_of_matrix_and_journal(self, untouched, stage, cut, tmp_path):
        """The moment after the state was replaced, before anything else was."""
        folder = tmp_path / "run"
        events = Run(toy_plan(), folder).events()
        for _ in range(stage * (STEPS + 2) + 1):
            next(events)
        old_matrix = (folder / "matrix.json").read_bytes()
        for _ in range(STEPS + 1):
            next(events)
        events.close()
        lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
        assert json.loads(lines[-1])["event"] == "stage_finished"
        torn = "".join(lines[:-1]) + (lines[-1][: len(lines[-1]) // 2] if cut == "half a line" else "")
        (folder / "journal.jsonl").write_text(torn)
        (folder / "matrix.json").write_bytes(old_matrix)

        continued = list(Run(toy_plan(), folder).events())
        assert sum(isinstance(e, Trained) for e in continued) == (STAGES - stage - 1) * STEPS
        assert_same_result(folder, untouched["ratp"])
        assert_whole_journal(folder)

    @pytest.mark.parametrize("content", [None, "broken\n{}\n", '{"event": "epoch", "stage": "two"}\n{}\n'])
    def test_lost_journal_is_restarted(self, untouched, content, tmp_path):
        folder = tmp_path / "run"
        stop_after(Run(toy_plan(), folder), STEPS + 4)  # in the second stage
        (folder / "journal.jsonl").unlink() if content is None else (folder / "journal.jsonl").write_text(content)
        with pytest.warns(JournalWarning, match=r"journal\.jsonl.* new journal"):
            Run(toy_plan(), folder).execute()
        assert_same_result(folder, untouched["ratp"])
        assert [e["stage"] for e in journal_of(folder, "stage_finished")] == list(range(STAGES))
        assert len(journal_of(folder, "journal_lost")) == 1

    def test_stopped_before_the_weights_were_written(self, untouched, tmp_path):
        shutil.copytree(untouched["ratp"], tmp_path / "run")
        (tmp_path / "run" / "weights.safetensors").unlink()
        assert list(Run(toy_plan(), tmp_path / "run").events()) == []
        assert_same_result(tmp_path / "run", untouched["ratp"])

    def test_stopped_before_the_end_was_recorded(self, untouched, tmp_path):
        shutil.copytree(untouched["ratp"], tmp_path / "run")
        journal = tmp_path / "run" / "journal.jsonl"
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join(lines[:-1]))
        for _ in range(2):
            assert list(Run(toy_plan(), tmp_path / "run").events()) == []
        assert [event["event"] for event in journal_of(tmp_path / "run")][-2:] == ["stage_finished", "run_finished"]

    @pytest.mark.parametrize("leftover", [False, True], ids=["between files", "within a file"])
    @pytest.mark.parametrize("write", range(5 + 2 * STAGES + 1))
    def test_killed_at_any_write(self, untouched, write, leftover, tmp_path, monkeypatch):
        """Each file in turn is about to be replaced; nothing cleans up after a killed process."""
        folder = tmp_path / "run"
        real_write, real_temporary, written, temporary = ratp._core.files.write_bytes, ratp._core.files.new_file, [], []

        class Killed(BaseException):
            pass

        def dying(path, data):
            if len(written) < write:
                written.append(path.name)
                return real_write(path, data)
            if leftover:
                with patch.object(Path, "replace", side_effect=Killed):
                    real_write(path, data)
            raise Killed

        def noted(*place):
            handle, path = real_temporary(*place)
            temporary.append(path)
            return handle, path

        with monkeypatch.context() as during:
            during.setattr(ratp._core.files, "write_bytes", dying)
            during.setattr(ratp._core.files, "new_file", noted)
            with pytest.raises(Killed):
                Run(toy_plan(), folder).execute()
        if leftover:
            temporary[-1].write_bytes(b"half a file")
        Run(toy_plan(), folder).execute()
        assert_same_result(folder, untouched["ratp"])
        assert_whole_journal(folder)
        assert files_of(folder).keys() == files_of(untouched["ratp"]).keys()

    @pytest.mark.parametrize("count", [1, 3, STEPS + 1, STEPS + 2, STEPS + 4])
    def test_same_run_object_resumes(self, untouched, count, tmp_path):
        """As in a notebook: interrupted, then executed once more."""
        run = Run(toy_plan(), tmp_path / "run")
        stop_after(run, count)
        run.execute()
        assert_same_result(run.folder, untouched["ratp"])
        assert_whole_journal(run.folder)

    @pytest.mark.slow
    def test_killed_for_good_in_the_middle_of_a_stage(self, tmp_path):
        """A real process, a real signal 9, the same command again."""
        sizes = [word for name, value in {**TINY, "epochs": 20}.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-c", "from ratp.cli.main import main; main()", "run", "--quiet", "--device", "cpu"]
        command += ["--out", str(tmp_path / "run"), "--order", "scan,photo", "--subset", *sizes]
        journal = tmp_path / "run" / "journal.jsonl"
        with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
            deadline = time.monotonic() + 60
            while not (journal.exists() and '"stage": 1, "domain": "photo", "phase"' in journal.read_text()):
                assert process.poll() is None, "the run ended before it could be killed"
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert len(accuracy_of(tmp_path / "run")) == 1
        interrupted = journal_of(tmp_path / "run", "epoch")
        assert 20 < len(interrupted) < 40

        assert ratp_command(*command[3:]) == Outcome(0, "", "")
        plan = replace(tiny_plan(changes={"epochs": 20}), order=("scan", "photo"))
        Run(plan, tmp_path / "untouched").execute()
        assert_same_result(tmp_path / "run", tmp_path / "untouched")
        assert len(journal_of(tmp_path / "run", "epoch")) == 40
        assert journal_of(tmp_path / "run", "epoch")[:20] == interrupted[:20]


class TestComplete:
    @every_method
    def test_complete_run_trains_and_changes_nothing(self, untouched, method, tmp_path):
        folder = tmp_path / "run"
        shutil.copytree(untouched[method], folder)
        before = files_of(folder)
        run = Run(toy_plan(method), folder)
        assert list(run.events()) == []
        assert files_of(folder) == before
        assert run.matrix.complete

    def test_weight_files_are_byte_identical(self, untouched, tmp_path):
        """So that two runs can be compared by checksum."""
        folder = tmp_path / "run"
        shutil.copytree(untouched["source-only"], folder)
        seen = set()
        for _ in range(12):
            (folder / "weights.safetensors").unlink()
            Run(toy_plan("source-only"), folder).execute()
            seen.add((folder / "weights.safetensors").read_bytes())
        assert len(seen) == 1

    def test_method_of_complete_run_is_usable(self, untouched):
        run = Run(toy_plan(), untouched["ratp"])
        run.execute()
        assert same_tensors(run.method.state(), tensors_of(untouched["ratp"]))


class TestFirewall:
    """Target labels reach nothing but the evaluator, and methods that say so."""

    @pytest.mark.parametrize("method", each_method(without=["oracle"]))
    def test_scrambled_target_labels_give_the_same_bits(self, untouched, method, tmp_path):
        source, *targets = toy_domains()
        scrambled = [replace(t, labels=(t.labels + 1 + torch.arange(len(t)) % 3) % 4) for t in targets]
        assert all(not (s.labels == t.labels).any() for s, t in zip(scrambled, targets, strict=True))
        Run(toy_plan(method, [source, *scrambled]), tmp_path / "run").execute()
        assert same_tensors(tensors_of(tmp_path / "run"), tensors_of(untouched[method]))
        assert same_tensors(tensors_of(tmp_path / "run", "weights"), tensors_of(untouched[method], "weights"))

    def test_scrambled_source_labels_do_not(self, untouched, tmp_path):
        """The control: a stream whose labels are never read would pass the test above."""
        source, *targets = toy_domains()
        scrambled = replace(source, labels=(source.labels + 1) % 4)
        Run(toy_plan("ratp", [scrambled, *targets]), tmp_path / "run").execute()
        assert not same_tensors(tensors_of(tmp_path / "run"), tensors_of(untouched["ratp"]))

    @pytest.mark.parametrize(("method", "changes"), [("oracle", {}), ("ratp", {"labelling": "truth"})], ids=str)
    def test_oracle_is_marked_and_depends_on_target_labels(self, method, changes, tmp_path):
        source, *targets = toy_domains()
        scrambled = [replace(t, labels=(t.labels + 1) % 4) for t in targets]
        for name, domains in (("true", [source, *targets]), ("scrambled", [source, *scrambled])):
            Run(toy_plan(method, domains, changes=changes), tmp_path / name).execute()
        assert not same_tensors(tensors_of(tmp_path / "true"), tensors_of(tmp_path / "scrambled"))
        record = read_run(tmp_path / "true")
        assert record.config["uses_target_labels"] is True
        assert "knows target labels" in record.label

    @pytest.mark.parametrize("method", each_method(without=["oracle"]))
    def test_only_oracles_get_target_labels(self, untouched, method):
        assert read_run(untouched[method]).config["uses_target_labels"] is False
        built, _, targets = toy_method(toy_plan(method))
        with pytest.raises(RatpError, match="must not see the labels of 'mud'"):
            built.labelled_target_phases(targets[0])

    def test_unlabelled_targets_have_no_labels_to_give(self):
        source, target, last = toy_domains()
        with pytest.raises(ConfigError, match="oracle needs the labels of all targets; mud has none"):
            Run(toy_plan("oracle", [source, target.unlabelled(), last]), Path("nowhere"))
        assert not Path("nowhere").exists()

    def test_test_images_of_targets_are_not_trained_on(self, tmp_path):
        source, target = toy_domain("ink"), toy_domain("mud", 40, held_out=12)
        other = target.images.clone()
        other[-12:] = 255 - other[-12:]
        for name, images in (("a", target.images), ("b", other)):
            Run(toy_plan("ratp", [source, replace(target, images=images)]), tmp_path / name).execute()
        assert same_tensors(tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b"))

    @every_method
    def test_types_are_checked(self, method):
        run = Run(toy_plan(method), "unused")
        labelled = domains_of(run.plan)[1]
        assert isinstance(labelled, LabelledDomain)
        with pytest.raises(TypeError, match="UnlabelledDomain"):
            run.method.adapt(labelled)
        with pytest.raises(TypeError, match="LabelledDomain"):
            run.method.fit_source(labelled.unlabelled())

    @every_method
    def test_a_source_comes_first(self, method):
        run = Run(toy_plan(method), "unused")
        with pytest.raises(RatpError, match=f"^{re.escape(method)} has learnt nothing yet to adapt to 'mud'"):
            run.method.adapt(run.stream.targets[0])

    def test_state_requires_a_source(self):
        fitted, loaded = (Run(toy_plan("tent"), "unused") for _ in range(2))
        fitted.method.fit_source(fitted.stream.source)
        loaded.method.load_state(fitted.method.state())
        for run in (fitted, loaded):
            run.method.adapt(run.stream.targets[0])
        assert same_tensors(fitted.method.state(), loaded.method.state())

    @every_method
    def test_state_is_restored_after_further_training(self, method):
        run = Run(toy_plan(method), "unused")
        given = {name: tensor.clone() for name, tensor in run.method.state().items()}
        run.method.fit_source(run.stream.source)
        if not METHODS[method].uses_target_labels(run.plan.config):
            run.method.adapt(run.stream.targets[0])
        assert not same_tensors(run.method.state(), given)
        run.method.load_state(given)
        assert same_tensors(run.method.state(), given)

    def test_target_cannot_hold_labels(self):
        target = Run(toy_plan("source-only"), "unused").stream.targets[0]
        assert set(vars(target)) == {"name", "images", "manifest"}
        with pytest.raises(AttributeError):
            target.labels = torch.zeros(len(target))
        assert not hasattr(target, "labels")


class TestFolder:
    def test_nothing_is_written_before_the_run_starts(self, tmp_path):
        run = Run(toy_plan(), tmp_path / "run")
        run.events()
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("name", [".git", ".gitignore", ".config.json.swp"])
    def test_hidden_foreign_files_count_as_foreign(self, name, tmp_path):
        (tmp_path / name).write_text("mine")
        with pytest.raises(RunDirectoryError, match="holds other files"):
            Run(toy_plan("source-only"), tmp_path).execute()
        assert files_of(tmp_path) == {name: b"mine"}

    def test_parent_folders_are_created(self, tmp_path):
        stop_after(Run(toy_plan("source-only"), str(tmp_path / "画像" / "naïve ü" / "run")), 1)
        assert (tmp_path / "画像" / "naïve ü" / "run" / "config.json").is_file()

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"changes": {"lr": 0.5}}, "lr: 0.05 there, 0.5 requested"),
            ({"changes": {"r_con": 1, "batch": 4}}, "batch: 8 there, 4 requested; r_con: 0.8 there, 1.0 requested"),
            ({"seed": 1}, "seed: 2022 there, 1 requested"),
            ({"method": "source-only"}, "method: ratp there, source-only requested"),
            ({"domains": toy_domains(ink=40, fog=36, mud=32)}, "order: ink>mud>fog there, ink>fog>mud requested"),
            ({"domains": toy_domains(ink=40, mud=32, fog=35)}, "images have changed since"),
        ],
        ids=["recipe", "switch", "seed", "method", "order", "images"],
    )  # fmt: skip
    @pytest.mark.faults(19, "ratp refuses a folder that contains another run and lists the differences")
    def test_another_run_is_refused_with_the_differences(self, untouched, changes, expected, tmp_path):
        folder = tmp_path / "run"
        shutil.copytree(untouched["ratp"], folder)
        before = files_of(folder)
        with pytest.raises(RunDirectoryError) as caught:
            Run(toy_plan(**changes), folder).execute()
        assert expected in str(caught.value)
        assert "--out" in str(caught.value)
        assert files_of(folder) == before

    def test_a_state_of_another_run_is_refused(self, untouched, tmp_path):
        shutil.copytree(untouched["ratp"], tmp_path / "run")
        Run(toy_plan(seed=5), tmp_path / "other").execute()
        shutil.copy(tmp_path / "other" / "state.safetensors", tmp_path / "run")
        with pytest.raises(RunDirectoryError, match="belongs to another run"):
            Run(toy_plan(), tmp_path / "run").execute()


class TestNotANumber:
    @pytest.mark.faults(14, "if a loss is NaN, the run stops and keeps the earlier stages")
    def test_non_finite_loss_fails_the_stage_and_keeps_earlier_ones(self, tmp_path):
        run = Run(toy_plan(), tmp_path / "run")
        events = run.events()
        for event in events:
            if isinstance(event, StageFinished):
                break
        kept = files_of(run.folder)
        with torch.no_grad():
            run.method.network.classifier.weight.fill_(float("nan"))
        with pytest.raises(TrainingError, match=r"in epoch 0 of stage 1 \(mud\).*--set lr"):
            list(events)
        assert files_of(run.folder)["state.safetensors"] == kept["state.safetensors"]
        assert files_of(run.folder)["matrix.json"] == kept["matrix.json"]

    @pytest.mark.faults(14, "a run that stopped because of NaN can continue once the cause is removed")
    def test_run_resumes_after_non_finite_loss(self, untouched, tmp_path):
        run = Run(toy_plan(), tmp_path / "run")
        events = run.events()
        for _ in range(STEPS + 2):
            next(events)
        with torch.no_grad():
            run.method.network.classifier.weight.fill_(float("nan"))
        with pytest.raises(TrainingError):
            list(events)
        Run(toy_plan(), tmp_path / "run").execute()
        assert_same_result(tmp_path / "run", untouched["ratp"])

    @every_method
    def test_ruinous_last_step_is_detected(self, method, tmp_path):
        """The loss was a number before the step; nothing of the network is after it."""
        plan = toy_plan(method, toy_domains(ink=40, mud=32), changes={"epochs": 1, "steps": 1, "lr": 1e38})
        with pytest.raises(TrainingError):
            Run(plan, tmp_path / "run").execute()
        assert not (tmp_path / "run" / "state.safetensors").exists()
