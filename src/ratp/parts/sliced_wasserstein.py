"""Sliced Wasserstein distance between two sets of points.

On a line, the squared 2-Wasserstein distance of two distributions compares their quantiles:

    W₂² = ∫ (F⁻¹(u) − G⁻¹(u))² du

and for two sets of n points it is the mean squared difference of the sorted points. Sliced, it is the mean of these
over random directions that the points are projected on. Of sets that differ in size, the smaller one's quantiles are
interpolated at the levels of the larger one's points, (i + ½)/m.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def draw_directions(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Unit vectors, uniform on the sphere, shape (count, dim)."""
    return F.normalize(torch.randn(count, dim, generator=generator, device=generator.device), dim=1)


def sliced_wasserstein(some: Tensor, others: Tensor, directions: Tensor) -> Tensor:
    """Mean over directions of the squared 2-Wasserstein distance of projected points.

    Args:
        some: Points, shape (n, d).
        others: Points, shape (m, d).
        directions: Unit vectors, shape (p, d).
    """
    return sorted_distance(sorted_projections(some, directions), sorted_projections(others, directions))


def sorted_projections(points: Tensor, directions: Tensor) -> Tensor:
    """Points (n, d) projected on each direction (p, d) and sorted along it, shape (n, p)."""
    return (points @ directions.T).sort(dim=0).values


def sorted_distance(some: Tensor, others: Tensor) -> Tensor:
    """Mean over columns of the squared 2-Wasserstein distance of sorted numbers, shapes (n, p) and (m, p)."""
    size = max(len(some), len(others))
    return (_quantiles(some, size) - _quantiles(others, size)).square().mean()


def _quantiles(ordered: Tensor, count: int) -> Tensor:
    """Quantiles of sorted numbers (n, p) at ``count`` levels, linear between the points, shape (count, p).

    By a product with a matrix, for gathering would add up its gradient in no certain order.
    """
    own = len(ordered)
    if own == count:
        return ordered
    levels = (torch.arange(count, dtype=torch.float64, device=ordered.device) + 0.5) / count
    places = (levels * own - 0.5).clamp(0, own - 1)
    points = torch.arange(own, dtype=torch.float64, device=ordered.device)
    # weight of point j at place x: 1 − |x − j|, at least 0
    weights = (1 - (places[:, None] - points[None, :]).abs()).clamp_min(0)
    return weights.to(ordered.dtype) @ ordered
