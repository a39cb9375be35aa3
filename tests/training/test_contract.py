"""Mistakes in a user's own method are reported early and readably, and the checks change no result."""

from __future__ import annotations

import random
from contextlib import closing

import numpy as np
import pytest
import torch

from helpers import TINY_OPTIONS, journal_of, ratp, same_tensors, tensors_of, toy_method, toy_plan
from ratp.errors import RatpError
from ratp.evaluation.accuracy import accuracy
from ratp.methods.rehearsal import ChanceWarning, check_kept
from ratp.runs import run as run_module
from ratp.runs import stage_runner as attempts
from ratp.runs.run import Run
from ratp.training.phase import ContractError

TEXT = """
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ratp import Method, Phase, classify, pack, unpack
from ratp.functional.optim import SGDConfig, StageSGD


@dataclass(frozen=True)
class MineConfig:
    pass


class Mine(Method):
    name, title, family, paper, config_type = "mine", "Mine", "own", "none", MineConfig

    def __init__(self, setting, config):
        self.setting, self.scaling, self.stage = setting, setting.scaling(), 0
        self.network = setting.network()
        self.teacher = self.network.frozen_copy()

    def source_phases(self, domain):
        return [Learn(self, domain.images, domain.labels)]

    def target_phases(self, domain):
        return [Learn(self, domain.images, None)]

    def predict(self, images):
        return classify(self.teacher, images, self.scaling)

    def state(self):
        networks = {"network": self.network.state_dict(), "teacher": self.teacher.state_dict()}
        return pack({**networks, "progress": {"stage": torch.tensor(self.stage)}})

    def load_state(self, state):
        parts = unpack(state)
        self.network.load_state_dict(parts["network"])
        self.stage = int(parts["progress"]["stage"])
        self.teacher.load_state_dict(parts["teacher"])


class Learn(Phase):
    name = "learn"
    saved = "batches optimiser labels"

    def __init__(self, method, images, labels):
        self.method, self.images, self.labels = method, images, labels
        self.epochs, self.steps = 2, 2
        self.batches = method.setting.generator("batches", method.stage)
        self.optimiser = StageSGD(method.network.parameters(), 0.01, self.epochs, SGDConfig())

    def begin_epoch(self, epoch):
        if self.labels is None:
            self.labels = self.method.predict(self.images).argmax(dim=1)
        return {"lr": self.optimiser.begin_epoch(epoch)}

    def step(self):
        index = torch.randint(len(self.images), (8,), generator=self.batches)
        logits = self.method.network.train()(self.method.scaling(self.images[index])).logits
        loss = F.cross_entropy(F.dropout(logits, 0.1), self.labels[index])
        self.optimiser.minimise(loss)
        return {"total": loss}

    def finish(self):
        for slow, quick in zip(self.method.teacher.parameters(), self.method.network.parameters()):
            slow.data.lerp_(quick.data, 0.5)
        self.method.stage += 1
        return {"stage": self.method.stage}
"""
SOURCE = "return [Learn(self, domain.images, domain.labels)]"
TARGET = "return [Learn(self, domain.images, None)]"
PREDICT = "return classify(self.teacher, images, self.scaling)"
LENGTH = "self.epochs, self.steps = 2, 2"
BEGUN = 'return {"lr": self.optimiser.begin_epoch(epoch)}'
FINISHED = 'return {"stage": self.method.stage}'
STATE = 'return pack({**networks, "progress": {"stage": torch.tensor(self.stage)}})'
TEACHER_SAVED = ', "teacher": self.teacher.state_dict()'
TEACHER_TAKEN = 'self.teacher.load_state_dict(parts["teacher"])'
WITHOUT_TEACHER = (TEACHER_SAVED, ""), (TEACHER_TAKEN, "pass")
NUMBERS = "of the phase 'learn' must return the numbers to record by name, e.g. {'lr': 0.1}, or {}; "
PHASES = " of mine must return a list of phases, [] if there is nothing to do; got "
STEPS = "source_phases of mine: the phase Learn needs steps, a whole number from 0; got "
SCORES = "predict of mine must return a score for every image and class, floating-point of shape (32, 4); got "
TENSORS = "state of mine must return tensors by name; "
LEAVES = "self.method.stage += 1; self.method.left = [self.method.stage]"
LATE = (
    ("torch.tensor(self.stage)", "torch.tensor(self.stage), 'late': self.late"),
    ("self.method.stage += 1", "self.method.stage += 1; self.method.late = torch.ones(())"),
)


