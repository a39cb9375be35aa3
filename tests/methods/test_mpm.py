"""MPM: a classifier per domain, predictions fused by their entropies, and graphs of images and exemplars."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import noisy_label_checks as checks
from helpers import all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp.errors import ConfigError
from ratp.functional.pseudo_labels import shot_labels
from ratp.networks.network import NetworkConfig
from ratp.runs.run import Run
from source_free_checks import snapshot

NAME = "mpm"


def test_a_target_stage_has_two_phases():
    checks.check_length_of_a_target(NAME, "adaptation", "generalisation")


@pytest.mark.slow
@pytest.mark.parametrize("bige", ["off", "single", "batch"])
def test_small_domains(bige):
    """A memory of 4 has room for two domains at first, and for none of them later."""
    checks.check_small_domains(NAME, bige=bige)


def test_a_class_without_labels_gives_no_exemplars(monkeypatch):
    checks.check_a_class_without_labels_gives_no_exemplars(NAME, monkeypatch)


@pytest.mark.slow
def test_steps_can_be_captured():
    checks.check_steps_can_be_captured(NAME)
    checks.check_steps_can_be_captured(NAME, learns_through="fused", adaptation_statistics="batch")


@pytest.mark.slow
def test_large_networks():
    checks.check_large_networks(NAME)


def test_a_stream_of_six():
    checks.check_a_stream_of_six(NAME)


def test_labels_stay():
    checks.check_labels_stay(NAME)


def test_the_history_averages_the_last_epochs():
    checks.check_the_history_averages_the_last_epochs(NAME)


def test_the_source_is_learned_with_copies():
    checks.check_the_source_is_learned_with_copies(NAME)


def heads_of(method):
    return [head.weight.detach().clone() for head in method.heads]


def test_every_domain_has_a_head():
    method, targets = checks.trained(NAME)
    assert len(method.heads) == 1
    for stage, target in enumerate(targets, start=2):
        method.adapt(target)
        assert len(method.heads) == stage
    assert len({tuple(head.flatten().tolist()) for head in heads_of(method)}) == len(method.heads)


def test_the_adaptation_trains_the_new_head_alone_and_the_generalisation_the_rest():
    method, targets = checks.trained(NAME, 2)
    network, heads = snapshot(method.network.state_dict()), heads_of(method)
    adapts, generalises = method.target_phases(targets[1])
    assert torch.equal(method.heads[2].weight, heads[1])  # begins as the last one
    checks.drive(adapts)
    assert same_tensors(method.network.state_dict(), network)  # statistics of BatchNorm too
    assert [torch.equal(a, b) for a, b in zip(heads_of(method), heads, strict=False)] == [True, True]
    assert not torch.equal(method.heads[2].weight, heads[1])
    heads = heads_of(method)
    checks.drive(generalises)
    assert all(torch.equal(a, b) for a, b in zip(heads_of(method), heads, strict=True))
    changed = {n for n, p in method.network.named_parameters() if not torch.equal(p, network[n])}
    assert changed == {n for n in dict(method.network.named_parameters()) if "classifier" not in n}


def test_a_new_head_may_begin_as_that_of_the_source():
    method, targets = checks.trained(NAME, 2, new_head="source")
    method.target_phases(targets[1])
    assert torch.equal(method.heads[2].weight, method.heads[0].weight)
    assert not torch.equal(method.heads[2].weight, method.heads[1].weight)


def test_a_stage_that_begins_twice_has_one_new_head():
    method, targets = checks.trained(NAME, 2)
    method.target_phases(targets[1])
    method.target_phases(targets[1])
    assert len(method.heads) == 3


def test_an_earlier_state_has_fewer_heads_and_a_later_one_more():
    method, targets = checks.trained(NAME)
    states = [snapshot(method.state())]
    for target in targets:
        method.adapt(target)
        states.append(snapshot(method.state()))
    for count in (3, 1, 2):
        method.load_state(states[count - 1])
        assert len(method.heads) == count
        assert same_tensors(method.state(), states[count - 1])
    fresh, _, _ = checks.build(NAME)
    fresh.load_state(states[2])
    method.load_state(states[2])
    images = targets[0].images
    assert torch.equal(fresh.predict(images), method.predict(images))


def embedding_of(method, images):
    with torch.no_grad():
        return method.network.eval()(method.scaling(images)).embedding


def fused_by_hand(method, images, *, mean=False):
    """Σ ω_k·p_k, image by image; and the p_k."""
    rows, parts = [], []
    for z in embedding_of(method, images):
        heads = [(head.weight.detach() @ z).softmax(dim=0).tolist() for head in method.heads]
        powers = [math.exp(sum(value * math.log(value) for value in p)) for p in heads]
        weights = [1 / len(heads) if mean else power / sum(powers) for power in powers]
        rows.append([sum(w * p[k] for w, p in zip(weights, heads, strict=True)) for k in range(4)])
        parts.append(heads)
    return torch.tensor(rows), torch.tensor(parts)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["entropy", "mean"])
def test_predictions_of_all_heads_are_fused(fusion):
    method, targets = checks.trained(NAME, 3, fusion=fusion, epochs=4, steps=10, lr=0.1)
    images = targets[0].images
    expected, parts = fused_by_hand(method, images, mean=fusion == "mean")
    torch.testing.assert_close(method.predict(images).softmax(dim=1), expected, rtol=1e-3, atol=1e-5)
    for stage in range(3):
        own = method.predict_for_domain(images, stage).softmax(dim=1)
        torch.testing.assert_close(own, parts[:, stage], rtol=1e-3, atol=1e-5)


def test_labels_while_a_head_learns_come_from_fused_predictions():
    method, targets = checks.trained(NAME, 2, epochs=4, steps=10, lr=0.1)
    for labelling in ("centroids", "predictions"):
        method.config = replace(method.config, adaptation_labelling=labelling)
        phase = method.target_phases(targets[1])[0]
        phase.begin()
        phase.begin_epoch(0)
        fused, _ = fused_by_hand(method, targets[1].images)
        embedding = embedding_of(method, targets[1].images)
        expected = shot_labels(embedding, fused) if labelling == "centroids" else fused.argmax(dim=1)
        assert torch.equal(phase.batches.labels, expected)


def test_a_step_of_the_adaptation_written_out():
    method, targets = checks.trained(NAME, beta=0.4)
    phase = method.target_phases(targets[0])[0]
    phase.begin()
    phase.begin_epoch(0)
    head = method.heads[1].weight.detach().clone().requires_grad_()
    found = phase.step()
    index = torch.randint(32, (8,), generator=method.setting.randomness.generator("batches", 1))
    logits = embedding_of(method, targets[0].images[index]) @ head.T
    p = logits.softmax(dim=1)
    mean = p.mean(dim=0)
    entropy = -(p * (p + 1e-5).log()).sum(dim=1).mean()
    loss = 0.4 * F.cross_entropy(logits, phase.batches.labels[index]) + entropy + (mean * (mean + 1e-5).log()).sum()
    torch.testing.assert_close(found["total"].detach(), loss.detach())
    (gradient,) = torch.autograd.grad(loss, [head])
    expected = head - method.setting.recipe.lr * (gradient + 5e-4 * head)
    torch.testing.assert_close(method.heads[1].weight, expected)


@pytest.mark.slow
@pytest.mark.parametrize("through", ["own", "fused"])
def test_exemplars_learn_through_the_head_of_their_domain(through):
    method, targets = checks.trained(NAME, 2, learns_through=through, epochs=4, steps=10, lr=0.1)
    phase = method.target_phases(targets[1])[1]
    method.heads[2].weight.data.mul_(-1)  # or it would be the second
    memory = method.memory
    assert memory.domains.unique().tolist() == [0, 1]
    with torch.no_grad():
        output = method.network.eval()(method.scaling(memory.images))
        found = phase.memory_logits(output, memory.domains).softmax(dim=1)
        target = phase.target_logits(output).softmax(dim=1)
    fused, parts = fused_by_hand(method, memory.images)
    own = torch.stack([parts[row, domain] for row, domain in enumerate(memory.domains.tolist())])
    torch.testing.assert_close(found, own if through == "own" else fused, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(target, parts[:, 2] if through == "own" else fused, rtol=1e-3, atol=1e-5)


def test_the_old_model_has_the_heads_from_before_the_stage():
    method, targets = checks.trained(NAME, 2)
    before, _ = fused_by_hand(method, targets[1].images)
    adapts, generalises = method.target_phases(targets[1])
    checks.drive(adapts)
    generalises.begin()
    generalises.begin_epoch(0)
    generalises.step()
    with torch.no_grad():
        old = generalises.teacher(method.scaling(targets[1].images)).softmax(dim=1)
    torch.testing.assert_close(old, before, rtol=1e-3, atol=1e-5)


LONGER = {"epochs": 4, "steps": 10, "lr": 0.1, "memory": 60}


@pytest.mark.slow
class TestBiGE:
    def trained(self, mode, **changes):
        return checks.trained(NAME, 3, bige=mode, **{**LONGER, **changes})

    def test_alone_an_image_does_not_depend_on_others(self):
        method, targets = self.trained("single")
        images = targets[1].images
        together = method.predict(images)
        alone = torch.cat([method.predict(images[i : i + 1]) for i in range(len(images))])
        torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)
        assert together.isfinite().all()

    def test_in_a_batch_it_does(self):
        method, targets = self.trained("batch")
        images = targets[1].images
        together, alone = method.predict(images), method.predict(images[:4])
        assert together.isfinite().all()
        assert not torch.allclose(together[:4], alone, atol=1e-4)
        assert method.predict(images[:1]).isfinite().all()

    def test_each_mode_predicts_in_another_way_and_trains_in_the_same(self):
        ends = {mode: self.trained(mode)[0] for mode in ("off", "single", "batch")}
        images = toy_domain("fog", 36).images
        for one, other in (("off", "single"), ("off", "batch"), ("single", "batch")):
            assert same_tensors(ends[one].state(), ends[other].state())
            assert not torch.allclose(ends[one].predict(images), ends[other].predict(images), atol=1e-4)

    def test_a_prediction_written_out(self):
        """One image with the exemplars: two graphs of all pairs, then the fusion."""
        method, targets = self.trained("single")
        memory, image = method.memory, targets[1].images[:1]
        _, parts = fused_by_hand(method, image)
        nodes = torch.cat([image, memory.images])
        with torch.no_grad():
            first = method.network.eval().backbone[:4](method.scaling(nodes))
            last = method.network.backbone[:12](method.scaling(nodes))
        styles = torch.cat([first.mean(dim=(2, 3)), first.std(dim=(2, 3), correction=0)], dim=1)
        y = shares_by_hand(styles, memory.domains, 3)
        q = shares_by_hand(last.mean(dim=(2, 3)), memory.labels, 4)
        p = sum(y[k] * parts[0, k].double() for k in range(3))
        weights = [math.exp((v * v.log()).sum()) for v in (p, q)]
        expected = (weights[0] * p + weights[1] * q) / sum(weights)
        torch.testing.assert_close(method.predict(image).softmax(dim=1)[0], expected.float(), rtol=1e-3, atol=1e-4)

    def test_results_say_that_a_batch_is_transductive(self, tmp_path):
        for mode, recorded in (("off", "running"), ("single", "running"), ("batch", "batch")):
            plan = toy_plan(NAME, changes={**checks.KERNELS, "bige": mode})
            assert Run(plan, tmp_path / mode).config["evaluation_statistics"] == recorded

    def test_no_memory_is_refused(self):
        with pytest.raises(ConfigError, match="bige=batch compares images with exemplars: set memory above 0, or bige"):
            checks.build(NAME, bige="batch", memory=0)

    def test_a_feature_extractor_without_known_blocks_is_refused(self):
        from torch import nn

        from ratp.networks.backbones import REGISTRY, register_backbone

        class Flat(nn.Module):
            def forward(self, x):
                return x.mean(dim=(2, 3))

        register_backbone("flat-mpm", Flat)
        changes = {"network.backbone": "flat-mpm", "network.width": 1.0}
        try:
            with pytest.raises(ConfigError, match=r"blocks of flat-mpm are not known.*set network\.backbone to dtn"):
                checks.build(NAME, bige="single", **changes)
            method, _ = checks.trained(NAME, 2, **changes)  # without graphs, any will do
            assert all_finite(method.state())
        finally:
            del REGISTRY["flat-mpm"]

    @pytest.mark.parametrize("mode", ["single", "batch"])
    def test_residual_networks(self, mode):
        plan = toy_plan(NAME, changes={**checks.KERNELS, "epochs": 1, "steps": 1, "bige": mode})
        plan = replace(plan, recipe=replace(plan.recipe, network=NetworkConfig("resnet18", hidden=16, dim=8)))
        method, source, targets = toy_method(plan)
        method.fit_source(source)
        method.adapt(targets[0].unlabelled())
        styles, features = method._read(source.images[:5])[1:]
        backbone = method.network.eval().backbone
        with torch.no_grad():
            x = method.scaling(source.images[:5])
            first = backbone.layer1(backbone.maxpool(backbone.bn1(backbone.conv1(x), relu=True)))
            torch.testing.assert_close(features, backbone(x), rtol=1e-3, atol=1e-4)
        expected = torch.cat([first.mean(dim=(2, 3)), first.std(dim=(2, 3), correction=0)], dim=1)
        torch.testing.assert_close(styles, expected, rtol=1e-3, atol=1e-4)
        assert method.predict(targets[0].images).isfinite().all()
        assert not any(layer._forward_hooks for layer in backbone.modules())


def shares_by_hand(features, groups, count):
    """Y* of the first of some nodes; the others have known groups. W has an entry for every pair of nodes."""
    nodes = F.normalize(features.double(), dim=1)
    prototypes = [nodes[1:][groups == k].mean(dim=0) for k in range(count)]
    soft = torch.tensor([[-((x - c) ** 2).sum() for c in prototypes] for x in nodes]).softmax(dim=1).double()
    graph = (soft / soft.sum(dim=0)) @ soft.T
    labels = soft
    for _ in range(200):
        labels = 0.7 * graph @ labels + 0.3 * soft
    return labels[0]
