"""ROID weighs images by diversity and certainty, stays near the source, and corrects logits by the batch's prior."""

from __future__ import annotations

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp.functional.cotta_views import CoTTAView
from ratp.functional.norm import affine_parameters, by_batch
from ratp.methods.roid import image_weights, prior_corrected, soft_likelihood_ratio
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest

PLAIN_SGD = {"step.optimiser": "sgd", "step.rate": 0.1, "step.momentum": 0.0, "nesterov": False}


def build_method(trained=True, **changes):
    method, source, targets = toy_method(toy_plan("roid", changes=changes))
    if trained:
        method.fit_source(source)
    return method, [target.unlabelled() for target in targets]


def random_logits(count=12, classes=5, scale=3.0, seed=0):
    return scale * torch.randn(count, classes, generator=torch.Generator().manual_seed(seed))


def softmax(row):
    exponentials = np.exp(np.asarray(row, dtype=np.float64) - max(row))
    return exponentials / exponentials.sum()


def weights_by_hand(logits, mean, temperature):
    """One image after another, in double precision."""
    diversity, certainty = [], []
    for row in logits.tolist():
        p = softmax(row)
        diversity.append(1 - p @ mean / (math.sqrt(p @ p) * math.sqrt(mean @ mean)))
        certainty.append(sum(x * math.log(x) for x in p if x > 0))
    d, c = ((np.array(v) - min(v)) / (max(v) - min(v)) for v in (diversity, certainty))
    return [math.exp(a * b / temperature) if a >= d.mean() else 0.0 for a, b in zip(d, c, strict=True)]


class TestWeights:
    @pytest.mark.parametrize("seed", range(4))
    def test_by_hand(self, seed):
        logits, mean = random_logits(seed=seed), torch.tensor([0.4, 0.1, 0.1, 0.3, 0.1])
        found = image_weights(logits, mean, 1 / 3)
        assert found.tolist() == pytest.approx(weights_by_hand(logits, mean.double().numpy(), 1 / 3), rel=1e-4)
        assert 0 < (found > 0).sum() < len(found)
        assert found[found > 0].min() >= 1

    def test_equal_images_weigh_one(self):
        """Scaling them would divide zero by zero."""
        mean = torch.full((3,), 1 / 3)
        for logits in (torch.zeros(4, 3), torch.tensor([[5.0, 0.0, 0.0]]).repeat(4, 1)):
            assert image_weights(logits, mean, 1 / 3).tolist() == [1.0] * 4

    def test_images_as_sure_as_each_other_weigh_by_diversity_alone(self):
        logits = torch.tensor([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 4.0, 0.0]])
        mean = torch.tensor([0.8, 0.1, 0.1])
        assert image_weights(logits, mean, 1 / 3).tolist() == pytest.approx([0.0, 1.0, 1.0])

    def test_the_mean_prediction_is_a_moving_average_over_targets(self):
        method, (first, second) = build_method(keep=1.0, **{"step.rate": 0.0, "replay": "none", "prior": False})
        expected = np.full(4, 0.25)
        for images in (first.images[:8], second.images[:8]):
            p = method.observe(images).double().softmax(dim=1).mean(dim=0)
            expected = 0.9 * expected + 0.1 * p.numpy()
        assert method.mean.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


class TestSoftLikelihoodRatio:
    def test_by_hand(self):
        logits = torch.cat([random_logits(), torch.tensor([[30.0, 0, 0, 0, 0], [0.0, 0, 0, 0, 0]])])
        expected = []
        for row in logits.tolist():
            clipped = [min(p, 0.99) for p in softmax(row)]
            expected.append(-sum(p * math.log(p / (1 - p) + 1e-5) for p in clipped))
        assert soft_likelihood_ratio(logits).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)

    def test_very_sure_ones_have_a_finite_gradient(self):
        logits = torch.tensor([[1e4, 0.0, 0.0], [0.0, -1e4, 1e4]], requires_grad=True)
        loss = soft_likelihood_ratio(logits).sum()
        assert loss.isfinite()
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()


class TestPrior:
    def test_by_hand(self):
        logits = random_logits(count=6)
        prior = np.mean([softmax(row) for row in logits.tolist()], axis=0)
        smooth = max(1 / 6, 1 / 5) / prior.max()
        expected = logits.numpy() * (prior + smooth) / (1 + smooth * 5) * 5
        np.testing.assert_allclose(prior_corrected(logits).numpy(), expected, rtol=1e-5)

    def test_a_uniform_one_changes_nothing(self):
        logits = 4 * torch.eye(3)
        torch.testing.assert_close(prior_corrected(logits), logits)

    def test_a_class_that_is_frequent_gains(self):
        logits = torch.tensor([[5.0, 0.0, 0.0]] * 6 + [[2.0, 2.1, 0.0]])
        assert logits[-1].argmax() == 1
        assert prior_corrected(logits)[-1].argmax() == 0

    def test_predictions_by_batch_are_corrected_and_others_are_not(self):
        method, (target, _) = build_method()
        method.adapt(target)
        with torch.no_grad(), by_batch(method.network.eval()):
            logits = method.network(method.scaling(target.images)).logits
        torch.testing.assert_close(method.predict(target.images), prior_corrected(logits), rtol=1e-4, atol=1e-5)
        assert torch.equal(method.predict(target.images[:1]), method.predict(target.images[:1]))
        running, _ = build_method(eval_bn="running")
        running.adapt(target)
        with torch.no_grad():
            plain = running.network.eval()(running.scaling(target.images)).logits
        torch.testing.assert_close(running.predict(target.images), plain, rtol=1e-4, atol=1e-5)

    def test_it_can_be_off(self):
        method, (target, _) = build_method(prior=False)
        with torch.no_grad(), by_batch(method.network.eval()):
            logits = method.network(method.scaling(target.images[:8])).logits
        torch.testing.assert_close(method.observe(target.images[:8]), logits)