@pytest.fixture
def mine(tmp_path):
    """The method as a file, with some of its text exchanged."""

    def write(*changes):
        text = TEXT
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write


def error_of(file, folder):
    """Returns the error message of a method whose run is refused."""
    with pytest.raises(RatpError) as caught:
        Run(toy_plan(file), folder).execute()
    return str(caught.value)


def test_correct_method_runs_to_its_end(mine, tmp_path):
    assert Run(toy_plan(mine()), tmp_path / "run").execute().matrix.complete
    assert [event["statistics"]["stage"] for event in journal_of(tmp_path / "run", "stage_finished")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (SOURCE, "pass", f"source_phases{PHASES}None."),
        (
            SOURCE,
            "yield Learn(self, domain.images, domain.labels)",
            f"source_phases{PHASES}an object of type generator.",
        ),
        (SOURCE, "return [Learn]", f"source_phases{PHASES}one that holds the class Learn."),
        (TARGET, "pass", f"target_phases{PHASES}None."),
        (TARGET, "return Learn(self, domain.images, None)", f"target_phases{PHASES}an object of type Learn."),
        (TARGET, "return ['learn']", f"target_phases{PHASES}one that holds 'learn'."),
        (LENGTH, "self.epochs = 2", f"{STEPS}None."),
        (LENGTH, "self.epochs, self.steps = 2, 7 / 2", f"{STEPS}3.5."),
        (LENGTH, "self.epochs, self.steps = 2, -1", f"{STEPS}-1."),
        (LENGTH, "self.epochs, self.steps = 2, True", f"{STEPS}True."),
        (
            "self.optimiser = Stage",
            "self.epochs = '2'; self.optimiser = Stage",
            STEPS.replace("steps", "epochs") + "'2'.",
        ),
        ('name = "learn"', "", "source_phases of mine: the phase Learn needs a name, a text."),
        (PREDICT, PREDICT.removeprefix("return "), f"{SCORES}None."),
        (PREDICT, f"{PREDICT}[1:]", f"{SCORES}float32 of shape (31, 4)."),
        (PREDICT, f"{PREDICT}[:, :3]", f"{SCORES}float32 of shape (32, 3)."),
        (PREDICT, f"{PREDICT}.argsort(dim=1)", f"{SCORES}int64 of shape (32, 4)."),
        (
            PREDICT,
            f"{PREDICT}.argmax(dim=1)",
            f"{SCORES}int64 of shape (32,). Return the scores, not the best class.",
        ),
        (STATE, STATE.removeprefix("return "), f"{TENSORS}got None."),
        (STATE, "return networks", f"{TENSORS}'network' is an object of type OrderedDict. pack({{…}}) joins parts."),
        (STATE, "return {3: torch.ones(())}", f"{TENSORS}the name 3 is not a text."),
        (
            "torch.tensor(self.stage)",
            "self.stage",
            f"{TENSORS}'progress.stage' is 0. torch.tensor(…) makes one of numbers.",
        ),
        (
            "torch.tensor(self.stage)",
            "[self.stage]",
            f"{TENSORS}'progress.stage' is an object of type list. torch.tensor(…) makes one of numbers.",
        ),
    ],
)
def test_mistake_is_reported_before_training_or_writing(mine, tmp_path, old, new, expected):
    assert error_of(mine((old, new)), tmp_path / "run") == expected
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (BEGUN, "pass", f"begin_epoch {NUMBERS}got None."),
        (BEGUN, "return {'lr': 'high'}", f"begin_epoch {NUMBERS}'lr' is 'high'."),
        (BEGUN, "return {1: 2.0}", f"begin_epoch {NUMBERS}1 is 2.0"),
        (FINISHED, "pass", f"finish {NUMBERS}got None."),
        (FINISHED, "return {'end': 'good'}", f"finish {NUMBERS}'end' is 'good'."),
        (FINISHED, "return {'end': torch.ones(())}", f"finish {NUMBERS}'end' is tensor(1.); write float(…), or leave"),
    ],
)
def test_recorded_values_must_be_numbers(mine, tmp_path, old, new, expected):
    assert error_of(mine((old, new)), tmp_path / "run").startswith(expected)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            PREDICT,
            f"{PREDICT}.argmax(dim=1) if self.stage > 1 else {PREDICT.removeprefix('return ')}",
            f"{SCORES}int64",
        ),
        ("torch.tensor(self.stage)", "torch.tensor(self.stage) if self.stage < 2 else 2", f"{TENSORS}'progress.stage'"),
        (TARGET, f"{TARGET} if domain.name == 'rehearsal' else 3", f"target_phases{PHASES}3."),
    ],
)
def test_later_mistake_is_reported_when_it_occurs(mine, tmp_path, old, new, expected):
    assert error_of(mine((old, new)), tmp_path / "run").startswith(expected)
    assert len(journal_of(tmp_path / "run", "stage_finished")) == 1


