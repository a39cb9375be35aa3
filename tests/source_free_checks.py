"""Checks shared by SHOT and related methods."""

from __future__ import annotations

from dataclasses import replace

import torch

from helpers import TINY, all_finite, toy_domain, toy_method, toy_plan
from ratp.training.phase import train
from read_back import ReadBack

REPLAYS = ("union", "separate", "none")
LEARNING = {"network.width": 0.2, "network.hidden": 24, "network.dim": 12, "epochs": 3, "steps": 10, "batch": 24}


def build_method(name, domains=None, **changes):
    """A method, its source and its targets without labels."""
    method, source, targets = toy_method(toy_plan(name, domains, changes=changes))
    return method, source, [target.unlabelled() for target in targets]


def states_after_stages(name, **changes):
    """Copies of a method's state after each stage."""
    method, source, targets = build_method(name, **changes)
    method.fit_source(source)
    states = [snapshot(method.state())]
    for target in targets:
        method.adapt(target)
        states.append(snapshot(method.state()))
    return states


def snapshot(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def check_the_classifier_stays_and_the_rest_learns(name, trained):
    """W is the source's, bit for bit; of other parameters those change that ``trained`` accepts."""
    before, *later = states_after_stages(name)
    for state in later:
        assert all_finite(state)
        assert torch.equal(state["network.classifier.weight"], before["network.classifier.weight"])
    parameters = [n for n in before if n.startswith("network.") and n.endswith(("weight", "bias"))]
    changed = {n for n in parameters if not torch.equal(before[n], later[0][n])}
    expected = {n for n in parameters if "classifier" not in n and trained(n)}
    assert changed == expected


def check_every_replay_gives_numbers(name):
    """And each another network."""
    ends = [states_after_stages(name, replay=replay)[-1] for replay in REPLAYS]
    assert all(all_finite(end) for end in ends)
    weights = [end["network.bottleneck.0.weight"] for end in ends]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[1], weights[2])


def check_small_domains(name):
    """One image, one class, fewer images than classes, no memory."""
    tiny = [toy_domain("ink"), toy_domain("mud", 1), toy_domain("fog", 3), toy_domain("dew", 9, classes=(2,))]
    for changes in ({}, {"memory": 0}, {"replay": "separate", "memory": 4}):
        method, source, targets = build_method(name, tiny, **changes)
        method.fit_source(source)
        for target in targets:
            method.adapt(target)
            assert all_finite(method.state())


def check_steps_can_be_captured(name):
    """No step of any phase reads anything back; it draws from each generator it lists, and from no other."""
    for replay in REPLAYS:
        method, source, targets = build_method(name, replay=replay, **{"target_transform.flip": 0.5})
        method.fit_source(source)
        method.adapt(targets[0])
        for phase in method.target_phases(targets[1]):
            assert phase.captures
            phase.begin()
            phase.begin_epoch(0)
            phase.step()
            before = [generator.get_state() for generator in phase.generators]
            mode = method.network.training
            chance = torch.random.get_rng_state()
            with ReadBack():
                phase.step()
            assert torch.equal(torch.random.get_rng_state(), chance)
            assert method.network.training == mode
            moved = [not torch.equal(g.get_state(), b) for g, b in zip(phase.generators, before, strict=True)]
            assert all(moved)
            if phase.name != "rotation":
                dropout = method.network.backbone[2].generator
                assert any(dropout is generator for generator in phase.generators)


def check_new_labels_are_written_in_place(name):
    method, source, targets = build_method(name)
    method.fit_source(source)
    phase = next(phase for phase in method.target_phases(targets[0]) if phase.name == "target")
    place = phase.batches.labels.data_ptr()
    phase.begin()
    record = phase.begin_epoch(0)
    assert phase.batches.labels.data_ptr() == place
    assert record["labels_changed"] == 1.0
    assert phase.begin_epoch(1)["labels_changed"] == 0.0


def check_it_adapts(name, **changes):
    """A domain so dark that the source's model knows nothing in it, and one like it in shape."""
    domain = toy_domain("mud", 120)
    dark = replace(domain, images=(domain.images.float() * 0.35).to(torch.uint8))
    sizes = {"lr": 0.2} | LEARNING | changes
    method, source, (target,) = build_method(name, [toy_domain("ink", 120), dark], **sizes)
    method.fit_source(source)
    before = accuracy(method, dark)
    method.adapt(target)
    assert accuracy(method, dark) > max(before, 0.7)
    return before


def accuracy(method, domain):
    return (method.predict(domain.images).argmax(dim=1) == domain.labels).float().mean().item()


def steps_of(phases):
    """How many steps the phases have, by name."""
    return {phase.name: phase.epochs * phase.steps for phase in phases}


def all_steps():
    return TINY["epochs"] * TINY["steps"]


def run_phases(phases):
    """Drives phases; returns what their ends recorded."""
    return [item for item in train(phases) if isinstance(item, dict)]
