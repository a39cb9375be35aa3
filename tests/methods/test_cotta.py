"""CoTTA: a student learns from its slow average and is put back to the source bit by bit."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from helpers import all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp.errors import ConfigError
from ratp.functional.cotta_views import CoTTAView
from ratp.functional.norm import batch_norms, by_batch
from ratp.methods.cotta import teacher_loss
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest

FEW = {"views": 3}
PLAIN_SGD = {"step.optimiser": "sgd", "step.rate": 0.1, "step.momentum": 0.0, "nesterov": False}


def build_method(trained=True, domains=None, **changes):
    method, source, targets = toy_method(toy_plan("cotta", domains, changes=FEW | changes))
    if trained:
        method.fit_source(source)
    return method, [target.unlabelled() for target in targets]


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def count_teacher_passes(method):
    """Counts the teacher's forward passes from now on, after the other networks were copied from it."""
    method._begin()
    seen = []
    method.network.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    return seen


def logits_of(network, inputs):
    with by_batch(network.eval()):
        return network(inputs).logits


class TestTarget:
    def test_a_sure_anchor_means_exactly_one_teacher_pass(self):
        method, (target, _) = build_method(threshold=0.0)
        expected = logits_of(method.network, method.scaling(target.images[:8])).detach()
        seen = count_teacher_passes(method)
        assert torch.equal(method.observe(target.images[:8]), expected)
        assert seen == [8]

    def test_confidence_at_the_threshold_is_sure(self):
        method, (target, _) = build_method()
        inputs = method.scaling(target.images[:8])
        confidence = logits_of(method.network, inputs).softmax(dim=1).amax(dim=1).mean().item()
        for threshold, passes in ((confidence, 1), (confidence + 1e-4, 3)):
            method, _ = build_method(threshold=threshold)
            seen = count_teacher_passes(method)
            method.observe(target.images[:8])
            assert len(seen) == passes

    def test_an_unsure_one_means_the_mean_logits_of_views(self):
        method, (target, _) = build_method(threshold=1.0)
        teacher, images = deepcopy(method.network), target.images[:8]
        changes, view = method.setting.generator("views", 1), CoTTAView(0.0)
        with torch.no_grad():
            logits = [logits_of(teacher, method.scaling.unit(view(images.float() / 255, changes))) for _ in range(3)]
        torch.testing.assert_close(method.observe(images), torch.stack(logits).mean(dim=0))

    @pytest.mark.parametrize("at_once", [2, 3, 5])
    def test_several_views_at_once_are_batches_of_their_own(self, at_once, monkeypatch):
        """With views that leave images as they are, all have the logits of one."""
        method, (target, _) = build_method(threshold=1.0, views=5)
        monkeypatch.setattr(method, "_views_at_once", lambda images: at_once)
        monkeypatch.setattr(method, "_view", lambda images, generator: images)
        expected, seen = logits_of(method.network, method.scaling(target.images[:8])), count_teacher_passes(method)
        torch.testing.assert_close(method.observe(target.images[:8]), expected)
        assert len(seen) == -(-5 // at_once)

    def test_the_record_says_how_often(self):
        for threshold, share in ((0.0, 0.0), (1.0, 1.0)):
            method, (target, _) = build_method(threshold=threshold)
            (phase,) = method.target_phases(target)
            phase.begin()
            phase.begin_epoch(0)
            for _ in range(phase.steps):
                phase.step()
            assert phase.finish()["averaged_batches"] == share


@pytest.mark.parametrize("loss", ["teacher", "symmetric"])
@pytest.mark.parametrize("replay", ["none", "separate"])
def test_a_step_by_hand(loss, replay):
    """Plain SGD on all weights of the student, then the teacher follows, then nothing is put back."""
    method, (target, _) = build_method(threshold=0.0, restore=0.0, teacher=0.9, loss=loss, replay=replay, **PLAIN_SGD)
    inputs, start = method.scaling(target.images[:8]), deepcopy(method.network)
    # a student that is its teacher would have nothing to learn
    method.begin_stage()
    with torch.no_grad():
        for parameter in method.student.parameters():
            parameter += 0.01
    student = deepcopy(method.student)
    cost = teacher_loss(logits_of(student, inputs), logits_of(start, inputs), symmetric=loss == "symmetric")
    if replay == "separate":
        index = torch.randint(len(method.memory), (8,), generator=method.setting.generator("batches", 1))
        stored = logits_of(student, method.scaling(method.memory.images[index]))
        cost = cost + F.cross_entropy(stored, method.memory.labels[index])
    gradients = torch.autograd.grad(cost, list(student.parameters()))
    method._begun = True
    method.observe(target.images[:8])
    for mine, teacher, before, old, gradient in zip(
        method.student.parameters(),
        method.network.parameters(),
        student.parameters(),
        start.parameters(),
        gradients,
        strict=True,
    ):
        torch.testing.assert_close(mine, before - 0.1 * gradient)
        torch.testing.assert_close(teacher, 0.9 * old + 0.1 * mine)


class TestNetworks:
    def test_all_weights_of_student_and_teacher_change_and_the_anchor_stays(self):
        method, targets = build_method()
        source = snapshot(method.network)
        for target in targets:
            method.adapt(target)
        weights = {name for name, _ in method.network.named_parameters()}
        for network in (method.network, method.student):
            changed = {n for n, tensor in network.state_dict().items() if not torch.equal(tensor, source[n])}
            assert changed == weights  # running statistics stay
        assert same_tensors(method.anchor.state_dict(), source)
        assert all_finite(method.state())

    def test_always_put_back_the_student_is_the_source(self):
        method, (target, _) = build_method(restore=1.0)
        source = snapshot(method.network)
        method.adapt(target)
        assert same_tensors(method.student.state_dict(), source)
        assert not same_tensors(method.network.state_dict(), source)

    def test_a_teacher_that_stays_is_the_source_for_ever(self):
        method, targets = build_method(restore=0.0, teacher=1.0)
        source = snapshot(method.network)
        for target in targets:
            method.adapt(target)
        assert same_tensors(method.network.state_dict(), source)
        assert not same_tensors(method.student.state_dict(), source)

    def test_the_teacher_follows_slowly(self):
        method, (target, _) = build_method(restore=0.0)
        method.adapt(target)
        teacher, student, source = (
            torch.cat([p.detach().flatten() for p in network.parameters()])
            for network in (method.network, method.student, method.anchor)
        )
        assert 0 < (teacher - source).norm() < 0.05 * (student - source).norm()

    def test_some_weights_of_every_tensor_are_put_back_the_classifiers_too(self):
        method, (target, _) = build_method(restore=0.5)
        method.adapt(target)
        source = dict(method.anchor.named_parameters())
        for name, parameter in method.student.named_parameters():
            if parameter.numel() > 20:
                share = (parameter == source[name]).float().mean()
                assert 0.2 < share < 0.8, name

    def test_running_statistics_do_not_matter(self):
        one, (target, _) = build_method()
        other, _ = build_method()
        for layer in batch_norms(other.network).values():
            layer.running_mean += 3
        for part in target.images.split(8):
            assert torch.equal(one.observe(part), other.observe(part))

    def test_the_teacher_predicts(self):
        method, (target, _) = build_method()
        method.adapt(target)
        before = method.predict(target.images)
        with torch.no_grad():
            for parameter in method.student.parameters():
                parameter.zero_()
        assert torch.equal(method.predict(target.images), before)


class TestMeasuring:
    def test_source_by_running_then_by_batch(self):
        method, (target, _) = build_method(teacher=1.0)
        running = method.predict(target.images)
        method.adapt(target)
        assert not torch.allclose(running, method.predict(target.images))

    def test_running_for_good_if_asked(self):
        method, (target, _) = build_method(teacher=1.0, eval_bn="running")
        before = method.predict(target.images)
        method.adapt(target)
        assert torch.equal(method.predict(target.images), before)


class TestEdges:
    @pytest.mark.parametrize("memory", [0, 3])
    def test_an_empty_memory_is_no_matter(self, memory):
        method, (target, _) = build_method(memory=memory)
        assert len(method.memory) == 0
        method.adapt(target)
        assert all_finite(method.state())

    def test_one_image_is_predicted_and_not_learnt(self):
        method, (target, _) = build_method()
        before = snapshot(method.network)
        assert torch.equal(method.observe(target.images[:1]), method.predict(target.images[:1]))
        method.adapt(toy_domain("dot", 1).unlabelled())
        assert same_tensors(method.network.state_dict(), before)
        assert same_tensors(method.student.state_dict(), before)

    def test_dropout_is_off(self):
        method, (target, _) = build_method(threshold=0.0, restore=1.0, teacher=1.0)
        method.network.train()
        assert torch.equal(method.observe(target.images[:8]), method.observe(target.images[:8]))

    def test_out_of_range_values_are_reported_at_once(self):
        with pytest.raises(ConfigError) as caught:
            build_method(trained=False, teacher=1.5, restore=2.0, flip=1.1)
        assert len(caught.value.problems) == 3


class TestState:
    def test_stage_after_restoring_state(self):
        straight, targets = build_method()
        for stage in range(2):
            state = {name: tensor.clone() for name, tensor in straight.state().items()}
            straight.adapt(targets[stage])
            resumed, _ = build_method(trained=False)
            resumed.load_state(state)
            assert same_tensors(resumed.state(), state)
            resumed.adapt(targets[stage])
            assert same_tensors(resumed.state(), straight.state())
            assert all(p.requires_grad for p in resumed.student.parameters())
            assert not any(p.requires_grad for p in resumed.anchor.parameters())

    def test_a_state_from_before_the_first_target_forgets_later_ones(self):
        method, (target, _) = build_method()
        state = {name: tensor.clone() for name, tensor in method.state().items()}
        method.adapt(target)
        method.load_state(state)
        assert same_tensors(method.state(), state)

    def test_observing_is_what_the_phase_does(self):
        phase, (target, _) = build_method()
        by_hand, _ = build_method()
        (single,) = phase.target_phases(target)
        single.begin()
        single.begin_epoch(0)
        for _ in range(single.steps):
            single.step()
        order = torch.randperm(len(target), generator=phase.setting.randomness.generator("pass", 1))
        for part in order.split(8):
            by_hand.observe(target.images[part])
        assert same_tensors(phase.state(), by_hand.state())


def test_large_networks_have_their_own_values():
    large = resolve(RunRequest("pacs", "cotta", weights="none")).config
    assert (large.step.optimiser, large.step.rate, large.step.momentum, large.nesterov) == ("sgd", 0.01, 0.9, True)
    assert (large.loss, large.restore, large.threshold, large.flip) == ("symmetric", 0.001, 0.92, 0.5)
    small = resolve(RunRequest("digits", "cotta", weights="none")).config
    assert (small.step.optimiser, small.step.rate) == ("adam", 1e-3)
    assert (small.loss, small.restore, small.threshold, small.flip) == ("teacher", 0.01, 0.92, 0.0)
    assert (small.teacher, small.views) == (large.teacher, large.views) == (0.999, 32)