def test_checks_that_need_training_run_after_it(mine, tmp_path):
    """A method may refuse to predict and to adapt as long as it has learnt nothing."""
    unready = "assert self.stage; "
    ready = [(old, unready + old) for old in (PREDICT, TARGET)]
    assert Run(toy_plan(mine(*ready)), tmp_path / "ready").execute().matrix.complete
    wrong = (PREDICT, f"{unready}{PREDICT}[:, :3]")
    assert error_of(mine(wrong), tmp_path / "wrong") == f"{SCORES}float32 of shape (32, 3)."


@pytest.mark.parametrize(
    "changes",
    [
        [("torch.tensor(self.stage)", "torch.tensor(self.stage) if self.stage else None")],
        [("torch.tensor(self.stage)", "torch.tensor(self.left[0])"), ("self.method.stage += 1", LEAVES)],
        [("self.network = setting", "self.late = torch.tensor(torch.nan); self.network = setting"), *LATE],
    ],
    ids=["nothing", "not there", "no number"],
)
@pytest.mark.parametrize("save_every", [None, 0.0])
@pytest.mark.filterwarnings("ignore:mine cannot be saved within a stage, so an interrupted stage starts again")
def test_end_of_stage_values_are_not_checked_early(mine, tmp_path, changes, save_every):
    """The check also works if a run stops in the middle of a stage and dropout has no generator."""
    file = mine(*changes, ("F.dropout(logits, 0.1)", "logits"))
    Run(toy_plan(file), tmp_path / "whole", save_every=save_every).execute()
    stopped = Run(toy_plan(file), tmp_path / "stopped", save_every=save_every)
    with closing(stopped.events()) as events:
        for _ in range(3):
            next(events)
    stopped.execute()
    assert same_tensors(tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "stopped"))


def test_non_finite_network_is_detected_within_the_stage(mine, tmp_path):
    update = "self.optimiser.minimise(loss)"
    spoilt = (update, f"{update}; self.method.network.bottleneck[1].running_var.fill_(torch.inf)")
    message = error_of(mine(spoilt), tmp_path / "run")
    assert message.startswith("network.bottleneck.1.running_var holds non-finite values in epoch 0 of stage 0")


def test_methods_driven_by_hand_get_the_same_errors(mine):
    built, source, targets = toy_method(toy_plan(mine((TARGET, "pass"), (PREDICT, f"{PREDICT}[:, :3]"))))
    built.fit_source(source)
    with pytest.raises(ContractError, match="target_phases of mine"):
        built.adapt(targets[0].unlabelled())
    with pytest.raises(ContractError, match=r"predict of mine .* \(32, 4\); got float32 of shape \(32, 3\)"):
        accuracy(built, targets[0])


class TestSaved:
    """Phases and method save what changes within a stage."""

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ([("batches optimiser labels", "optimiser labels")], "Learn of mine does not save 'batches': a run"),
            ([("batches optimiser labels", "batches optimiser")], "Learn of mine does not save 'labels': a run"),
            (
                [('return {"total": loss}', 'self.method.seen = self.labels + 1; return {"total": loss}')],
                "Mine of mine does not save 'seen': a run stopped within a stage would continue differently. "
                'Add to the class Mine: saved = "seen"',
            ),
            (
                [
                    (
                        "self.optimiser = Stage",
                        "self.fast = torch.optim.Adam(method.network.parameters()); self.optimiser = Stage",
                    )
                ],
                "",
            ),
            (
                [("batches optimiser labels", "batches optimiser labels method")],
                "",
            ),
        ],
        ids=["generator", "labels", "of the method", "unused", "the method itself"],
    )
    def test_unsaved_state_is_named_before_training(self, mine, tmp_path, changes, expected):
        if not expected:
            assert Run(toy_plan(mine(*changes)), tmp_path / "run").execute().matrix.complete
            return
        assert error_of(mine(*changes), tmp_path / "run").startswith(expected)
        assert not (tmp_path / "run" / "config.json").exists()

    def test_unsaveable_state_is_named(self, mine, tmp_path):
        changes = (
            ("batches optimiser labels", "batches optimiser labels settings"),
            ("self.batches =", "self.settings = object(); self.batches ="),
        )
        assert "Learn.settings: an object of type object needs state_dict and load_state_dict" in error_of(
            mine(*changes), tmp_path / "run"
        )


