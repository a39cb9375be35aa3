"""EATA learns from sure and unusual predictions only, and stays near the source."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from helpers import all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp.functional.losses import logit_entropy
from ratp.functional.norm import affine_parameters, by_batch
from ratp.methods.eata import distance, select, weighted_entropy
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest

LIKE_TENT = {"margin": 2.0, "similarity": 2.0, "weighted": False, "fisher_weight": 0.0}


def build_method(name="eata", **changes):
    method, source, targets = toy_method(toy_plan(name, changes=changes))
    method.fit_source(source)
    return method, [target.unlabelled() for target in targets]


def network_of(method):
    return {name: tensor.clone() for name, tensor in method.network.state_dict().items()}


def logits_of_entropy(entropy, classes=10):
    """One sure class, the others equal, such that the prediction has this entropy."""
    low, high = 0.0, 50.0
    for _ in range(100):
        middle = (low + high) / 2
        logits = torch.zeros(1, classes, dtype=torch.float64)
        logits[0, 0] = middle
        low, high = (middle, high) if logit_entropy(logits).item() > entropy else (low, middle)
    return logits


class TestDistance:
    def test_golden(self):
        one = {"w": torch.tensor([0.1])}
        cost = distance(one, {"w": torch.tensor([0.0])}, {"w": torch.tensor([0.001])}, 2000.0)
        assert cost.item() == pytest.approx(0.02)

    def test_zero_at_the_anchors(self):
        method, _ = build_method()
        now = affine_parameters(method.network)
        assert distance(now, method.anchors, method.fisher, 2000.0).item() == 0


class TestSelection:
    @pytest.mark.parametrize(("classes", "threshold"), [(10, 0.921034), (7, 0.778364)])
    def test_the_margin_goes_by_the_number_of_classes(self, classes, threshold):
        assert 0.4 * math.log(classes) == pytest.approx(threshold, abs=1e-6)
        method, _ = build_method()
        assert method.threshold == pytest.approx(0.4 * math.log(4))

    def test_the_weight(self):
        logits = logits_of_entropy(0.5)
        value = weighted_entropy(logits, 0.4 * math.log(10)).item()
        assert value / 0.5 == pytest.approx(1.523536, abs=1e-6)
        assert weighted_entropy(logits, 0.4 * math.log(10), weighted=False).item() == pytest.approx(0.5)

    def test_the_weight_is_no_path_for_gradients(self):
        logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
        (found,) = torch.autograd.grad(weighted_entropy(logits, 0.5), logits)
        (plain,) = torch.autograd.grad(logit_entropy(logits).sum(), logits)
        torch.testing.assert_close(found, plain * math.exp(0.5 - 0.832396))

    def test_unsure_images_are_left_out(self):
        logits = torch.cat([logits_of_entropy(h) for h in (0.1, 0.92, 0.93, 2.0)])
        kept, mean = select(logits, None, 0.4 * math.log(10), 0.4)
        assert kept.tolist() == [True, True, False, False]
        torch.testing.assert_close(mean, logits[:2].softmax(dim=1).mean(dim=0))

    def test_an_entropy_at_the_threshold_is_left_out(self):
        logits = torch.tensor([[2.0, 1.0, 0.0]])
        kept, _ = select(logits, None, logit_entropy(logits).item(), 0.4)
        assert not kept.any()

    def test_usual_predictions_are_left_out_but_for_the_first_batch(self):
        logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0]])
        kept, mean = select(logits[:1], None, 0.4, 0.4)
        assert kept.all()
        kept, after = select(logits, mean, 0.4, 0.4)
        assert kept.tolist() == [False, True]
        torch.testing.assert_close(after, 0.9 * mean + 0.1 * logits[1].softmax(dim=0))

    @pytest.mark.parametrize("mean", [None, torch.tensor([0.2, 0.3, 0.5])])
    def test_the_mean_stays_if_nothing_is_kept(self, mean):
        kept, after = select(torch.zeros(4, 3), mean, 0.4, 0.4)
        assert not kept.any()
        assert after is mean


class TestFisher:
    def test_it_is_the_mean_over_batches_of_squared_gradients(self):
        """Two batches of 64 and a rest, which joins the second; own labels, batch statistics."""
        method, _ = build_method()
        images = toy_domain("ink", 140).images
        order = torch.randperm(140, generator=method.setting.randomness.generator("fisher"))
        parameters = affine_parameters(method.network)
        expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for part in (order[:64], order[64:]):
            with by_batch(method.network.eval()):
                logits = method.network(method.scaling(images[part])).logits
            loss = F.cross_entropy(logits, logits.argmax(dim=1))
            for name, gradient in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
                expected[name] += gradient**2 / 2
        found = method.measure_fisher(images)
        assert found.keys() == expected.keys() == method.anchors.keys()
        for name in found:
            torch.testing.assert_close(found[name], expected[name])
            assert not found[name].requires_grad

    def test_it_takes_no_more_images_than_it_may(self):
        method, _ = build_method(fisher_images=10)
        seen = []
        method.network.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        method.measure_fisher(toy_domain("ink", 140).images)
        assert seen == [10]

    def test_anchors_are_the_source_and_stay(self):
        method, (target, _) = build_method(**LIKE_TENT)
        before = {name: p.detach().clone() for name, p in affine_parameters(method.network).items()}
        method.adapt(target)
        assert same_tensors(method.anchors, before)
        assert not same_tensors({n: p.detach() for n, p in affine_parameters(method.network).items()}, before)

    def test_it_holds_the_network_back(self):
        free, (target, _) = build_method(**LIKE_TENT)
        held, _ = build_method(**LIKE_TENT | {"fisher_weight": 1e5})
        for method in (free, held):
            for _ in range(5):
                method.adapt(target)
        far, near = (
            distance(affine_parameters(method.network), held.anchors, held.fisher, 1.0).item()
            for method in (free, held)
        )
        assert near < far

    def test_one_source_image_gives_none(self):
        method, _ = build_method()
        assert not any(f.any() for f in method.measure_fisher(toy_domain("ink", 1).images).values())


@pytest.mark.parametrize("replay", ["separate", "none"])
def test_with_everything_off_it_is_tent(replay):
    eata, targets = build_method(**LIKE_TENT, replay=replay)
    tent, _ = build_method("tent", replay=replay)
    for target in targets:
        eata.adapt(target)
        tent.adapt(target)
    assert same_tensors(eata.network.state_dict(), tent.network.state_dict())
    assert same_tensors(eata.memory.state(), tent.memory.state())


class TestNothingKept:
    @pytest.mark.parametrize("replay", ["separate", "none"])
    def test_there_is_no_step_at_all(self, replay):
        """Not the regulariser's either: it is pulled away from its anchors first."""
        method, (target, _) = build_method(margin=0.0, replay=replay, fisher_weight=1e3)
        for anchor in method.anchors.values():
            anchor += 1
        before = network_of(method)
        method.adapt(target)
        assert same_tensors(method.network.state_dict(), before)
        assert method.mean is None
        assert all_finite(method.state())

    def test_the_record_says_so(self):
        method, (target, _) = build_method(margin=0.0)
        (phase,) = method.target_phases(target)
        phase.begin()
        phase.begin_epoch(0)
        for _ in range(phase.steps):
            phase.step()
        assert phase.finish()["learnt_from"] == 0


