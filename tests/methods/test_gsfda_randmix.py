"""GSFDA with RandMix: copies of source images, and of target images the model is confident about."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import source_free_checks as checks
from helpers import TINY, all_finite, same_tensors, toy_method, toy_plan
from ratp.errors import ConfigError
from ratp.functional.losses import entropy
from ratp.methods.gsfda import disagreement
from ratp.networks.backbones import ChannelDropout
from read_back import ReadBack

NAME = "gsfda"
RANDMIX = {"augment": True, "randmix.kernel_sizes": "3,5", "r_con": 0.25}  # of four classes: all images


def start_target(**changes):
    """A method trained on the source, in the phase of the first target."""
    method, source, targets = checks.build_method(NAME, **changes)
    method.fit_source(source)
    (phase,) = method.target_phases(targets[0])
    phase.begin()
    phase.begin_epoch(0)
    return method, phase


def test_it_is_off_by_default_and_then_costs_nothing():
    method, source, _ = checks.build_method(NAME)
    assert method.randmix is None
    assert method.show(source.images[:2], torch.Generator()) == {}
    plain, source, targets = checks.build_method(NAME)
    other, _, _ = checks.build_method(NAME, **{"randmix.tanh": False, "r_con": 0.1})
    for made in (plain, other):
        made.fit_source(source)
        made.adapt(targets[0])
    assert same_tensors(plain.state(), other.state())


def test_source_images_all_have_copies():
    method, source, _ = checks.build_method(NAME, **RANDMIX)
    (phase,) = method.source_phases(source)
    phase.begin()
    phase.begin_epoch(0)
    seen = []
    method.network.backbone.register_forward_hook(lambda module, given, output: seen.append(len(output)))
    phase.step()
    assert seen == [2 * TINY["batch"]]


def test_confident_target_images_have_copies_that_learn_from_the_same_neighbours():
    method, phase = start_target(**RANDMIX)
    batch = phase.batches.draw(TINY["batch"])
    with torch.no_grad():
        confidence = method.network.eval()(batch.images).logits.softmax(dim=1).amax(dim=1)
    phase._copies._r_con = confidence.median().item()
    seen = []
    method.network.backbone.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    _, valid = phase._copies.learn_confident(batch.images)
    images = seen[-1]
    selected = confidence > phase._copies._r_con
    assert 0 < selected.sum() < 8
    assert torch.equal(valid[8:], selected)
    assert valid[:8].all()
    assert torch.equal(images[:8], batch.images)
    changed = (images[8:] != batch.images).flatten(1).any(dim=1)
    assert torch.equal(changed, selected)
    batch = batch._replace(replayed=torch.arange(8) == 0)
    logs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).log_softmax(dim=1)
    near = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(1)).log_softmax(dim=2)
    valid = torch.cat([torch.ones(8, dtype=torch.bool), torch.arange(8) < 3])
    terms = phase._losses(batch, logs, near, valid)
    each = disagreement(logs, torch.cat([near, near]))
    torch.testing.assert_close(terms["neighbours"], (each[1:8].sum() + each[9:11].sum()) / 11)
    ce = F.nll_loss(logs, torch.cat([batch.labels] * 2), reduction="none")
    torch.testing.assert_close(terms["replay"], (ce[0] + ce[8]) / 11)
    torch.testing.assert_close(terms["diversity"], -entropy(logs[:8].exp().mean(dim=0)))


def test_without_confident_images_it_is_the_step_without_copies():
    """Copies left out change neither losses nor BatchNorm."""
    plain, source, targets = checks.build_method(NAME)
    plain.fit_source(source)
    copying, _, _ = checks.build_method(NAME, **{**RANDMIX, "r_con": 1.0})
    copying.load_state({**copying.state(), **checks.snapshot(plain.state())})
    steps = []
    for method in (plain, copying):
        for module in method.network.modules():
            if isinstance(module, ChannelDropout):
                module.probability = 0.0
        (phase,) = method.target_phases(targets[0])
        phase.begin()
        phase.begin_epoch(0)
        steps.append(phase.step())
    assert steps[1].pop("confident") == 0
    for name, value in steps[0].items():
        torch.testing.assert_close(steps[1][name], value)
    for name, tensor in plain.network.state_dict().items():
        torch.testing.assert_close(copying.network.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("replay", checks.REPLAYS)
def test_whole_stages(replay):
    ends = checks.states_after_stages(NAME, replay=replay, **RANDMIX)
    assert all(all_finite(end) for end in ends)
    assert not torch.equal(
        ends[-1]["network.bottleneck.0.weight"],
        checks.states_after_stages(NAME, replay=replay)[-1]["network.bottleneck.0.weight"],
    )


def test_its_steps_can_be_captured():
    for changes in (RANDMIX, {**RANDMIX, "replay": "separate"}):
        method, source, targets = checks.build_method(NAME, **changes, **{"target_transform.flip": 0.5})
        phases = [*method.source_phases(source)]
        method.fit_source(source)
        phases += method.target_phases(targets[0])
        for phase in phases:
            assert phase.captures
            phase.begin()
            phase.begin_epoch(0)
            phase.step()
            chance = torch.random.get_rng_state()
            with ReadBack():
                phase.step()
            assert torch.equal(torch.random.get_rng_state(), chance)


def test_its_layers_are_in_the_state():
    method, source, targets = checks.build_method(NAME, **RANDMIX)
    method.fit_source(source)
    method.adapt(targets[0])
    other = toy_method(toy_plan(NAME, seed=7, changes=RANDMIX))[0]
    assert not same_tensors(other.state(), method.state())
    other.load_state(method.state())
    assert same_tensors(other.state(), method.state())
    assert method.show(source.images[:2], torch.Generator().manual_seed(0)).keys() == {
        f"RandMix {i}" for i in (1, 2, 3)
    }


def test_kernels_that_do_not_fit_are_refused_only_if_used():
    assert checks.build_method(NAME, **{"randmix.kernel_sizes": "33"})
    with pytest.raises(ConfigError, match=r"a kernel of 33 does not fit into images of 32×32"):
        checks.build_method(NAME, **{"randmix.kernel_sizes": "33", "augment": True})
