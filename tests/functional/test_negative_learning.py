"""SelNLPL, against plain loops."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from ratp._core.environment import Randomness
from ratp.functional.losses import mean_over
from ratp.functional.negative_learning import (
    SelNLPLConfig,
    complementary_labels,
    negative_losses,
    rarity,
    select,
)

CLASSES = 4


def generator():
    return Randomness(0).generator("complementary labels")


def random_case(samples=30, seed=1):
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(samples, CLASSES, generator=random)
    return logits, torch.randint(CLASSES, (samples,), generator=random)


def probabilities(row):
    powers = [math.exp(value) for value in row]
    return [power / sum(powers) for power in powers]


def test_negative_learning_written_out():
    logits, labels = random_case()
    found = negative_losses(logits, labels)
    for row, label, loss in zip(logits.tolist(), labels.tolist(), found.tolist(), strict=True):
        assert loss == pytest.approx(-math.log(1 - probabilities(row)[label]), rel=1e-4, abs=1e-6)


def test_a_certain_wrong_prediction_gives_a_finite_loss_and_no_nan():
    logits = torch.tensor([[1000.0, 0, 0], [-1000.0, 0, 0]], requires_grad=True)
    losses = negative_losses(logits, torch.tensor([0, 0]))
    assert losses.tolist() == pytest.approx([-math.log(1e-5), 0], abs=1e-6)
    losses.sum().backward()
    assert logits.grad.isfinite().all()


def test_the_gradient_lowers_the_probability_of_the_complementary_class():
    logits = torch.zeros(1, 3, requires_grad=True)
    negative_losses(logits, torch.tensor([1])).sum().backward()
    assert logits.grad[0, 1] > 0 > logits.grad[0, 0] == logits.grad[0, 2]


def test_complementary_labels_are_all_other_classes_equally_often():
    labels = torch.arange(CLASSES).repeat(3000)
    found = complementary_labels(labels, CLASSES, generator())
    seen = Counter(zip(labels.tolist(), found.tolist(), strict=True))
    assert set(seen) == {(y, z) for y in range(CLASSES) for z in range(CLASSES) if y != z}
    assert all(count == pytest.approx(1000, rel=0.15) for count in seen.values())


def test_rare_labels_weigh_more():
    labels = [0] * 6 + [2] * 3 + [3]
    sizes = Counter(labels)
    assert rarity(torch.tensor(labels), CLASSES).tolist() == [max(sizes.values()) / sizes[y] for y in labels]


def by_hand(confidence, progress, threshold):
    """Which samples learn negatively and positively, sample by sample."""
    if progress < 1 / 3:
        return [True] * len(confidence), [False] * len(confidence)
    if progress < 2 / 3:
        return [c >= 1 / CLASSES for c in confidence], [False] * len(confidence)
    return [False] * len(confidence), [c >= threshold for c in confidence]


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_thirds_of_a_phase(threshold):
    confidence = [0.0, 0.2, 0.25, 0.3, 0.5, 0.79, 0.8, 1.0]
    config = SelNLPLConfig(threshold=threshold)
    for epoch in range(9):
        found = select(torch.tensor(confidence), CLASSES, epoch / 9, config)
        assert (found.negative.tolist(), found.positive.tolist()) == by_hand(confidence, epoch / 9, threshold)


def test_as_a_sum_both_selections_count_throughout():
    confidence = torch.tensor([0.1, 0.3, 0.6])
    for progress in (0, 0.5, 0.9):
        found = select(confidence, CLASSES, progress, SelNLPLConfig(order="sum"))
        assert found.negative.tolist() == [False, True, True]
        assert found.positive.tolist() == [False, False, True]


def test_one_class_has_no_complementary_labels():
    labels = torch.zeros(5, dtype=torch.int64)
    assert complementary_labels(labels, 1, generator()).tolist() == [0] * 5
    for progress in (0, 0.5):
        assert not select(torch.ones(5), 1, progress, SelNLPLConfig()).negative.any()


def test_an_empty_selection_gives_zero_and_no_gradient():
    logits, labels = random_case()
    logits.requires_grad_()
    loss = mean_over(negative_losses(logits, labels), torch.zeros(len(labels), dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()
