"""Maximum mean discrepancy, class by class."""

from __future__ import annotations

import pytest
import torch

from ratp.methods import l2d as mmd


def conditional_mmd(some, others, labels):
    return mmd.conditional_mmd(torch.cat([some, others]), labels)


def plain_mmd(some, others):
    """One class, pair by pair."""
    points = torch.cat([some, others]).double()
    count, half = len(points), len(some)
    squares = [[float((x - y).square().sum()) for y in points] for x in points]
    width = sum(map(sum, squares)) / (count * (count - 1)) / 4
    total = 0.0
    for i in range(count):
        for j in range(count):
            kernel = sum(torch.exp(torch.tensor(-squares[i][j] / (width * 2**m))).item() for m in range(5))
            total += kernel if (i < half) == (j < half) else -kernel
    return total / half**2


def features(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_golden_value():
    some, others = torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0]])
    labels = torch.zeros(2, dtype=torch.int64)
    assert conditional_mmd(some, others, labels).item() == pytest.approx(4.579796, abs=2e-6)
    assert conditional_mmd(some, others, labels + 6).item() == pytest.approx(4.579796, abs=2e-6)


def test_a_set_does_not_differ_from_itself():
    some = features(9, 4)
    assert conditional_mmd(some, some, torch.arange(9) % 3).item() == pytest.approx(0, abs=1e-6)


def test_it_is_the_mean_over_classes_each_with_its_own_width():
    some, others, labels = (
        features(12, 5),
        3 + features(12, 5, seed=1),
        torch.tensor([0, 1, 1, 2, 0, 2, 2, 1, 0, 2, 0, 2]),
    )
    others[labels == 1] *= 50
    expected = sum(plain_mmd(some[labels == c], others[labels == c]) for c in range(3)) / 3
    assert conditional_mmd(some, others, labels).item() == pytest.approx(expected, rel=1e-5)
    order = features(12, seed=2).argsort()
    torch.testing.assert_close(
        conditional_mmd(some[order], others[order], labels[order]), conditional_mmd(some, others, labels)
    )


def test_classes_with_fewer_than_two_pairs_do_not_count():
    some, others = features(4, 3), 2 + features(4, 3, seed=1)
    alone = conditional_mmd(some[:3], others[:3], torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(conditional_mmd(some, others, torch.tensor([0, 0, 0, 4])), alone)


@pytest.mark.parametrize("labels", [[0], [0, 1, 2], [0, 0, 0], [1, 1, 2]])
@pytest.mark.parametrize("equal", [False, True])
def test_it_and_its_gradient_are_numbers(labels, equal):
    some = (torch.ones(len(labels), 3) if equal else 1e3 * features(len(labels), 3)).requires_grad_()
    others = torch.ones(len(labels), 3)
    result = conditional_mmd(some, others, torch.tensor(labels))
    (slope,) = torch.autograd.grad(result, some)
    assert result.isfinite() and slope.isfinite().all()
    if len(set(labels)) == len(labels):
        assert result == 0 and not slope.any()


def test_descent_brings_the_sets_together():
    some, others, labels = (2 + features(8, 2)).requires_grad_(), features(8, 2, seed=1), torch.arange(8) % 2
    first = conditional_mmd(some, others, labels)
    (slope,) = torch.autograd.grad(first, some)
    assert conditional_mmd(some - 0.1 * slope, others, labels) < first
