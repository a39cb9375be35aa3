"""AdaContrast: labels by neighbours, contrast with a queue, a momentum network that follows."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from helpers import CLASSES, all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp._core.environment import Randomness
from ratp.errors import ConfigError
from ratp.functional.losses import mean_prediction_entropy
from ratp.functional.norm import batch_norms, by_batch
from ratp.methods import adacontrast
from ratp.methods.adacontrast import AdaContrast, AdaContrastConfig, contrast_logits, contrast_loss, neighbour_mean
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.training.method import Setting
from ratp.training.phases import embed_all

FEW = {"queue": 20}
PLAIN_SGD = {"sgd.momentum": 0.0, "sgd.nesterov": False, "sgd.weight_decay": 0.0, "rate": 0.1}


def build_method(trained=True, domains=None, **changes):
    method, source, targets = toy_method(toy_plan("adacon", domains, changes=FEW | changes))
    if trained:
        method.fit_source(source)
    return method, [target.unlabelled() for target in targets]


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def one_step(method, target):
    """The phase of a target after its first step."""
    (phase,) = method.target_phases(target)
    phase.begin()
    phase.begin_epoch(0)
    phase.step()
    return phase


def batches_of(method, target, size=8):
    order = torch.randperm(len(target), generator=method.setting.randomness.generator("pass", method.stage))
    return [target.images[part] for part in order.split(size)]


class TestSource:
    def test_labels_are_smoothed_and_the_extractor_is_slower(self):
        """One step by hand."""
        method, source, _ = toy_method(toy_plan("adacon", changes=FEW | PLAIN_SGD | {"epochs": 1, "steps": 1}))
        start = deepcopy(method.network)
        method.fit_source(source)
        index = torch.randint(len(source.images), (8,), generator=method.setting.generator("batches", 0))
        start.train().use_generator(method.setting.generator("dropout", 0))
        logits = start(method.scaling(source.images[index])).logits
        loss = F.cross_entropy(logits, source.labels[index], label_smoothing=0.1)
        gradients = torch.autograd.grad(loss, list(start.parameters()))
        lr = method.setting.recipe.lr
        for (name, old), new, gradient in zip(
            start.named_parameters(), method.network.parameters(), gradients, strict=True
        ):
            factor = 0.1 if name.startswith("backbone") else 1.0
            torch.testing.assert_close(new, old - lr * factor * gradient, msg=name)


@pytest.mark.parametrize("replay", ["none", "separate"])
def test_a_step_by_hand(replay):
    """Order: labels, momentum network, keys, loss with the queue as it was, step, queue, bank."""
    method, (target, _) = build_method(replay=replay, momentum=0.9, **PLAIN_SGD)
    network, config = deepcopy(method.network), method.config
    images = batches_of(method, target)[0]
    bank_order = torch.randperm(len(target), generator=method.setting.randomness.generator("bank", 1))
    points, predictions = embed_all(network, method.setting, target.images[bank_order])
    points = F.normalize(points, dim=1)
    changes = method.setting.generator("views", 1)
    weak, query, key = (method.scaling.unit(v(images, changes)) for v in (method._weak, method._strong, method._strong))
    queue = method._noise()
    keys_before, labels_before = (column.clone() for column in queue.columns)

    with by_batch(network.eval()):
        with torch.no_grad():
            seen = network(weak)
            keys = F.normalize(network(key).embedding, dim=1)  # the momentum network is still the same
            slow_weak = network(weak)
        refined = neighbour_mean(F.normalize(seen.embedding, dim=1), points, predictions, 10)
        labels = refined.argmax(dim=1)
        output = network(query)
        contrast = contrast_logits(F.normalize(output.embedding, dim=1), keys, labels, keys_before, labels_before, 0.07)
        loss = F.cross_entropy(output.logits, labels) + contrast_loss(contrast)
        loss = loss - mean_prediction_entropy(output.logits)
        if replay == "separate":
            index = torch.randint(len(method.memory), (8,), generator=method.setting.generator("batches", 1))
            stored = network(method.scaling(method.memory.images[index])).logits
            loss = loss + F.cross_entropy(stored, method.memory.labels[index])
    gradients = torch.autograd.grad(loss, list(network.parameters()))

    one_step(method, target)
    for (name, old), new, gradient in zip(
        network.named_parameters(), method.network.parameters(), gradients, strict=True
    ):
        factor = config.backbone_rate if name.startswith("backbone") else 1.0
        torch.testing.assert_close(new, old - 0.1 * factor * gradient, msg=name)
    torch.testing.assert_close(method.queue.columns[0][:8], keys)
    assert torch.equal(method.queue.columns[1][:8], labels)
    assert torch.equal(method.queue.columns[0][8:], keys_before[8:])
    torch.testing.assert_close(method.bank.columns[0][:8], F.normalize(slow_weak.embedding, dim=1))
    torch.testing.assert_close(method.bank.columns[1][:8], slow_weak.logits.softmax(dim=1))
    torch.testing.assert_close(method.bank.columns[0][8:], points[8:])


class TestMomentum:
    def test_it_follows_what_the_network_was_before_the_step(self):
        method, (target, _) = build_method(momentum=0.9)
        source = snapshot(method.network)
        (phase,) = method.target_phases(target)
        phase.begin()
        phase.begin_epoch(0)
        phase.step()
        for name, parameter in method.slow.named_parameters():
            torch.testing.assert_close(parameter.detach(), source[name])
        after_one = snapshot(method.network)
        phase.step()
        for name, parameter in method.slow.named_parameters():
            torch.testing.assert_close(parameter.detach(), 0.9 * source[name] + 0.1 * after_one[name])

    def test_its_statistics_stay(self):
        method, (target, _) = build_method()
        source = snapshot(method.network)
        method.adapt(target)
        running = [name for name in source if "running" in name]
        assert all(torch.equal(method.slow.state_dict()[name], source[name]) for name in running)
        assert not any(torch.equal(method.network.state_dict()[name], source[name]) for name in running)


class TestQueue:
    def test_it_starts_with_random_directions_and_labels(self):
        method, _ = build_method(queue=4000)
        keys, labels = method._noise().columns
        torch.testing.assert_close(keys.norm(dim=1), torch.ones(4000))
        assert keys.mean(dim=0).abs().max() < 0.05
        assert labels.bincount().min() > 850

    def test_the_pointer_wraps_and_goes_on_from_target_to_target(self):
        method, targets = build_method()
        method.adapt(targets[0])
        assert method.queue.pointer == len(targets[0]) % 20
        kept = method.queue
        method.adapt(targets[1])
        assert method.queue is kept
        assert method.queue.pointer == (len(targets[0]) + len(targets[1])) % 20

    def test_a_batch_may_be_larger_than_it(self):
        method, targets = build_method(queue=3)
        for target in targets:
            method.adapt(target)
        assert all_finite(method.state())

    def test_state_can_restart_with_every_target(self):
        method, targets = build_method(reset=True)
        method.adapt(targets[0])
        network = snapshot(method.network)
        (phase,) = method.target_phases(targets[1])
        assert method.queue.pointer == 0
        assert same_tensors(method.slow.state_dict(), network)
        phase.begin()
        phase.begin_epoch(0)
        phase.step()
        assert method.queue.pointer == 8


class TestBank:
    def test_it_holds_the_target_or_a_random_part_of_it(self):
        for size, expected in ((100, 32), (10, 10)):
            method, (target, _) = build_method(bank=size)
            (phase,) = method.target_phases(target)
            phase.begin()
            phase.begin_epoch(0)
            points, predictions = method.bank.rows
            assert len(points) == len(predictions) == expected
            torch.testing.assert_close(points.norm(dim=1), torch.ones(expected))
            torch.testing.assert_close(predictions.sum(dim=1), torch.ones(expected))

    def test_it_is_a_ring(self):
        method, (target, _) = build_method(bank=10)
        method.adapt(target)
        assert method.bank.pointer == len(target) % 10
        assert method.bank.filled == 10

    def test_an_answer_is_the_mean_prediction_of_neighbours(self):
        """All of one class in the bank: all of that class."""
        method, (target, _) = build_method(neighbours=3)
        (phase,) = method.target_phases(target)
        phase.begin()
        phase.begin_epoch(0)
        method.bank.columns[1].copy_(torch.tensor([0.1, 0.1, 0.7, 0.1]))
        logits = method.observe(target.images[:8])
        torch.testing.assert_close(logits.exp(), torch.tensor([[0.1, 0.1, 0.7, 0.1]]).expand(8, 4))

    def test_without_a_look_images_are_labelled_as_predicted_at_first(self, monkeypatch):
        monkeypatch.setattr(adacontrast, "UNASKED", 16)
        for by_hand in (True, False):
            lookups = []
            monkeypatch.setattr(
                adacontrast,
                "neighbour_mean",
                lambda *a: lookups.append(len(a[1])) or neighbour_mean(*a),  # noqa: B023
            )
            method, (target, _) = build_method(first_look=False)
            if by_hand:
                for part in target.images.split(8):
                    method.observe(part)
            else:
                method.adapt(target)
            assert lookups == [16, 24]
            assert method.bank.filled == 32

    def test_the_first_answer_without_a_look_is_the_networks_own(self):
        method, (target, _) = build_method()
        network, images = deepcopy(method.network), target.images[:8]
        weak = method.scaling.unit(method._weak(images, method.setting.generator("views", 1)))
        with torch.no_grad(), by_batch(network.eval()):
            expected = network(weak).logits.log_softmax(dim=1)
        torch.testing.assert_close(method.observe(images), expected)


class TestPass:
    def test_the_rate_falls_over_the_pass(self):
        method, (target, _) = build_method()
        (phase,) = method.target_phases(target)
        phase.begin()
        phase.begin_epoch(0)
        rates = []
        for _ in range(phase.steps):
            phase.step()
            rates.append(method._optimiser._lr)
        assert rates == pytest.approx([0.01 * (1 + math.cos(math.pi * i / 4)) for i in range(4)])

    def test_it_is_constant_if_asked_or_by_hand(self):
        for changes, by_hand in (({"decay": "constant"}, False), ({}, True)):
            method, (target, _) = build_method(**changes)
            if by_hand:
                for part in target.images.split(8):
                    method.observe(part)
            else:
                method.adapt(target)
            assert method._optimiser._lr == 2e-2

    def test_images_shown_after_a_target_are_learnt_from(self):
        method, targets = build_method()
        method.adapt(targets[0])
        before = snapshot(method.network)
        method.observe(targets[1].images[:8])
        assert not torch.equal(method.network.prototypes, before["classifier.weight"])
        assert method._optimiser._lr == 2e-2

    def test_weights_of_the_terms(self):
        """With none there is no step but weight decay's."""
        off = {"label_weight": 0.0, "contrast_weight": 0.0, "diversity_weight": 0.0, "replay": "none"}
        method, (target, _) = build_method(**off, **PLAIN_SGD)
        before = {name: p.detach().clone() for name, p in method.network.named_parameters()}
        method.adapt(target)
        after = {name: p.detach() for name, p in method.network.named_parameters()}
        assert same_tensors(before, after)
        for name in ("label_weight", "contrast_weight", "diversity_weight"):
            method, _ = build_method(**off | {name: 1.0}, **PLAIN_SGD)
            method.adapt(target)
            changed = {n for n, p in method.network.named_parameters() if not torch.equal(p, before[n])}
            assert "bottleneck.0.weight" in changed
            assert ("classifier.weight" in changed) == (name != "contrast_weight")

    def test_everything_learns_and_stays_finite(self):
        method, targets = build_method()
        before = snapshot(method.network)
        for target in targets:
            method.adapt(target)
        after = method.network.state_dict()
        assert not any(torch.equal(before[name], after[name]) for name in before if "num_batches" not in name)
        assert all_finite(method.state())

    def test_exemplars_have_no_part_in_running_statistics(self):
        ends = []
        for replay in ("none", "separate"):
            method, (target, _) = build_method(replay=replay)
            one_step(method, target)
            ends.append({n: layer.running_mean.clone() for n, layer in batch_norms(method.network).items()})
        assert same_tensors(*ends)

    def test_modules_are_left_in_evaluation_mode(self):
        method, (target, _) = build_method()
        method.adapt(target)
        assert not any(module.training for module in method.network.modules())


