"""Losses that are no numbers: the batch is found, the stage tried once more in fp32, and nothing before it is lost."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

import ratp.training.phases as training
from helpers import QUICK, each_method, journal_of, same_tensors, tensors_of, toy_plan
from ratp._core.environment import single_precision, use_precision
from ratp._core.files import read_json
from ratp.errors import TrainingError
from ratp.runs.events import StageStarted, Trained
from ratp.runs.run import EnvironmentWarning, Run
from ratp.runs.stage_runner import NumbersWarning
from ratp.training.finite import log_draw, logging_draws

SIZES = {"epochs": 3, "steps": 4}
BAD = 7  # an image that ruins every batch it is in


def make_plan(method="ratp", precision="fp32", **changes):
    plan = toy_plan(method, changes={**SIZES, **QUICK.get(method, {}), **changes})
    return replace(plan, precision=precision)


@pytest.fixture
def poison(monkeypatch):
    """Makes one target image unusable under a given setting; returns the batches drawn before it."""
    batches, draw = [], training.Batches.draw

    def use(in_precision=("fp32", "tf32"), stage=1):
        def poisoned(self, count):
            batch = draw(self, count)
            if getattr(self, "where", (None, None))[0] != stage or self.where[1] not in in_precision:
                return batch
            if batch.places.device.type == "cpu":  # a graph that is recorded cannot be looked into
                batches.append(batch.places[~batch.replayed].tolist())
            bad = (batch.places == BAD) & ~batch.replayed
            return batch._replace(images=torch.where(bad[:, None, None, None], torch.nan, batch.images))

        build = training.Batches.__init__

        def built(self, setting, kind, number, *rest):
            build(self, setting, kind, number, *rest)
            self.where = number, setting.precision

        monkeypatch.setattr(training.Batches, "__init__", built)
        monkeypatch.setattr(training.Batches, "draw", poisoned)
        return batches

    return use


@pytest.mark.faults(14, "in fp32, the run stops, names the batch that caused NaN and keeps the earlier stages")
@pytest.mark.parametrize("save_every", [None, 0.0])
def test_batch_is_named_and_earlier_stages_are_kept(save_every, poison, tmp_path):
    Run(make_plan(), tmp_path / "sound").execute()
    batches = poison()
    with pytest.raises(
        TrainingError, match=r"became nan in epoch . of stage 1 \(mud\).*bad-batch-1\.json names.*kept in"
    ) as caught:
        Run(make_plan(), tmp_path / "run", save_every=save_every).execute()
    assert "lr=" in str(caught.value)
    found = read_json(tmp_path / "run" / "bad-batch-1.json")
    culprit = next(batch for batch in batches if BAD in batch)
    assert found["images"] == culprit and BAD in found["images"] and "total" in found["lost"]
    assert found["epoch"] * SIZES["steps"] + found["step"] == batches.index(culprit)
    (event,) = journal_of(tmp_path / "run", "numbers_lost")
    assert (event["stage"], event["precision"]) == (1, "fp32")
    assert read_json(tmp_path / "run" / "matrix.json")["accuracy"] == [
        read_json(tmp_path / "sound" / "matrix.json")["accuracy"][0]
    ]


def test_same_command_resumes_once_the_cause_is_fixed(poison, monkeypatch, tmp_path):
    Run(make_plan(), tmp_path / "sound").execute()
    poison()
    with pytest.raises(TrainingError):
        Run(make_plan(), tmp_path / "run").execute()
    monkeypatch.undo()
    Run(make_plan(), tmp_path / "run").execute()
    assert same_tensors(tensors_of(tmp_path / "sound"), tensors_of(tmp_path / "run"))


@pytest.mark.faults(14, "in tf32 or bf16, the run repeats the stage once in fp32 and says so")
def test_stage_is_retried_in_single_precision(poison, tmp_path):
    """On a CPU both precisions compute the same: the run must end as one without the accident."""
    Run(make_plan(), tmp_path / "sound").execute()
    poison(in_precision=("tf32",))
    with pytest.warns(NumbersWarning, match="retried in fp32"):
        Run(make_plan(precision="tf32"), tmp_path / "run").execute()
    assert same_tensors(tensors_of(tmp_path / "sound"), tensors_of(tmp_path / "run"))
    finished = journal_of(tmp_path / "run", "stage_finished")
    assert [event.get("precision") for event in finished] == [None, "fp32", None]
    epochs = [e for e in journal_of(tmp_path / "run", "epoch") if e["stage"] == 1]
    assert [e["epoch"] for e in epochs] == list(range(len(epochs)))  # the failed attempt's are removed


@pytest.fixture
def spoil(monkeypatch):
    """Makes an update of the source stage write what is no number, in TF32 alone, while all losses are some."""
    step = training.SupervisedPhase.step

    def use(tensor_of, value, at_step):
        def spoilt(self):
            terms = step(self)
            self.made = getattr(self, "made", 0) + 1
            if self._network.precision == "tf32" and self.made == at_step:
                with torch.no_grad():
                    tensor_of(self._network).fill_(value)
            return terms

        monkeypatch.setattr(training.SupervisedPhase, "step", spoilt)
        monkeypatch.setattr(training.SupervisedPhase, "saved", f"{training.SupervisedPhase.saved} made")

    return use


@pytest.mark.faults(14, "if weights or statistics are NaN, the run stops and writes no checkpoint with them")
@pytest.mark.parametrize("save_every", [None, 0.0])
@pytest.mark.parametrize(
    ("tensor_of", "value", "name"),
    [
        (lambda network: network.bottleneck[1].running_var, torch.inf, "network.bottleneck.1.running_var"),
        (lambda network: network.classifier.weight, torch.nan, "network.classifier.weight"),
    ],
    ids=["statistics", "weights"],
)
def test_non_finite_weights_stop_the_stage(tensor_of, value, name, save_every, spoil, tmp_path):
    """With losses that are none later, or never: BatchNorm's statistics are not used while it trains."""
    Run(make_plan("source-only"), tmp_path / "sound").execute()
    spoil(tensor_of, value, at_step=SIZES["steps"])  # the last step of an epoch: no loss shows it
    with pytest.warns(NumbersWarning, match=f"{name} holds non-finite values in epoch 0 of stage 0"):
        Run(make_plan("source-only", "tf32"), tmp_path / "run", save_every=save_every).execute()
    assert same_tensors(tensors_of(tmp_path / "sound"), tensors_of(tmp_path / "run"))
    found = read_json(tmp_path / "run" / "bad-batch-0.json")
    assert (found["epoch"], found["step"], found["lost"]) == (0, SIZES["steps"] - 1, [name])


