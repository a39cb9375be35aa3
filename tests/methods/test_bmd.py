"""BMD: balanced seeds, several centres a class, labels that follow the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import source_free_checks as checks
from helpers import toy_plan
from ratp.errors import ConfigError
from ratp.functional.norm import BatchNorm1d, BatchNorm2d, affine_parameters
from ratp.functional.optim import SGDConfig
from ratp.methods.bmd import dynamic_loss

NAME = "bmd"


def start_target(**changes):
    method, source, targets = checks.build_method(NAME, **changes)
    method.fit_source(source)
    (phase,) = method.target_phases(targets[0])
    phase.begin()
    phase.begin_epoch(0)
    return method, phase


def test_the_classifier_stays_and_batch_norm_and_bottleneck_learn():
    # DTN: convolution 0, BatchNorm 1, and so on every four layers
    norms = tuple(f"network.backbone.{place}." for place in (1, 5, 9))
    checks.check_the_classifier_stays_and_the_rest_learns(NAME, lambda n: n.startswith((*norms, "network.bottleneck")))


def test_every_replay_gives_numbers():
    checks.check_every_replay_gives_numbers(NAME)


def test_small_domains():
    checks.check_small_domains(NAME)


def test_steps_can_be_captured():
    checks.check_steps_can_be_captured(NAME)


def test_new_labels_are_written_in_place():
    checks.check_new_labels_are_written_in_place(NAME)


def test_it_adapts():
    checks.check_it_adapts(NAME, extractor=True)


def test_parameters_go_by_type():
    """Names would miss layers without "bn" in theirs."""
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), BatchNorm2d(4), torch.nn.Linear(4, 4), BatchNorm1d(4))
    found = affine_parameters(module).values()
    assert [id(p) for p in found] == [id(p) for layer in (module[1], module[3]) for p in (layer.weight, layer.bias)]
    assert not affine_parameters(BatchNorm1d(3, affine=False))


def test_labels_count_from_the_second_epoch():
    _, phase = start_target()
    first = phase.step()
    assert first["static"] == first["dynamic"] == 0
    assert first["diversity"] < 0 < first["entropy"]
    phase.begin_epoch(1)
    second = phase.step()
    assert second["static"] > 0 < second["dynamic"]
    assert second["diversity"] == 0


def test_centres_move_a_little_with_every_step_and_are_new_every_epoch():
    _, phase = start_target(decay=0.9)
    place, before = phase._centres.data_ptr(), phase._centres.clone()
    phase.step()
    moved = phase._centres.clone()
    assert not torch.equal(moved, before)
    assert (moved - before).abs().max() < 0.3
    phase.begin_epoch(1)
    assert phase._centres.data_ptr() == place
    assert not torch.equal(phase._centres, moved)


def test_with_a_decay_of_one_they_stay():
    _, phase = start_target(decay=1.0)
    before = phase._centres.clone()
    phase.step()
    torch.testing.assert_close(phase._centres, before)


def test_the_dynamic_loss_is_symmetric_and_finite():
    logits, similarities = torch.tensor([[2.0, 0.0], [4000.0, -4000.0]]), torch.tensor([[0.96, 0.80], [0.1, 0.9]])
    p, label = logits[:1].softmax(dim=1), similarities[:1].softmax(dim=1)
    expected = F.cross_entropy(logits[:1], label) - (p * label.log()).sum()
    found = dynamic_loss(logits.requires_grad_(), similarities)
    torch.testing.assert_close(found[0], expected)
    assert torch.autograd.grad(found.sum(), logits)[0].isfinite().all()


def test_replayed_images_have_no_dynamic_label():
    method, phase = start_target()
    phase.begin_epoch(1)
    batch = phase.batches.draw(8)
    output = method.network.eval()(batch.images)
    none = batch._replace(replayed=torch.ones(8, dtype=torch.bool))
    assert phase.losses(none, output)["dynamic"] == 0
    assert phase.losses(none, output)["static"] > 0
    before = phase._centres.clone()
    phase.after_update(none, output)
    assert torch.equal(phase._centres, before)


def test_large_networks_have_the_published_optimiser():
    small, large = (toy_plan(NAME, changes=changes).config for changes in ({}, {"network.backbone": "resnet18"}))
    assert (small.sgd, small.backbone_rate) == (SGDConfig(), 1.0)
    assert (large.sgd, large.backbone_rate) == (SGDConfig(0.9, 1e-3, "per-step", nesterov=True), 0.1)


def test_the_gradient_through_the_dynamic_label():
    """By the plain formula, with the label constant or not; the value is the same."""
    results = []
    for through in (False, True):
        method, phase = start_target(dynamic_gradient=through)
        phase.begin_epoch(1)
        batch = phase.batches.draw(8)._replace(replayed=torch.zeros(8, dtype=torch.bool))
        output = method.network.eval()(batch.images)
        z = output.embedding.detach().requires_grad_()
        found = phase.losses(batch, output._replace(embedding=z, logits=z @ method.network.prototypes.T))["dynamic"]
        unit = z / z.norm(dim=1, keepdim=True)
        label = torch.einsum("kcd,nd->nkc", phase._centres, unit).amax(dim=2).softmax(dim=1)
        label = label if through else label.detach()
        p = (z @ method.network.prototypes.T).softmax(dim=1)
        expected = -0.5 * (label * p.log() + p * label.log()).sum(dim=1).mean()
        torch.testing.assert_close(found, expected)
        gradient, wanted = (torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in (found, expected))
        torch.testing.assert_close(gradient, wanted)
        results.append((found.detach(), gradient))
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.allclose(results[0][1], results[1][1], rtol=1e-2)


def test_convolutions_of_small_networks_learn_if_wanted_at_their_own_rate():
    """A tenth of the rate is a tenth of the first step of the feature extractor, not of the bottleneck."""
    moves = []
    for rate in (1.0, 0.1):
        method, _, targets = checks.build_method(NAME, extractor=True, backbone_rate=rate)
        (phase,) = method.target_phases(targets[0])
        phase.begin()
        phase.begin_epoch(0)
        before = checks.snapshot(method.network.state_dict())
        phase.step()
        after = method.network.state_dict()
        moves.append([after[n] - before[n] for n in ("backbone.0.weight", "backbone.1.weight", "bottleneck.0.weight")])
    assert moves[0][0].abs().max() > 0
    for whole, tenth, share in zip(*moves, (0.1, 0.1, 1.0), strict=True):
        torch.testing.assert_close(tenth, share * whole, rtol=1e-2, atol=1e-7)


def test_dynamic_gradient_is_refused_unless_true_or_false():
    with pytest.raises(ConfigError, match="dynamic_gradient must be"):
        toy_plan(NAME, changes={"dynamic_gradient": "half"})


def test_later_switches_leave_the_hash_of_runs_without_them():
    assert "dynamic_gradient" not in toy_plan(NAME).decisions()["switches"]
    assert toy_plan(NAME, changes={"dynamic_gradient": True}).digest() != toy_plan(NAME).digest()
