"""AuCID: targets drawn to a mixture of what was learnt, without a look at their labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import source_free_checks as checks
from helpers import TINY, all_finite, same_tensors, toy_domain, toy_domains, toy_method, toy_plan
from ratp.methods.aucid import best_of_classes, fit_mixture, sorted_distance, sorted_projections
from ratp.training.phases import embed_all
from read_back import ReadBack

NAME = "aucid"
LEARNING = {**checks.LEARNING, "lr": 0.05, "epochs": 8}


def after_source(**changes):
    method, source, targets = checks.build_method(NAME, **changes)
    method.fit_source(source)
    return method, source, targets


class TestExemplars:
    def test_the_best_of_every_class_best_first(self):
        values = torch.tensor([0.1, 5.0, 3.0, 2.0, 4.0, 3.0])
        labels = torch.tensor([0, 2, 0, 2, 2, 0])
        assert best_of_classes(values, labels, 2).tolist() == [2, 5, 1, 4]
        assert best_of_classes(values, labels, 9).tolist() == [2, 5, 0, 1, 4, 3]

    def test_infinite_values_have_their_place(self):
        values = torch.tensor([-torch.inf, torch.inf, 0.0])
        assert best_of_classes(values, torch.zeros(3, dtype=torch.int64), 3).tolist() == [1, 2, 0]

    def test_of_the_source_they_are_the_surest_of_each_class(self):
        method, source, _ = after_source(**LEARNING)
        embedding, probabilities = embed_all(method.network, method.setting, source.images)
        right = probabilities.argmax(dim=1) == source.labels
        quota = TINY["memory"] // 4
        certainty = method.mixture.certainty(embedding).masked_fill(~right, -torch.inf)
        for k in range(4):
            own = (source.labels == k).nonzero().squeeze(1)
            best = own[certainty[own].argsort(descending=True, stable=True)[:quota]]
            assert torch.equal(method.memory.images[method.memory.labels == k], source.images[best])

    def test_the_memory_never_exceeds_its_size(self):
        domains = toy_domains(ink=60, mud=50, fog=40, dew=30)
        method, source, targets = checks.build_method(NAME, domains, confidence=0.0)
        method.fit_source(source)
        sizes = [len(method.memory)]
        for target in targets:
            method.adapt(target)
            sizes.append(len(method.memory))
        assert max(sizes) <= TINY["memory"]
        assert sizes[0] == TINY["memory"]
        assert method.memory.seen == 4


class TestMixture:
    def test_on_the_source_it_is_fitted_to_what_is_classified_right(self):
        method, source, _ = after_source(**LEARNING)
        embedding, probabilities = embed_all(method.network, method.setting, source.images)
        right = probabilities.argmax(dim=1) == source.labels
        assert right.any()
        expected = fit_mixture(embedding[right], source.labels[right], 4, 1e-3)
        assert same_tensors(method.mixture.state(), expected.state())

    def test_on_a_target_to_what_is_predicted_with_confidence(self):
        method, _, targets = after_source(**LEARNING, confidence=0.5)
        before = method.mixture
        (phase,) = method.target_phases(targets[0])
        record = checks.run_phases([phase])[-1]
        embedding, probabilities = embed_all(method.network, method.setting, targets[0].images)
        confidence, predicted = probabilities.max(dim=1)
        sure = confidence > 0.5
        assert record["confident"] == pytest.approx(sure.float().mean().item())
        expected = fit_mixture(embedding[sure], predicted[sure], 4, 1e-3, before)
        assert same_tensors(method.mixture.state(), expected.state())
        stored = method.memory.domains == 1
        logits = method.predict(method.memory.images[stored])
        assert torch.equal(logits.argmax(dim=1), method.memory.labels[stored])
        assert (logits.softmax(dim=1).amax(dim=1) > 0.5).all()

    @pytest.mark.slow
    def test_without_confidence_it_and_the_memory_stay(self):
        method, _, targets = after_source(**LEARNING, confidence=1.0)
        mixture, memory = method.mixture.state(), checks.snapshot(method.memory.state())
        method.adapt(targets[0])
        assert same_tensors(method.mixture.state(), mixture)
        assert method.memory.seen == method.stage == 2
        assert torch.equal(method.memory.images, memory["images"])
        method.adapt(targets[1])
        assert all_finite(method.state())

    def test_it_is_in_the_state(self):
        method, _, targets = after_source()
        method.adapt(targets[0])
        other = toy_method(toy_plan(NAME))[0]
        assert other.mixture is None
        other.load_state(method.state())
        assert same_tensors(other.state(), method.state())
        assert other.mixture.known == method.mixture.known


class TestStep:
    def twins(self, **changes):
        phases = []
        for _ in range(2):
            method, _, targets = after_source(**LEARNING, **changes)
            (phase,) = method.target_phases(targets[0])
            phase.begin()
            phase.begin_epoch(0)
            phases.append((method, phase))
        return phases

    def test_it_is_two_cross_entropies_and_three_distances(self):
        (_, phase), (twin, other) = self.twins()
        network = twin.network.train()
        rays = torch.randn(100, LEARNING["network.dim"], generator=other._slices)
        rays = F.normalize(rays, dim=1)
        batch = other.batches.draw(LEARNING["batch"])
        x = network(batch.images).embedding
        g, classes = twin.mixture.sample(20 * LEARNING["batch"] // len(twin.mixture.components), other._points)
        stored = other.batches.draw_memory(twin.memory, LEARNING["batch"])
        m = network(stored.images)
        assert len(g) == 20 * LEARNING["batch"]
        step = phase.step()
        assert step.keys() == {"total", "mixture", "replay", "distance"}
        torch.testing.assert_close(step["mixture"], F.cross_entropy(g @ network.prototypes.T, classes))
        torch.testing.assert_close(step["replay"], F.cross_entropy(m.logits, stored.labels))
        pairs = (x, g), (x, m.embedding), (m.embedding, g)
        distances = [sorted_distance(*(sorted_projections(points, rays) for points in pair)) for pair in pairs]
        torch.testing.assert_close(step["distance"], 0.1 * sum(distances), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(step["total"], step["mixture"] + step["replay"] + step["distance"])

    @pytest.mark.slow
    def test_without_replay_two_terms_are_left(self):
        (_, phase), _ = self.twins(replay="none")
        assert phase.step().keys() == {"total", "mixture", "distance"}

    @pytest.mark.slow
    def test_everything_learns(self):
        (method, phase), _ = self.twins()
        before = checks.snapshot(method.network.state_dict())
        phase.step()
        after = method.network.state_dict()
        assert not any(torch.equal(after[n], before[n]) for n in after if n.endswith("weight"))
        assert max((after[n] - before[n]).abs().max().item() for n in after if n.endswith("weight")) < 2e-4

    @pytest.mark.slow
    def test_steps_can_be_captured(self):
        for replay in ("separate", "none"):
            method, _, targets = after_source(**LEARNING, replay=replay, **{"target_transform.flip": 0.5})
            (phase,) = method.target_phases(targets[0])
            assert phase.captures
            phase.begin()
            phase.begin_epoch(0)
            phase.step()
            before = [generator.get_state() for generator in phase.generators]
            chance = torch.random.get_rng_state()
            with ReadBack():
                phase.step()
            assert torch.equal(torch.random.get_rng_state(), chance)
            moved = [not torch.equal(g.get_state(), b) for g, b in zip(phase.generators, before, strict=True)]
            assert all(moved)
            assert any(method.network.backbone[2].generator is generator for generator in phase.generators)


@pytest.mark.slow
def test_small_domains():
    """One image, fewer images than classes, one class; a memory of none or one; every image and none confident."""
    tiny = [toy_domain("ink"), toy_domain("mud", 1), toy_domain("fog", 3), toy_domain("dew", 9, classes=(2,))]
    for changes in ({}, {"memory": 0}, {"memory": 4, "confidence": 0.0}, {"confidence": 1.0}, {"confidence": 0.0}):
        method, source, targets = checks.build_method(NAME, tiny, **changes)
        method.fit_source(source)
        for target in targets:
            method.adapt(target)
            assert all_finite(method.state())


def test_with_neither_mixture_nor_memory_nothing_happens():
    method, source, targets = checks.build_method(NAME, memory=0)
    method.fit_source(source)
    method.mixture = fit_mixture(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64), 4, 1e-3)
    before = checks.snapshot(method.network.state_dict())
    (phase,) = method.target_phases(targets[0])
    phase.begin()
    phase.begin_epoch(0)
    assert phase.step() == {"total": 0}
    parameters = dict(method.network.named_parameters())
    assert all(torch.equal(parameters[name], before[name]) for name in parameters)


def test_unlearnt_source_gives_finite_values():
    """All images predicted wrong: no component, and exemplars all the same."""
    method, source, targets = checks.build_method(NAME, epochs=1, steps=1)
    labels = (method.predict(source.images).argmax(dim=1) + 1) % 4
    phases = method.source_phases(type(source)(source.name, source.images, labels, source.classes))
    phases[0].finish()
    assert method.mixture.components == []
    assert len(method.memory)
    method.adapt(targets[0])
    assert all_finite(method.state())


@pytest.mark.slow
def test_it_adapts():
    checks.check_it_adapts(NAME, lr=0.02, rate=3e-3)
