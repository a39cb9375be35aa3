"""RMT: a student learns from its slow average and towards the prototypes of the source."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import all_finite, same_tensors, toy_domain, toy_domains, toy_method, toy_plan
from ratp.functional.cotta_views import CoTTAView
from ratp.functional.norm import by_batch
from ratp.methods.rmt import class_means, image_contrast, nearest
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest

PLAIN_SGD = {"step.optimiser": "sgd", "step.rate": 0.1, "step.momentum": 0.0, "nesterov": False}


def build_method(trained=True, domains=None, **changes):
    method, source, targets = toy_method(toy_plan("rmt", domains, changes=changes))
    if trained:
        method.fit_source(source)
    return method, [target.unlabelled() for target in targets]


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def contrast_by_hand(views, temperature):
    """One vector after another, in double precision."""
    vectors = [(i, np.array(v) / np.linalg.norm(v)) for view in views.tolist() for i, v in enumerate(view)]
    losses = []
    for place, (image, vector) in enumerate(vectors):
        others = [(i, vector @ v / temperature) for k, (i, v) in enumerate(vectors) if k != place]
        total = np.log(sum(np.exp(s) for _, s in others))
        losses.append(np.mean([total - s for i, s in others if i == image]))
    return float(np.mean(losses))


def symmetric_by_hand(some, others):
    """The mean over rows of ½·CE(others → some) + ½·CE(some → others)."""
    total = 0
    for a, b in zip(some, others, strict=True):
        total = total + 0.5 * F.cross_entropy(a[None], b.softmax(dim=0)[None])
        total = total + 0.5 * F.cross_entropy(b[None], a.softmax(dim=0)[None])
    return total / len(some)


class TestMathematics:
    def test_means_of_the_classes_that_occur(self):
        embeddings, labels = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 6.0]]), torch.tensor([2, 0, 2])
        assert class_means(embeddings, labels, 4).tolist() == [[3.0, 4.0], [0.5, 4.0]]

    def test_the_nearest_goes_by_angle(self):
        prototypes = torch.tensor([[10.0, 0.0], [0.1, 0.1], [0.0, 5.0]])
        found = nearest(torch.tensor([[2.0, 1.9], [1.0, 0.1], [-0.1, 9.0]]), prototypes)
        assert torch.equal(found, prototypes[[1, 0, 2]])

    def test_the_contrast_by_hand(self):
        views = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
        views[0, 3] = views[0, 1]  # two images with the same prototype repel all the same
        assert image_contrast(views, 0.1).item() == pytest.approx(contrast_by_hand(views, 0.1), rel=1e-5)


@pytest.mark.parametrize("replay", ["none", "separate"])
@pytest.mark.parametrize("projector", [0, 7])
def test_a_step_by_hand(replay, projector):
    method, (target, _) = build_method(replay=replay, projector=projector, teacher=0.9, **PLAIN_SGD)
    images = target.images[:8]
    method._begin()
    with torch.no_grad():  # a student that is its teacher would have nothing to learn from it
        for parameter in method.network.parameters():
            parameter += 0.01
    student, head, teacher = (deepcopy(m) for m in (method.network, method.projector, method.teacher))
    inputs = method.scaling(images)
    view = method.scaling.unit(CoTTAView(0.0)(images.float() / 255, method.setting.generator("views", 1)))
    with by_batch(student.eval()), by_batch(teacher):
        plain, changed, target_logits = student(inputs), student(view), teacher(inputs).logits
        loss = (symmetric_by_hand(plain.logits, target_logits) + symmetric_by_hand(changed.logits, target_logits)) / 2
        cosines = F.cosine_similarity(plain.embedding[:, None], method.prototypes[None], dim=2)
        prototypes = torch.stack([method.prototypes[row.argmax()] for row in cosines])
        triples = [head(part) for part in (prototypes, plain.embedding, changed.embedding)]
        vectors = F.normalize(torch.cat(triples), dim=1)
        for place in range(24):
            similar = vectors @ vectors[place] / 0.1
            rest = torch.cat([similar[:place], similar[place + 1 :]]).logsumexp(dim=0)
            own = [k for k in range(24) if k % 8 == place % 8 and k != place]
            loss = loss + sum(rest - similar[k] for k in own) / 2 / 24
        if replay == "separate":
            index = torch.randint(len(method.memory), (8,), generator=method.setting.generator("batches", 1))
            stored = student(method.scaling(method.memory.images[index])).logits
            loss = loss + F.cross_entropy(stored, method.memory.labels[index])
    learning = [*student.parameters(), *head.parameters()]
    gradients = torch.autograd.grad(loss, learning)
    found = method.observe(images)
    torch.testing.assert_close(found, ((plain.logits + target_logits) / 2).detach())
    after = [*method.network.parameters(), *method.projector.parameters()]
    for now, before, gradient in zip(after, learning, gradients, strict=True):
        torch.testing.assert_close(now, before - 0.1 * gradient, rtol=1e-4, atol=1e-5)
    for now, old, new in zip(
        method.teacher.parameters(), teacher.parameters(), method.network.parameters(), strict=True
    ):
        torch.testing.assert_close(now, 0.9 * old + 0.1 * new.detach())


class TestPrototypes:
    def test_they_are_the_sources_class_means_and_stay(self):
        method, source, targets = toy_method(toy_plan("rmt"))
        method.fit_source(source)
        with torch.no_grad():
            embeddings = method.network.eval()(method.scaling(source.images)).embedding
        expected = torch.stack([embeddings[source.labels == k].mean(dim=0) for k in range(4)])
        torch.testing.assert_close(method.prototypes, expected, rtol=1e-4, atol=1e-5)
        kept = method.prototypes.clone()
        for target in targets:
            method.adapt(target.unlabelled())
        assert torch.equal(method.prototypes, kept)

    def test_a_class_without_source_images_has_none(self):
        domains = [toy_domain("ink", 40, classes=(0, 1, 3)), *toy_domains()[1:]]
        method, targets = build_method(domains=domains)
        assert len(method.prototypes) == 3
        method.adapt(targets[0])
        assert all_finite(method.state())

    def test_without_a_contrast_they_do_not_matter(self):
        ends = []
        for factor in (1, -5):
            method, (target, _) = build_method(contrast_weight=0.0)
            method.prototypes *= factor
            method.adapt(target)
            ends.append(snapshot(method.network))
        assert same_tensors(*ends)


class TestNetworks:
    def test_all_weights_of_both_change_but_no_running_statistics(self):
        method, targets = build_method()
        source = snapshot(method.network)
        for target in targets:
            method.adapt(target)
        weights = {name for name, _ in method.network.named_parameters()}
        for network in (method.network, method.teacher):
            assert {n for n, tensor in network.state_dict().items() if not torch.equal(tensor, source[n])} == weights
        assert all_finite(method.state())

    @pytest.mark.parametrize("statistics", ["batch", "running"])
    def test_it_predicts_the_mean_of_both(self, statistics):
        method, (target, _) = build_method(eval_bn=statistics, teacher=0.5, **{"step.rate": 0.01})
        alone = method.predict(target.images)
        method.adapt(target)
        logits = []
        for network in (method.network, method.teacher):
            with torch.no_grad():
                if statistics == "batch":
                    with by_batch(network.eval()):
                        logits.append(network(method.scaling(target.images)).logits)
                else:
                    logits.append(network.eval()(method.scaling(target.images)).logits)
        assert not torch.allclose(*logits, rtol=1e-3)
        found = method.predict(target.images)
        torch.testing.assert_close(found, sum(logits) / 2, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, alone)

    def test_a_state_from_before_the_first_target_forgets_later_ones(self):
        method, (target, _) = build_method()
        state = {name: tensor.clone() for name, tensor in method.state().items()}
        method.adapt(target)
        method.load_state(state)
        assert same_tensors(method.state(), state)
        assert method.teacher is None

    def test_with_one_seed_the_projector_begins_the_same(self):
        one, _ = build_method(trained=False)
        other, _ = build_method(trained=False)
        assert same_tensors(snapshot(one.projector), snapshot(other.projector))


def test_one_image_is_predicted_and_not_learnt():
    method, (target, _) = build_method()
    before = snapshot(method.network)
    assert torch.equal(method.observe(target.images[:1]), method.predict(target.images[:1]))
    method.adapt(toy_domain("dot", 1).unlabelled())
    assert same_tensors(method.network.state_dict(), before)


def test_large_networks_have_their_own_values():
    large = resolve(RunRequest("pacs", "rmt", weights="none")).config
    assert (large.step.optimiser, large.step.rate, large.step.momentum, large.nesterov) == ("sgd", 0.01, 0.9, True)
    small = resolve(RunRequest("digits", "rmt", weights="none")).config
    assert (small.step.optimiser, small.step.rate, small.flip, large.flip) == ("adam", 1e-3, 0.0, 0.5)
    assert (large.teacher, large.temperature, large.projector) == (0.999, 0.1, 128)
