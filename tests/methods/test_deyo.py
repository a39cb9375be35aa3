"""DeYO learns from images that are sure, and no longer so once their patches are shuffled."""

from __future__ import annotations

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp.errors import ConfigError
from ratp.functional.norm import affine_parameters, by_batch
from ratp.methods.deyo import label_probability_fall, shuffle_patches
from ratp.methods.shared.online import lower_affine_parameters
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest

PLAIN_SGD = {"step.optimiser": "sgd", "step.rate": 0.1, "step.momentum": 0.0, "nesterov": False}
ALL = {"margin": 2.0, "plpd": -1.0}


def build_method(**changes):
    method, source, targets = toy_method(toy_plan("deyo", changes=changes))
    method.fit_source(source)
    return method, [target.unlabelled() for target in targets]


def network_of(method):
    return {name: tensor.clone() for name, tensor in method.network.state_dict().items()}


def shuffled_by_hand(images, order, side):
    """Patch by patch."""
    images, result = images.numpy(), images.numpy().copy()
    height, width = images.shape[2] // side, images.shape[3] // side
    for image, places, target in zip(images, order.tolist(), result, strict=True):
        for to, place in enumerate(places):
            (row, column), (top, left) = divmod(to, side), divmod(place, side)
            patch = image[:, top * height : (top + 1) * height, left * width : (left + 1) * width]
            target[:, row * height : (row + 1) * height, column * width : (column + 1) * width] = patch
    return torch.from_numpy(result)


class TestShuffling:
    @pytest.mark.parametrize(("height", "width", "side"), [(32, 32, 4), (8, 12, 2), (11, 14, 4), (6, 6, 1)])
    def test_by_hand(self, height, width, side):
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(5, 3, height, width, generator=generator)
        order = torch.rand(5, side**2, generator=generator).argsort(dim=1)
        found = shuffle_patches(images, order)
        assert torch.equal(found, shuffled_by_hand(images, order, side))
        assert torch.equal(found.flatten(1).sort().values, images.flatten(1).sort().values)
        assert torch.equal(shuffle_patches(images, torch.arange(side**2).repeat(5, 1)), images)

    def test_more_patches_than_pixels_are_refused(self):
        with pytest.raises(ConfigError, match="patches must be at most the side of the images, 32×32; got 33"):
            build_method(patches=33)


def test_the_fall_of_the_label_by_hand():
    generator = torch.Generator().manual_seed(0)
    plain, shuffled = 2 * torch.randn(2, 6, 4, generator=generator)
    expected = []
    for one, other in zip(plain.double().numpy(), shuffled.double().numpy(), strict=True):
        label = one.argmax()
        p, q = (np.exp(row) / np.exp(row).sum() for row in (one, other))
        expected.append(p[label] - q[label])
    assert label_probability_fall(plain, shuffled).tolist() == pytest.approx(expected, rel=1e-5)