class TestEdges:
    @pytest.mark.parametrize("memory", [0, 3])
    def test_an_empty_memory_is_no_matter(self, memory):
        method, (target, _) = build_method(memory=memory)
        assert len(method.memory) == 0
        method.adapt(target)
        assert all_finite(method.state())

    @pytest.mark.parametrize("count", [1, 2, 9])
    def test_small_targets(self, count):
        method, _ = build_method()
        before = snapshot(method.network)
        method.adapt(toy_domain("dot", count).unlabelled())
        assert all_finite(method.state())
        assert same_tensors(method.network.state_dict(), before) == (count == 1)

    def test_one_image_is_predicted_and_not_learnt(self):
        method, (target, _) = build_method()
        before = snapshot(method.network)
        assert torch.equal(method.observe(target.images[:1]), method.predict(target.images[:1]))
        assert same_tensors(method.network.state_dict(), before)

    def test_a_target_of_one_class(self):
        method, _ = build_method()
        method.adapt(toy_domain("same", 20, classes=(2,)).unlabelled())
        assert all_finite(method.state())

    def test_very_confident_network_gives_finite_values(self):
        method, (target, _) = build_method()
        with torch.no_grad():
            method.network.prototypes.mul_(1e4)
        logits = method.observe(target.images[:8])
        assert logits.isfinite().all()
        method.adapt(target)
        assert all_finite(method.state())

    def test_images_must_be_square(self):
        setting = Setting(toy_plan("adacon").recipe, CLASSES, (32, 40), Randomness(0), torch.device("cpu"))
        with pytest.raises(ConfigError, match="needs square images, got 32×40"):
            AdaContrast(setting, AdaContrastConfig())

    def test_out_of_range_values_are_reported(self):
        with pytest.raises(ConfigError, match=r"momentum must be at most 1, got 1\.5"):
            build_method(trained=False, momentum=1.5)
        with pytest.raises(ConfigError, match=r"blur must be at most 1, got 1\.5"):
            build_method(trained=False, **{"strong.blur": 1.5})