def test_non_finite_statistics_name_their_batch(spoil, tmp_path):
    spoil(lambda network: network.bottleneck[1].running_var, torch.inf, at_step=SIZES["steps"] + 2)
    with pytest.warns(NumbersWarning, match="in epoch 1 of stage 0"):
        Run(make_plan("source-only", "tf32"), tmp_path / "run", save_every=None).execute()
    found = read_json(tmp_path / "run" / "bad-batch-0.json")
    assert (found["epoch"], found["step"]) == (1, 1)


def test_non_finite_weights_are_never_saved_on_stop(spoil, tmp_path):
    spoil(lambda network: network.classifier.weight, torch.nan, at_step=1)
    events = Run(make_plan("source-only", "tf32"), tmp_path / "run", save_every=3600).events()
    next(event for event in events if isinstance(event, Trained))
    events.close()
    assert not list((tmp_path / "run").glob("checkpoint*"))


def test_stopped_retry_resumes_in_single_precision(poison, tmp_path):
    """What is done of the second attempt is neither lost nor finished in fewer bits."""
    Run(make_plan(), tmp_path / "sound").execute()
    poison(in_precision=("tf32",))
    events = Run(make_plan(precision="tf32"), tmp_path / "run", save_every=3600).events()
    start_events = (event for event in events if isinstance(event, StageStarted) and event.stage == 1)
    next(start_events)
    with pytest.warns(NumbersWarning, match="retried in fp32"):
        next(start_events)
    assert isinstance(next(events), Trained)
    events.close()
    assert torch.backends.cudnn.allow_tf32
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumbersWarning)
        Run(make_plan(precision="tf32"), tmp_path / "run").execute()
    assert same_tensors(tensors_of(tmp_path / "sound"), tensors_of(tmp_path / "run"))
    finished = journal_of(tmp_path / "run", "stage_finished")
    assert [event.get("precision") for event in finished] == [None, "fp32", None]
    assert len(journal_of(tmp_path / "run", "stage_resumed")) == 1


