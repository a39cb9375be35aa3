"""Contrast between images, for a network and against it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ratp.methods.pden import adversarial_contrastive, instance_contrastive


def features(seed, count=5):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def probabilities(views, temperature):
    """p of every view and each of the other views of its image, one by one."""
    rows = F.normalize(torch.cat(views).double(), dim=1)
    count = len(views[0])
    found = []
    for i in range(len(rows)):
        share = {a: math.exp(float(rows[i] @ rows[a]) / temperature) for a in range(len(rows)) if a != i}
        found.append([share[a] / sum(share.values()) for a in share if a % count == i % count])
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_the_contrast_is_minus_the_log_of_knowing_views_again(count):
    views = [features(seed) for seed in range(count)]
    each = [sum(-math.log(p) for p in ps) / len(ps) for ps in probabilities(views, 0.3)]
    assert instance_contrastive(views, 0.3).item() == pytest.approx(sum(each) / len(each), rel=1e-5)


def test_the_adversary_is_minus_the_log_of_not_knowing_them():
    views = [features(0), features(1)]
    each = [-math.log(1 - p) for (p,) in probabilities(views, 0.3)]
    assert adversarial_contrastive(*views, 0.3).item() == pytest.approx(sum(each) / len(each), rel=1e-5)


def test_the_adversary_has_less_to_lose_the_harder_views_are_to_know():
    """Views of the same image are turned apart; between different images all angles stay right."""
    one = torch.eye(4)[:2]
    losses, known = [], []
    for angle in (0.0, 0.3, 0.6, 0.9, 1.2):
        other = math.cos(angle) * torch.eye(4)[:2] + math.sin(angle) * torch.eye(4)[2:]
        losses.append(adversarial_contrastive(one, other, 0.3).item())
        known.append(probabilities([one, other], 0.3)[0][0])
    assert known == sorted(known, reverse=True)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1] > 0


@pytest.mark.parametrize("count", [1, 2])
def test_few_images_and_certain_ones_give_numbers(count):
    one = features(0, count).requires_grad_()
    for loss in (adversarial_contrastive(one, one.detach()), instance_contrastive([one, one.detach()])):
        (slope,) = torch.autograd.grad(loss, one)
        assert loss.isfinite() and slope.isfinite().all()
    if count == 1:
        assert adversarial_contrastive(one, one.detach()) == 0
