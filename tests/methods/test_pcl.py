"""PCL: cross-entropy and proxies, by true labels on the source and SHOT's on targets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import TINY, same_tensors, toy_domain, toy_method, toy_plan
from ratp.functional.losses import proxy_contrastive
from ratp.functional.pseudo_labels import shot_labels
from ratp.methods.pcl import Projections


def build_method(**changes):
    method, source, targets = toy_method(toy_plan("pcl", changes=changes))
    return method, source, [target.unlabelled() for target in targets]


def snapshot(state):
    return {name: tensor.clone() for name, tensor in state.items()}


class TestProjections:
    def test_the_identity_leaves_the_raw_loss(self):
        method, _, _ = build_method()
        z = torch.randn(8, TINY["network.dim"], generator=torch.Generator().manual_seed(0))
        labels = torch.arange(8) % 4
        raw = proxy_contrastive(z, labels, method.network.prototypes).mean()
        assert not torch.allclose(method.loss(z, labels), raw)
        with torch.no_grad():
            method.projections.samples.weight.copy_(torch.eye(TINY["network.dim"]))
            method.projections.samples.bias.zero_()
            method.projections.proxies.copy_(torch.eye(TINY["network.dim"]))
        torch.testing.assert_close(method.loss(z, labels), raw)
        plain, _, _ = build_method(projection=False)
        torch.testing.assert_close(plain.loss(z, labels), raw)

    def test_the_gradient_reaches_proxies_and_matrix(self):
        method, _, _ = build_method()
        z = torch.randn(8, TINY["network.dim"], generator=torch.Generator().manual_seed(0))
        method.loss(z, torch.arange(8) % 4).backward()
        assert method.network.prototypes.grad.abs().sum() > 0
        assert all(parameter.grad.abs().sum() > 0 for parameter in method.projections.parameters())

    def test_they_start_within_one_over_the_root_of_the_dimension(self):
        for parameter in Projections(64).parameters():
            assert parameter.abs().max() <= 1 / 8
            assert parameter.std() > 0.05

    def test_they_are_in_the_state_but_not_in_the_network(self):
        method, source, _ = build_method()
        before = snapshot(method.state())
        method.fit_source(source)
        after = method.state()
        names = [name for name in after if name.startswith("projections.")]
        assert sorted(names) == ["projections.proxies", "projections.samples.bias", "projections.samples.weight"]
        assert not any(torch.equal(after[name], before[name]) for name in names)
        other, _, _ = build_method()
        other.load_state(after)
        assert same_tensors(other.state(), after)

    def test_without_them_the_state_has_none(self):
        method, source, targets = build_method(projection=False)
        method.fit_source(source)
        method.adapt(targets[0])
        assert {name.partition(".")[0] for name in method.state()} == {"network", "memory"}


def test_a_step_is_cross_entropy_and_the_weighted_loss():
    method, source, _ = build_method(weight=0.5)
    (phase,) = method.source_phases(source)
    phase.begin()
    phase.begin_epoch(0)
    twin, _, _ = build_method(weight=0.5)
    (other,) = twin.source_phases(source)
    other.begin()
    other.begin_epoch(0)
    batch = other.batches.draw(TINY["batch"])
    output = twin.network.train()(batch.images)
    step = phase.step()
    torch.testing.assert_close(step["ce"], F.cross_entropy(output.logits, batch.labels))
    torch.testing.assert_close(step["pcl"], 0.5 * twin.loss(output.embedding, batch.labels))
    torch.testing.assert_close(step["total"], step["ce"] + step["pcl"])


def test_no_weight_leaves_plain_training():
    method, source, _ = build_method(weight=0)
    method.fit_source(source)
    plain, _, _ = toy_method(toy_plan("source-only"))
    plain.fit_source(source)
    assert same_tensors(method.network.state_dict(), plain.network.state_dict())


def test_targets_are_learnt_by_shots_labels_and_everything_trains():
    method, source, targets = build_method(epochs=1)
    method.fit_source(source)
    before = snapshot(method.network.state_dict())
    (phase,) = method.target_phases(targets[0])
    phase.begin()
    record = phase.begin_epoch(0)
    assert record.keys() >= {"lr", "labels_changed", "labels_as_predicted", "smallest_class", "largest_class"}
    with torch.no_grad():
        output = method.network.eval()(method.scaling(targets[0].images))
    assert torch.equal(phase.batches.labels, shot_labels(output.embedding, output.logits.softmax(dim=1)))
    phase.step()
    after = method.network.state_dict()
    assert not any(torch.equal(after[name], before[name]) for name in after if name.endswith("weight"))
    assert phase.finish() == {"exemplars": float(len(method.memory))}
    assert method.stage == 2


@pytest.mark.parametrize(("replay", "some"), [("union", True), ("none", False)])
def test_the_memory_is_in_the_batches(replay, some):
    method, source, targets = build_method(replay=replay)
    method.fit_source(source)
    (phase,) = method.target_phases(targets[0])
    assert phase.batches.draw(200).replayed.any().item() is some
    (phase,) = method.source_phases(source)
    assert not phase.batches.draw(200).replayed.any()


@pytest.mark.slow
def test_it_learns_the_toy():
    sizes = {"network.width": 0.25, "network.hidden": 32, "network.dim": 16, "epochs": 5, "steps": 12, "batch": 32}
    method, source, targets = build_method(**sizes, lr=0.03)
    method.fit_source(source)
    method.adapt(targets[0])
    for name in ("ink", "mud"):
        unseen = toy_domain(name, 200).subset(torch.arange(40, 200))
        assert (method.predict(unseen.images).argmax(dim=1) == unseen.labels).float().mean() > 0.9
