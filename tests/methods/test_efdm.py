"""EFDM: styles of the batch on the source, of the memory on targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from helpers import TINY, all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp.errors import ConfigError
from ratp.methods.efdm import ExactMixing


def build_method(**changes):
    method, source, targets = toy_method(toy_plan("efdm", changes=changes))
    return method, source, [target.unlabelled() for target in targets]


def test_it_mixes_after_the_first_two_blocks_of_dtn():
    method, _, _ = build_method()
    places = [name for name, module in method.network.backbone.named_modules() if isinstance(module, ExactMixing)]
    assert places == ["3.efdm", "7.efdm"]


@pytest.mark.slow
def test_a_network_with_a_resnet_is_mixed_after_three_and_predicts_as_without():
    changes = {"network.backbone": "resnet18", "network.width": 1, "batch": 4, "steps": 1, "epochs": 1}
    plan = replace(toy_plan("efdm", changes=changes), weights_from="none")
    assert plan.config.blocks == (1, 2, 3)
    method, source, targets = toy_method(plan)
    places = [name for name, module in method.network.backbone.named_modules() if isinstance(module, ExactMixing)]
    assert places == ["layer1.efdm", "layer2.efdm", "layer3.efdm"]
    plain, _, _ = toy_method(replace(toy_plan("source-only", changes=changes), weights_from="none"))
    assert same_tensors(method.network.state_dict(), plain.network.state_dict())
    assert torch.equal(method.predict(source.images[:4]), plain.predict(source.images[:4]))
    method.fit_source(source)
    method.adapt(targets[0].unlabelled())
    assert all_finite(method.state())


def test_without_mixing_the_source_is_learnt_plainly():
    method, source, _ = build_method(probability=0)
    method.fit_source(source)
    plain, _, _ = toy_method(toy_plan("source-only"))
    plain.fit_source(source)
    assert same_tensors(method.network.state_dict(), plain.network.state_dict())
    mixed, _, _ = build_method(probability=1)
    mixed.fit_source(source)
    assert not same_tensors(mixed.network.state_dict(), plain.network.state_dict())


def test_on_the_source_styles_are_those_of_the_batch_and_on_targets_those_of_the_memory():
    method, source, targets = build_method()
    (phase,) = method.source_phases(source)
    assert [layer.styles for layer in method.layers] == ["batch"] * 2
    assert phase.step().keys() == {"total", "ce"}
    method.fit_source(source)
    (phase,) = method.target_phases(targets[0])
    assert [layer.styles for layer in method.layers] == ["second half"] * 2
    phase.begin()
    phase.begin_epoch(0)
    assert phase.step().keys() == {"total", "ce", "replay"}
    assert not phase.batches.draw(200).replayed.any()
    assert all(layer.generator in phase.generators for layer in method.layers)


def test_a_target_step_is_the_cross_entropy_of_images_and_exemplars():
    outcomes = []
    for _ in range(2):
        method, source, targets = build_method(probability=0, memory_weight=0.5)
        method.fit_source(source)
        (phase,) = method.target_phases(targets[0])
        phase.begin()
        phase.begin_epoch(0)
        outcomes.append((method, phase))
    (_, phase), (twin, other) = outcomes
    batch = other.batches.draw(TINY["batch"])
    images, labels = other._draw_exemplars()
    logits = twin.network.train()(torch.cat([batch.images, images])).logits
    step = phase.step()
    torch.testing.assert_close(step["ce"], F.cross_entropy(logits[:8], batch.labels))
    torch.testing.assert_close(step["replay"], 0.5 * F.cross_entropy(logits[8:], labels))
    torch.testing.assert_close(step["total"], step["ce"] + step["replay"])


def test_exemplars_are_drawn_with_replacement_with_their_labels():
    method, source, targets = build_method(memory=4)
    method.fit_source(source)
    assert len(method.memory) == 4
    (phase,) = method.target_phases(targets[0])
    images, labels = phase._draw_exemplars()
    assert len(images) == len(labels) == TINY["batch"]
    known = method.scaling(method.memory.images)
    for image, label in zip(images, labels, strict=True):
        assert any(torch.equal(image, k) and label == y for k, y in zip(known, method.memory.labels, strict=True))


def test_without_a_memory_styles_come_from_the_batch():
    method, source, targets = build_method(memory=0)
    method.fit_source(source)
    (phase,) = method.target_phases(targets[0])
    assert [layer.styles for layer in method.layers] == ["batch"] * 2
    phase.begin()
    phase.begin_epoch(0)
    assert phase.step().keys() == {"total", "ce"}


def test_predictions_are_not_mixed():
    method, source, targets = build_method(probability=1)
    method.fit_source(source)
    images = targets[0].images
    assert torch.equal(method.predict(images), method.predict(images))
    torch.testing.assert_close(method.predict(images)[:3], method.predict(images[:3]))


@pytest.mark.parametrize("blocks", ["4", "1,9"])
def test_blocks_that_are_not_there_are_refused(blocks):
    with pytest.raises(ConfigError, match="has blocks 1, 2, 3"):
        build_method(blocks=blocks)


@pytest.mark.slow
def test_it_learns_the_toy_and_does_not_collapse():
    """RaTP's table has it at chance after the first target."""
    sizes = {"network.width": 0.2, "network.hidden": 32, "network.dim": 16, "epochs": 5, "steps": 12, "batch": 24}
    method, source, targets = build_method(**sizes, lr=0.03)
    method.fit_source(source)
    method.adapt(targets[0])
    for name in ("ink", "mud"):
        unseen = toy_domain(name, 200).subset(torch.arange(40, 200))
        assert (method.predict(unseen.images).argmax(dim=1) == unseen.labels).float().mean() > 0.8