def test_only_gamma_and_beta_change():
    method, targets = build_method(margin=2.0)
    before = network_of(method)
    for target in targets:
        method.adapt(target)
    after = method.network.state_dict()
    assert {n for n in before if not torch.equal(before[n], after[n])} == affine_parameters(method.network).keys()
    assert all_finite(method.state())
    assert torch.isclose(method.mean.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("memory", [0, 3])
def test_an_empty_memory_is_no_matter(memory):
    method, (target, _) = build_method(margin=2.0, memory=memory)
    assert len(method.memory) == 0
    method.adapt(target)
    assert all_finite(method.state())


def test_one_image_is_predicted_and_not_learnt():
    method, (target, _) = build_method(margin=2.0)
    before = network_of(method)
    assert torch.equal(method.observe(target.images[:1]), method.predict(target.images[:1]))
    assert same_tensors(method.network.state_dict(), before)


def test_large_networks_have_their_own_values():
    large = resolve(RunRequest("pacs", "eata", weights="none")).config
    assert (large.step.optimiser, large.step.rate, large.fisher_weight) == ("sgd", 2.5e-4, 2000)
    small = resolve(RunRequest("digits", "eata", weights="none")).config
    assert (small.step.optimiser, small.step.rate, small.fisher_weight) == ("adam", 1e-3, 1)
