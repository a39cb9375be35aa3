"""Sliced Wasserstein distance: by hand, by scipy's one-dimensional one, and by what must not change it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratp.methods.aucid import draw_directions, sorted_distance, sorted_projections

LINE = torch.ones(1, 1)


def sliced_wasserstein(some, others, directions):
    return sorted_distance(sorted_projections(some, directions), sorted_projections(others, directions))


def column(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


def points(count, dim=3, seed=0):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def directions(count=20, dim=3):
    return draw_directions(count, dim, torch.Generator().manual_seed(5)).double()


def quantiles(numbers, levels):
    """Linear between the middles of n equal parts, by numpy."""
    ordered = np.sort(np.asarray(numbers))
    return np.interp(levels, (np.arange(len(ordered)) + 0.5) / len(ordered), ordered)


def test_golden():
    assert sliced_wasserstein(column(4, 0, 2), column(1, 6, 1), LINE.double()).item() == 2.0


def test_a_set_is_at_no_distance_from_itself_in_any_order():
    some = points(17)
    assert sliced_wasserstein(some, some, directions()) == 0
    order = torch.randperm(17, generator=torch.Generator().manual_seed(2))
    assert sliced_wasserstein(some, some[order], directions()).item() == pytest.approx(0, abs=1e-25)
    other = points(17, seed=1)
    torch.testing.assert_close(
        sliced_wasserstein(some[order], other, directions()), sliced_wasserstein(some, other, directions())
    )


@given(sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)), seed=st.integers(0, 99))
def test_it_is_the_distance_of_quantiles(sizes, seed):
    some, others = points(sizes[0], 1, seed), points(sizes[1], 1, seed + 100)
    levels = (np.arange(max(sizes)) + 0.5) / max(sizes)
    gaps = quantiles(some[:, 0].numpy(), levels) - quantiles(others[:, 0].numpy(), levels)
    expected = float((gaps**2).mean())
    found = sliced_wasserstein(some, others, LINE.double())
    assert found.item() == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert sliced_wasserstein(others, some, LINE.double()).item() == pytest.approx(found.item(), rel=1e-9, abs=1e-15)


def test_a_shift_is_its_square_whatever_the_sizes():
    """Along a direction θ it is (θ·t)²; a set repeated is the same distribution."""
    some, shift = points(6), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    rays = directions(400)
    expected = (rays @ shift).square().mean()
    torch.testing.assert_close(sliced_wasserstein(some, some + shift, rays), expected)
    # over all directions ‖t‖²/d
    assert expected.item() == pytest.approx(5.25 / 3, rel=0.15)
    many = points(4000, seed=3)
    few = points(500, seed=4) + shift
    assert sliced_wasserstein(few, many, rays).item() == pytest.approx(expected.item(), rel=0.15)


def test_directions_are_unit_vectors_drawn_from_the_generator():
    sample = directions(50, 8)
    torch.testing.assert_close(sample.norm(dim=1), torch.ones(50, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert torch.equal(sample, directions(50, 8))


@pytest.mark.parametrize("sizes", [(5, 5), (3, 8), (8, 3), (1, 4)])
def test_its_gradient(sizes):
    some, others = points(sizes[0]).requires_grad_(), points(sizes[1], seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: sliced_wasserstein(a, b, directions(4)), (some, others))
