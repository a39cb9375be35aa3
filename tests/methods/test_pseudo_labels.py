"""What methods that learn targets by SHOT's labels share."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY, same_tensors, tensors_of, toy_method, toy_plan
from ratp.runs.run import Run

METHODS = ["efdm", "pcl", "snr"]


def build_method(method, **changes):
    trainer, source, targets = toy_method(toy_plan(method, changes=changes))
    trainer.fit_source(source)
    return trainer, targets[0].unlabelled()


@pytest.mark.parametrize("method", METHODS)
def test_labels_are_refreshed_when_it_is_time(method):
    trainer, target = build_method(method, refresh=2)
    (phase,) = trainer.target_phases(target)
    labels = phase.batches.labels
    labelled = ["labels_changed" in phase.begin_epoch(epoch) for epoch in range(5)]
    assert labelled == [True, False, True, False, True]
    assert phase.batches.labels is labels  # a captured step reads them there


@pytest.mark.parametrize("method", METHODS)
def test_the_last_labels_go_to_the_memory(method):
    trainer, target = build_method(method)
    (phase,) = trainer.target_phases(target)
    phase.begin()
    phase.begin_epoch(0)
    phase.batches.labels.copy_(torch.arange(len(target)) % 4)
    phase.finish()
    new = trainer.memory.images[trainer.memory.domains == 1], trainer.memory.labels[trainer.memory.domains == 1]
    assert len(new[0])
    for image, label in zip(*new, strict=True):
        place = int((target.images == image).flatten(1).all(dim=1).nonzero()[0])
        assert label == place % 4


@pytest.mark.parametrize("method", METHODS)
def test_a_step_draws_from_the_listed_generators_only(method):
    """A second phase with its generators set to the first one's states makes the same step; torch's own stays."""
    trainer, target = build_method(method)
    (phase,) = trainer.target_phases(target)
    assert phase.captures
    phase.begin()
    phase.begin_epoch(0)
    before = torch.random.get_rng_state()
    states = [generator.get_state() for generator in phase.generators]
    kept = {name: tensor.clone() for name, tensor in trainer.state().items()}
    first = phase.step()
    trainer.load_state(kept)
    (again,) = trainer.target_phases(target)
    again.batches.labels.copy_(phase.batches.labels)
    again.begin()
    again.begin_epoch(0)
    for generator, state in zip(again.generators, states, strict=True):
        generator.set_state(state)
    second = again.step()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("method", METHODS)
def test_epochs_and_steps_are_the_recipes(method):
    trainer, target = build_method(method)
    (phase,) = trainer.target_phases(target)
    assert (phase.name, phase.epochs, phase.steps) == ("target", TINY["epochs"], TINY["steps"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("events", [3, 9])
def test_an_interrupted_run_ends_like_an_undisturbed_one(method, events, tmp_path):
    Run(toy_plan(method), tmp_path / "whole").execute()
    run = Run(toy_plan(method), tmp_path / "run").events()
    for _ in range(events):
        next(run)
    run.close()
    Run(toy_plan(method), tmp_path / "run").execute()
    assert same_tensors(tensors_of(tmp_path / "run"), tensors_of(tmp_path / "whole"))