@pytest.mark.parametrize(("first", "then"), [("fp32", "tf32"), ("tf32", "fp32")])
def test_precision_change_counts_as_first_try(first, then, tmp_path):
    events = Run(make_plan(precision=first), tmp_path / "run", save_every=3600).events()
    next(event for event in events if isinstance(event, Trained) and event.stage == 1)
    events.close()
    with pytest.warns(EnvironmentWarning, match=f"{first} → {then}"):
        Run(make_plan(precision=then), tmp_path / "run").execute()
    assert [event.get("precision") for event in journal_of(tmp_path / "run", "stage_finished")] == [None] * 3


def test_non_finite_stage_statistic_is_omitted(tmp_path, monkeypatch):
    """A mean over nothing, say, of a method of one's own."""
    finish = training.SupervisedPhase.finish
    monkeypatch.setattr(training.SupervisedPhase, "finish", lambda self: {**finish(self), "share": float("nan")})
    run = Run(make_plan("source-only"), tmp_path / "run")
    assert run.execute().matrix.complete
    assert "share" not in journal_of(tmp_path / "run", "stage_finished")[0]["statistics"]


def test_concurrent_runs_keep_single_precision():
    use_precision("tf32")
    with single_precision():
        use_precision("tf32")
        assert not torch.backends.cudnn.allow_tf32
        with single_precision():
            pass
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_retry_on_gpu(precision, poison, tmp_path):
    poison(in_precision=(precision,))
    plan = replace(make_plan(precision=precision), device=torch.device("cuda"))
    with pytest.warns(NumbersWarning, match="retried in fp32"):
        Run(plan, tmp_path / "run").execute()
    assert BAD in read_json(tmp_path / "run" / "bad-batch-1.json")["images"]
    finished = journal_of(tmp_path / "run", "stage_finished")
    assert [event.get("precision") for event in finished] == [None, "fp32", None]
    assert all(tensor.isfinite().all() for tensor in tensors_of(tmp_path / "run").values())


def test_run_stops_if_the_retry_fails(poison, tmp_path):
    poison()
    with pytest.warns(NumbersWarning), pytest.raises(TrainingError, match="The fp32 retry also failed"):
        Run(make_plan(precision="tf32"), tmp_path / "run").execute()
    assert len(read_json(tmp_path / "run" / "matrix.json")["accuracy"]) == 1


def test_non_finite_values_are_never_saved(poison, tmp_path):
    """Stopped by hand in the epoch it happens in, before anybody looked."""
    batches = poison()
    events = Run(make_plan(), tmp_path / "run", save_every=3600).events()
    for event in events:
        if isinstance(event, Trained) and any(BAD in batch for batch in batches):
            assert not event.tick.epoch_done, "another image would be better for this test"
            break
    events.close()
    assert not list((tmp_path / "run").glob("checkpoint*"))


@pytest.mark.parametrize("method", each_method())
def test_every_method_reports_its_batches(method, tmp_path):
    run = Run(make_plan(method), tmp_path / "run")
    for phase in run.method.source_phases(run.stream.source):
        phase.begin()
        phase.begin_epoch(0)
        with logging_draws() as listened:
            phase.step()
        assert listened.images
        assert all(0 <= place < len(run.stream.source) for place in listened.images)


def test_indices_beyond_the_domain_are_replayed():
    with logging_draws() as listened:
        log_draw(torch.tensor([0, 5, 2, 3]), own=3)
        log_draw(torch.tensor([1, 4]), own=2, among=torch.tensor([30, 40]))
        log_draw(torch.tensor([9]))
    assert (listened.images, listened.memory) == ([0, 2, 40, 9], [2, 0, 2])
    log_draw(torch.tensor([1]))
    assert listened.images == [0, 2, 40, 9]