def middle(values):
    """A number that half of the values are below."""
    ordered = sorted(values)
    return (ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("replay", ["none", "separate"])
def test_a_step_by_hand(replay, weighted):
    """Half of the images are sure, and half of these by their shape; the limits are put between them."""
    first, (target, _) = build_method()
    images, most = target.images[:24], math.log(4)
    network = deepcopy(first.network).eval()
    parameters = lower_affine_parameters(network)
    inputs = first.scaling(images)
    with by_batch(network):
        logits = network(inputs).logits
        entropies = [-sum(p * math.log(p) for p in row) for row in logits.softmax(dim=1).double().tolist()]
        margin = middle(entropies) / most
        sure = [i for i, h in enumerate(entropies) if h < margin * most]
        order = torch.rand(len(sure), 16, generator=first.setting.generator("patches", 1)).argsort(dim=1)
        with torch.no_grad():
            changed = network(shuffled_by_hand(inputs[sure], order, 4)).logits.softmax(dim=1)
        falls = {}
        for i, other in zip(sure, changed, strict=True):
            p = logits[i].softmax(dim=0)
            falls[i] = (p.max() - other[p.argmax()]).item()
        plpd = middle(falls.values())
        kept = [i for i in sure if falls[i] > plpd]
        assert 0 < len(kept) < len(sure) < 24
        loss = 0
        for i in kept:
            weight = math.exp(0.4 * most - entropies[i]) + math.exp(falls[i]) if weighted else 1
            p = logits[i].softmax(dim=0)
            loss = loss - weight * (p * p.log()).sum() / len(kept)
        method, _ = build_method(replay=replay, weighted=weighted, margin=margin, plpd=plpd, **PLAIN_SGD)
        if replay == "separate":
            index = torch.randint(len(method.memory), (8,), generator=method.setting.generator("batches", 1))
            stored = network(method.scaling(method.memory.images[index])).logits
            loss = loss + F.cross_entropy(stored, method.memory.labels[index])
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    before = network_of(method)
    torch.testing.assert_close(method.observe(images), logits.detach())
    found = method.network.state_dict()
    expected = {n: before[n] - 0.1 * g for n, g in zip(parameters, gradients, strict=True)}
    for name, value in before.items():
        torch.testing.assert_close(found[name], expected.get(name, value), rtol=1e-4, atol=1e-6)
        assert torch.equal(found[name], value) == (name not in expected)
    assert (method._shown, method._learnt) == (24, len(kept))


class TestNothingKept:
    @pytest.mark.parametrize("changes", [{"margin": 0.0}, {"margin": 2.0, "plpd": 1.0}])
    @pytest.mark.parametrize("replay", ["none", "separate"])
    def test_there_is_no_step_at_all(self, replay, changes):
        method, targets = build_method(replay=replay, **changes)
        before = network_of(method)
        for target in targets:
            method.adapt(target)
        assert same_tensors(method.network.state_dict(), before)
        assert (method._shown, method._learnt) == (36, 0)
        assert all_finite(method.state())

    def test_a_single_sure_image_has_no_statistics_once_shuffled(self):
        method, (target, _) = build_method(plpd=-1.0)
        images = target.images[:8]
        with torch.no_grad(), by_batch(method.network.eval()):
            p = method.network(method.scaling(images)).logits.softmax(dim=1)
        least = -(p * p.log()).sum(dim=1).sort(descending=True).values
        before, method._most_entropy = network_of(method), least[:2].mean().item() / 0.5
        method.observe(images)
        assert method._learnt == 0
        assert same_tensors(method.network.state_dict(), before)


def test_images_that_lose_nothing_are_left_out():
    """A single patch cannot be shuffled."""
    method, (target, _) = build_method(margin=2.0, patches=1, plpd=0.0)
    before = network_of(method)
    method.adapt(target)
    assert same_tensors(method.network.state_dict(), before)


@pytest.mark.parametrize("freeze_top", [True, False])
def test_only_gamma_and_beta_below_the_last_block_change(freeze_top):
    method, targets = build_method(freeze_top=freeze_top, **ALL)
    before = network_of(method)
    for target in targets:
        method.adapt(target)
    after, find = method.network.state_dict(), lower_affine_parameters if freeze_top else affine_parameters
    assert {n for n in before if not torch.equal(before[n], after[n])} == find(method.network).keys()
    assert all_finite(method.state())


def test_one_image_is_predicted_and_not_learnt():
    method, (target, _) = build_method(**ALL)
    before = network_of(method)
    assert torch.equal(method.observe(target.images[:1]), method.predict(target.images[:1]))
    method.adapt(toy_domain("dot", 1).unlabelled())
    assert same_tensors(method.network.state_dict(), before)


def test_large_networks_have_their_own_values():
    large = resolve(RunRequest("pacs", "deyo", weights="none")).config
    assert (large.step.optimiser, large.step.rate, large.step.momentum, large.nesterov) == ("sgd", 2.5e-4, 0.9, True)
    small = resolve(RunRequest("digits", "deyo", weights="none")).config
    assert (small.step.optimiser, small.step.rate) == ("adam", 1e-3)
    assert (large.margin, large.plpd, large.weight_margin, large.patches) == (0.5, 0.2, 0.4, 4)