@pytest.mark.parametrize("replay", ["none", "separate"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("consistency", [True, False])
def test_a_step_by_hand(replay, weighted, consistency):
    """Plain SGD on the weighted losses, and then a tenth of the way back to the source."""
    method, (target, _) = build_method(replay=replay, keep=0.9, weighted=weighted, consistency=consistency, **PLAIN_SGD)
    images, network = target.images[:12], deepcopy(method.network).eval()
    inputs, parameters = method.scaling(images), affine_parameters(network)
    source = {name: p.detach().clone() for name, p in parameters.items()}
    with by_batch(network):
        logits = network(inputs).logits
        weights = (
            torch.tensor(weights_by_hand(logits.detach(), np.full(4, 0.25), 1 / 3)) if weighted else torch.ones(12)
        )
        weights = weights.float()
        kept = weights > 0
        loss = sum(w * soft_likelihood_ratio(row[None])[0] for w, row in zip(weights, logits, strict=True)) / 12
        if consistency:
            view = CoTTAView(0.0)(images[kept].float() / 255, method.setting.generator("views", 1))
            changed = network(method.scaling.unit(view)).logits
            for w, one, other in zip(weights[kept], changed, logits[kept], strict=True):
                forth = F.cross_entropy(one[None], other.softmax(dim=0)[None])
                back = F.cross_entropy(other[None], one.softmax(dim=0)[None])
                loss = loss + w * (forth + back) / 2 / 12
        if replay == "separate":
            index = torch.randint(len(method.memory), (8,), generator=method.setting.generator("batches", 1))
            stored = network(method.scaling(method.memory.images[index])).logits
            loss = loss + F.cross_entropy(stored, method.memory.labels[index])
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    torch.testing.assert_close(method.observe(images), prior_corrected(logits.detach()))
    found = affine_parameters(method.network)
    for (name, before), gradient in zip(source.items(), gradients, strict=True):
        torch.testing.assert_close(found[name].detach(), 0.9 * (before - 0.1 * gradient) + 0.1 * before)
    assert method._learnt == int(kept.sum())


class TestEnsembling:
    @pytest.mark.parametrize(("keep", "same"), [(0.0, True), (0.5, False), (1.0, False)])
    def test_kept_nothing_the_network_is_the_source(self, keep, same):
        method, targets = build_method(keep=keep)
        before = {name: tensor.clone() for name, tensor in method.network.state_dict().items()}
        for target in targets:
            method.adapt(target)
        assert same_tensors(method.network.state_dict(), before) == same

    def test_it_stays_nearer_to_the_source(self):
        far = {}
        for keep in (0.9, 1.0):
            method, targets = build_method(keep=keep, **{"step.rate": 0.01})
            for target in targets:
                method.adapt(target)
            trained = affine_parameters(method.network)
            far[keep] = sum((trained[n].detach() - a).square().sum() for n, a in method.anchors.items())
        assert far[0.9] < far[1.0]

    def test_only_gamma_and_beta_change(self):
        method, targets = build_method()
        before = {name: tensor.clone() for name, tensor in method.network.state_dict().items()}
        for target in targets:
            method.adapt(target)
        after = method.network.state_dict()
        assert {n for n in before if not torch.equal(before[n], after[n])} == affine_parameters(method.network).keys()
        assert all_finite(method.state())


class TestEdges:
    def test_a_single_image_that_counts_has_no_view(self):
        """Of two different images, the less diverse one is dropped."""
        method, (target, _) = build_method()
        images = target.images[:2]
        method._begin()
        assert int((method._weigh(method.network.eval()(method.scaling(images)).logits.detach()) > 0).sum()) == 1
        assert method.observe(images).isfinite().all()
        assert all_finite(method.state())

    def test_one_image_is_predicted_and_not_learnt(self):
        method, (target, _) = build_method()
        before = {name: tensor.clone() for name, tensor in method.network.state_dict().items()}
        assert torch.equal(method.observe(target.images[:1]), method.predict(target.images[:1]))
        method.adapt(toy_domain("dot", 1).unlabelled())
        assert same_tensors(method.network.state_dict(), before)

    def test_the_same_image_again_and_again(self):
        method, (target, _) = build_method()
        assert method.observe(target.images[:1].repeat(8, 1, 1, 1)).isfinite().all()
        assert all_finite(method.state())


def test_large_networks_have_their_own_values():
    large = resolve(RunRequest("pacs", "roid", weights="none")).config
    assert (large.step.optimiser, large.step.rate, large.step.momentum, large.nesterov) == ("sgd", 2.5e-4, 0.9, True)
    small = resolve(RunRequest("digits", "roid", weights="none")).config
    assert (small.step.optimiser, small.step.rate, small.flip, large.flip) == ("adam", 1e-3, 0.0, 0.5)
    assert (large.keep, large.average) == (small.keep, small.average) == (0.99, 0.9)
