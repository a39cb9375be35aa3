"""A bound of mutual information, and the guess it rests on."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from ratp.methods.l2d import information_bound, misfit, random_order

MEAN = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
LOG_VARIANCE = torch.tensor([[0.0, math.log(4)], [math.log(2), 0.0]])
SAMPLES = torch.tensor([[1.0, 1.0], [0.0, 3.0]])


def test_the_bound_of_a_known_example():
    # own: 1/1 + 0/4 and 4/2 + 9/1; the other's: 0/1 + 4/4 and 1/2 + 1/1
    expected = ((1 - 1) + (1.5 - 11)) / 2 / 2
    assert information_bound(MEAN, LOG_VARIANCE, SAMPLES, torch.tensor([1, 0])).item() == pytest.approx(expected)


def test_in_their_own_order_samples_tell_nothing():
    assert information_bound(MEAN, LOG_VARIANCE, SAMPLES, torch.arange(2)) == 0


def test_the_misfit_is_the_likelihood_but_for_constants():
    normal = Normal(MEAN, (LOG_VARIANCE / 2).exp())
    expected = -2 * normal.log_prob(SAMPLES).mean() - math.log(2 * math.pi)
    torch.testing.assert_close(misfit(MEAN, LOG_VARIANCE, SAMPLES), expected)


def test_what_is_alike_has_more_in_common_than_what_is_not():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(200, 4, generator=generator)
    order, none = random_order(200, generator), torch.zeros(200, 4)
    alike = information_bound(mean, none, mean + 0.1 * torch.randn(200, 4, generator=generator), order)
    strange = information_bound(mean, none, torch.randn(200, 4, generator=generator), order)
    assert alike > 3
    assert abs(strange) < 0.5


def test_an_order_is_a_permutation_and_comes_from_the_generator():
    order = random_order(50, torch.Generator().manual_seed(3))
    assert torch.equal(order.sort().values, torch.arange(50))
    assert not torch.equal(order, torch.arange(50))
    assert torch.equal(order, random_order(50, torch.Generator().manual_seed(3)))
