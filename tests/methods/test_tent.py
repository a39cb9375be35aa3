"""Tent lowers entropy by BatchNorm's γ and β, and touches nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp.functional.losses import logit_entropy
from ratp.functional.norm import affine_parameters, batch_norms, by_batch
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest


def build_method(name="tent", trained=True, **changes):
    method, source, targets = toy_method(toy_plan(name, changes=changes))
    if trained:
        method.fit_source(source)
    return method, [target.unlabelled() for target in targets]


def snapshot(method):
    return {name: tensor.clone() for name, tensor in method.state().items()}


def test_the_entropy_and_its_gradient():
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    entropy = logit_entropy(logits)
    assert entropy.item() == pytest.approx(0.832396, abs=1e-6)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert gradient[0].tolist() == pytest.approx([-0.282587, 0.140770, 0.141817], abs=1e-6)
    p = logits.softmax(dim=1)
    torch.testing.assert_close(gradient, -p * (p.log() + entropy))


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_only_gamma_and_beta_change(optimiser):
    method, targets = build_method(**{"step.optimiser": optimiser})
    before = snapshot(method)
    for target in targets:
        method.adapt(target)
    after = method.state()
    changed = {n for n in before if n.startswith("network.") and not torch.equal(before[n], after[n])}
    assert changed == {f"network.{name}" for name in affine_parameters(method.network)}
    assert len(changed) == 8
    assert all_finite(after)


def test_a_step_by_hand():
    """The prediction is the one before the step; the step is plain SGD on the mean entropy."""
    method, (target, _) = build_method(**{"step.optimiser": "sgd", "step.rate": 0.1, "replay": "none"})
    images = target.images[:12]
    inputs, parameters = method.scaling(images), affine_parameters(method.network)
    with by_batch(method.network.eval()):
        logits = method.network(inputs).logits
    p = logits.softmax(dim=1)
    gradients = torch.autograd.grad(-(p * p.log()).sum(dim=1).mean(), list(parameters.values()))
    expected = {n: p.detach() - 0.1 * g for (n, p), g in zip(parameters.items(), gradients, strict=True)}
    torch.testing.assert_close(method.observe(images), logits.detach())
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), expected[name])


def test_it_lowers_the_entropy():
    method, (target, _) = build_method(**{"replay": "none", "step.rate": 0.01})
    first = logit_entropy(method.observe(target.images)).mean()
    for _ in range(10):
        last = logit_entropy(method.observe(target.images)).mean()
    assert last < first


def test_running_statistics_do_not_matter():
    one, (target, _) = build_method()
    other, _ = build_method()
    for layer in batch_norms(other.network).values():
        layer.running_mean += 3
    for part in target.images.split(8):
        assert torch.equal(one.observe(part), other.observe(part))


def test_without_a_rate_it_is_adabn():
    tent, targets = build_method(**{"step.rate": 0.0})
    adabn, _ = build_method("adabn")
    for target in targets:
        tent.adapt(target)
        adabn.adapt(target)
        assert torch.equal(tent.predict(target.images), adabn.predict(target.images))
    assert same_tensors(tent.network.state_dict(), adabn.network.state_dict())


class TestReplay:
    def test_it_is_cross_entropy_in_a_pass_of_its_own(self):
        method, (target, _) = build_method(**{"step.optimiser": "sgd", "step.rate": 0.1})
        images, parameters = target.images[:8], affine_parameters(method.network)
        places = method.setting.generator("batches", 1)
        index = torch.randint(len(method.memory), (8,), generator=places)
        with by_batch(method.network.eval()):
            own = method.network(method.scaling(images)).logits
            stored = method.network(method.scaling(method.memory.images[index])).logits
        p = own.softmax(dim=1)
        loss = -(p * p.log()).sum(dim=1).mean() + F.cross_entropy(stored, method.memory.labels[index])
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        expected = {n: p.detach() - 0.1 * g for (n, p), g in zip(parameters.items(), gradients, strict=True)}
        torch.testing.assert_close(method.observe(images), own.detach())
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.detach(), expected[name])

    @pytest.mark.parametrize("changes", [{"memory": 0}, {"memory": 3}, {"replay": "none"}])
    def test_without_exemplars_there_is_none(self, changes):
        with_memory, targets = build_method()
        without, _ = build_method(**changes)
        assert len(without.memory) == 0
        assert without.stage == with_memory.stage == 1
        for method in (with_memory, without):
            method.adapt(targets[0])
        assert all_finite(without.state())
        assert not same_tensors(without.network.state_dict(), with_memory.network.state_dict())

    def test_a_target_is_remembered_by_the_labels_it_is_given(self):
        method, (target, _) = build_method()
        method.adapt(target)
        assert method.memory.seen == 2
        given = {
            bytes(image.numpy().tobytes()): int(k)
            for image, k in zip(target.images, method.predict(target.images).argmax(dim=1), strict=True)
        }
        mine = method.memory.domains == 1
        assert mine.any()
        stored = zip(method.memory.images[mine], method.memory.labels[mine], strict=True)
        assert all(given[bytes(image.numpy().tobytes())] == int(k) for image, k in stored)


class TestEdges:
    def test_one_image_is_predicted_and_not_learnt(self):
        method, (target, _) = build_method()
        before = snapshot(method)
        assert torch.equal(method.observe(target.images[:1]), method.predict(target.images[:1]))
        method.adapt(toy_domain("dot", 1).unlabelled())
        after = method.state()
        assert all(torch.equal(before[n], after[n]) for n in before if n.startswith("network."))

    def test_nothing_to_train(self):
        method, (target, _) = build_method()
        for layer in batch_norms(method.network).values():
            layer.weight = layer.bias = None
        before = {name: tensor.clone() for name, tensor in method.network.state_dict().items()}
        method.adapt(target)
        assert same_tensors(method.network.state_dict(), before)

    def test_dropout_is_off(self):
        method, (target, _) = build_method(**{"step.rate": 0.0})
        images = target.images[:8]
        method.network.train()
        assert torch.equal(method.observe(images), method.observe(images))


class TestMeasuring:
    def test_source_by_running_then_by_batch(self):
        method, (target, _) = build_method(**{"step.rate": 0.0})
        running = method.predict(target.images)
        method.adapt(target)
        by_its_own = method.predict(target.images)
        assert not torch.allclose(running, by_its_own)
        order = torch.randperm(len(target), generator=torch.Generator().manual_seed(4))
        shuffled = method.predict(target.images[order])  # all fit one batch, whose statistics know no order
        torch.testing.assert_close(shuffled, by_its_own[order], rtol=1e-4, atol=1e-5)

    def test_running_for_good_if_asked(self):
        method, (target, _) = build_method(**{"step.rate": 0.0, "eval_bn": "running"})
        before = method.predict(target.images)
        method.adapt(target)
        assert torch.equal(method.predict(target.images), before)

    @pytest.mark.parametrize("statistics", ["batch", "running"])
    def test_results_name_it(self, statistics):
        plan = toy_plan("tent", changes={"eval_bn": statistics})
        assert plan.to_json(plan.load_stream())["evaluation_statistics"] == statistics


class TestByHand:
    @pytest.mark.parametrize("name", ["tent", "eata", "t3a", "adabn", "sar", "rmt", "roid", "deyo"])
    def test_observing_is_what_the_phase_does(self, name):
        phase, (target, _) = build_method(name)
        by_hand, _ = build_method(name)
        (single,) = phase.target_phases(target)
        single.begin()
        single.begin_epoch(0)
        for _ in range(single.steps):
            single.step()
        order = torch.randperm(len(target), generator=phase.setting.randomness.generator("pass", 1))
        for part in order.split(8):
            by_hand.observe(target.images[part])
        assert same_tensors(phase.state(), by_hand.state())
        assert torch.equal(phase.predict(target.images), by_hand.predict(target.images))

    @pytest.mark.parametrize("name", ["tent", "eata", "t3a", "adabn", "sar", "rmt", "roid", "deyo"])
    def test_stage_after_restoring_state(self, name):
        straight, targets = build_method(name)
        straight.adapt(targets[0])
        state = snapshot(straight)
        straight.adapt(targets[1])
        resumed, _ = build_method(name, trained=False)
        resumed.load_state(state)
        assert same_tensors(resumed.state(), state)
        resumed.adapt(targets[1])
        assert same_tensors(resumed.state(), straight.state())
        assert torch.equal(resumed.predict(targets[0].images), straight.predict(targets[0].images))


def test_large_networks_have_their_own_values():
    plan = resolve(RunRequest("pacs", "tent", weights="none"))
    assert (plan.config.step.optimiser, plan.config.step.rate, plan.config.step.momentum) == ("sgd", 2.5e-4, 0.9)
    small = resolve(RunRequest("digits", "tent", weights="none"))
    assert (small.config.step.optimiser, small.config.step.rate) == ("adam", 1e-3)