class TestState:
    def test_stage_after_restoring_state(self):
        straight, targets = build_method()
        for stage in range(2):
            state = {name: tensor.clone() for name, tensor in straight.state().items()}
            straight.adapt(targets[stage])
            resumed, _ = build_method(trained=False)
            resumed.load_state(state)
            assert same_tensors(resumed.state(), state)
            kept = {name: tensor.clone() for name, tensor in state.items()}
            resumed.adapt(targets[stage])
            assert same_tensors(resumed.state(), straight.state())
            assert same_tensors(state, kept)  # it writes into copies

    def test_a_state_from_before_the_first_target_forgets_later_ones(self):
        method, (target, _) = build_method()
        state = {name: tensor.clone() for name, tensor in method.state().items()}
        method.adapt(target)
        method.load_state(state)
        assert same_tensors(method.state(), state)


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_it_is_measured_with_statistics_it_learnt_or_by_batch(statistics):
    method, (target, _) = build_method(eval_bn=statistics)
    method.adapt(target)
    network = deepcopy(method.network).eval()
    with torch.no_grad():
        running = network(method.scaling(target.images)).logits
    assert torch.allclose(method.predict(target.images), running, atol=1e-5) == (statistics == "running")


def test_large_networks_have_their_own_values():
    large = resolve(RunRequest("pacs", "adacon", weights="none")).config
    assert (large.rate, large.rate * large.backbone_rate, large.queue) == (2e-3, pytest.approx(2e-4), 16384)
    assert (large.weak.shift, large.weak.transform.flip, large.strong.transform.flip) == (0, 0.5, 0.5)
    assert (large.strong.transform.crop_scale_min, large.strong.transform.greyscale) == (0.2, 0.2)
    small = resolve(RunRequest("digits", "adacon", weights="none")).config
    assert (small.rate, small.rate * small.backbone_rate, small.queue) == (2e-2, pytest.approx(2e-3), 4096)
    assert (small.weak.shift, small.weak.transform.flip, small.strong.transform.flip) == (2, 0, 0)
    assert (small.strong.transform.crop_scale_min, small.strong.transform.greyscale) == (0.6, 0)
    for config in (small, large):
        assert (config.sgd.momentum, config.sgd.nesterov, config.sgd.weight_decay) == (0.9, True, 1e-4)
        assert (config.neighbours, config.temperature, config.momentum, config.smoothing) == (10, 0.07, 0.999, 0.1)
        transform = config.strong.transform
        jitter = transform.brightness, transform.contrast, transform.saturation, transform.hue
        assert (*jitter, config.strong.jitter) == (0.4, 0.4, 0.4, 0.1, 0.8)
        assert (config.strong.blur, config.strong.blur_min, config.strong.blur_max) == (0.5, 0.1, 2.0)


def test_the_weak_view_of_objects_is_seven_eighths_of_a_side():
    plan = resolve(RunRequest("pacs", "adacon", weights="none"))
    view = adacontrast.View(replace(plan.config.weak), 224)
    boxes = view._transform.draw(200, 224, 224, torch.Generator().manual_seed(0)).boxes
    assert (boxes[:, 2:] == 196).all()
    assert (boxes[:, :2].amin(), boxes[:, :2].amax()) == (0, 28)
