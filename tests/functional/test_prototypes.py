"""Prototype learning: means of domains' class means, and the loss towards them."""

from __future__ import annotations

import math

import pytest
import torch

from ratp.functional.pseudo_labels import domain_average, prototype_learning


def test_every_domain_counts_the_same():
    """However many samples of a class it has."""
    features = torch.tensor([[2.0, 0.0], [4.0, 0.0], [6.0, 0.0], [0.0, 5.0], [0.0, -1.0]])
    labels, domains = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([0, 0, 0, 1, 1])
    means, there = domain_average(features, labels, domains, 3)
    torch.testing.assert_close(means, torch.tensor([[0.5, 0.5], [0.0, -1.0], [0.0, 0.0]]))
    assert there.tolist() == [True, True, False]


def test_the_loss_is_a_softmax_over_the_classes_that_have_a_prototype():
    features = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 7.0], [1.0, 0.0]])
    there = torch.tensor([True, True, False])
    losses = prototype_learning(features, torch.tensor([0, 0]), prototypes, there, 12.0)
    expected = [math.log(1 + math.exp(-12)), math.log(1 + math.exp(12))]
    assert losses.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_class_without_a_prototype_has_no_loss_and_no_gradient():
    features = torch.ones(2, 2, requires_grad=True)
    losses = prototype_learning(features, torch.tensor([0, 1]), torch.zeros(2, 2), torch.tensor([True, False]), 12.0)
    assert losses[1] == 0
    none = prototype_learning(features, torch.tensor([0, 1]), torch.zeros(2, 2), torch.zeros(2) > 0, 12.0)
    (slope,) = torch.autograd.grad(none.sum(), features)
    assert not none.any() and not slope.any()