class TestState:
    """It has to hold all that predicts."""

    def test_unsaved_teacher_is_detected_after_first_stage(self, mine, tmp_path):
        message = error_of(mine(*WITHOUT_TEACHER), tmp_path / "run")
        assert "state of mine does not hold all that predict needs" in message
        assert "predict returns other scores for the same images" in message
        assert "Neither `ratp predict` nor a continued run" in message
        assert not (tmp_path / "run" / "state.safetensors").exists()

    def test_unsaved_teacher_of_targets_is_detected_after_first_target(self, mine, tmp_path):
        late = ("slow.data.lerp_(quick.data, 0.5)", "slow.data.lerp_(quick.data, 0.5 if self.method.stage else 1)")
        as_source = (PREDICT, "return classify(self.teacher if self.stage > 1 else self.network, images, self.scaling)")
        message = error_of(mine(*WITHOUT_TEACHER, late, as_source), tmp_path / "run")
        assert "predict returns other scores for the same images" in message
        assert len(journal_of(tmp_path / "run", "stage_finished")) == 1

    @pytest.mark.parametrize(
        ("mistake", "expected"),
        [
            ("parts['nobody']", "cannot be restored within a stage from what it saves: KeyError: 'nobody'."),
            ("del self.teacher", "restored within a stage from what it saves: KeyError: 'teacher'."),
            (f"{TEACHER_TAKEN} if self.stage < 2 else parts['x']", "load_state fails with KeyError: 'x'."),
            (f"{TEACHER_TAKEN}; self.stage < 2 or vars(self).pop('teacher')", "predict fails with AttributeError"),
        ],
    )
    def test_state_that_cannot_be_restored_is_detected(self, mine, tmp_path, mistake, expected):
        assert expected in error_of(mine((TEACHER_TAKEN, mistake)), tmp_path / "run")

    def test_random_predictions_are_noted_but_accepted(self, mine, tmp_path):
        noisy = (PREDICT, f"{PREDICT} + torch.rand(len(images), 1)")
        with pytest.warns(ChanceWarning, match="predict of mine predicts the same images differently each time"):
            assert Run(toy_plan(mine(noisy, *WITHOUT_TEACHER)), tmp_path / "run").execute().matrix.complete

    def test_lack_of_memory_for_the_check_is_tolerated(self, mine):
        def build():
            raise torch.OutOfMemoryError

        built, source, _ = toy_method(toy_plan(mine()))
        check_kept(built, build, source, torch.device("cpu"), "fp32")

    def test_checks_change_no_result(self, mine, tmp_path, monkeypatch):
        """Even if it draws from the generators that all share, when it is built and in training."""
        seeded = "self.idle = torch.nn.Linear(2, 2); random.seed(5); np.random.seed(5); "
        file = mine(
            ("import torch\n", "import random\n\nimport numpy as np\nimport torch\n"),
            ("self.teacher = self", f"{seeded}self.teacher = self"),
            ("self.labels[index])", "self.labels[index]) * (1 + random.random() * np.random.rand())"),
        )
        ends = []
        for looks in (True, False):
            if not looks:
                monkeypatch.setattr(run_module, "rehearse", lambda *_, **__: None)
                monkeypatch.setattr(attempts, "check_kept", lambda *_: None)
            torch.manual_seed(3)
            random.seed(3)
            np.random.seed(3)
            Run(toy_plan(file), tmp_path / str(looks)).execute()
            draws = torch.rand(1).item(), random.random(), np.random.rand()
            ends.append((tensors_of(tmp_path / str(looks)), draws))
        assert same_tensors(ends[0][0], ends[1][0])
        assert ends[0][1] == ends[1][1]


@pytest.mark.parametrize("seeds", [["1"], pytest.param(["1", "2"], marks=pytest.mark.slow)])
def test_command_line_prints_one_line_per_run(mine, tmp_path, seeds):
    words = [word for seed in seeds for word in ("--seed", seed)]
    options = ("--device", "cpu", *TINY_OPTIONS, *words, "--out", tmp_path / "runs")
    result = ratp("run", "--method", mine(*WITHOUT_TEACHER), *options)
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert (result.code, result.out, len(errors)) == (2, "", len(seeds))
    assert all("state of mine does not hold all that predict needs" in line for line in errors)
    assert "Traceback" not in result.err
