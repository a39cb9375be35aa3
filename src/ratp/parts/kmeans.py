"""K-means on several sets of points at once, without chance."""

from __future__ import annotations

import torch
from torch import Tensor

from ratp.parts.exact import full_precision


def kmeans(points: Tensor, centres: int, iterations: int = 100) -> Tensor:
    """Centres of each set of points, shape (g, centres, d).

    The first centre is a set's first point, each further one the point farthest from those before. Where there are
    fewer points than centres, points are repeated; a centre that no point is nearest to stays where it is.

    Args:
        points: One or more sets of as many points each, at least one, shape (g, n, d).
        centres: Centres a set.
        iterations: Rounds of assignment and mean, at most; it ends when no point moves to another centre.
    """
    with full_precision(points.device):
        points = points.float()
        found = _farthest_first(points, centres)
        last: Tensor | None = None
        for _ in range(iterations):
            nearest = _distances(points, found).argmin(dim=2)
            if last is not None and torch.equal(nearest, last):
                break
            last = nearest
            members = torch.nn.functional.one_hot(nearest, centres).to(points.dtype)
            sizes = members.sum(dim=1)[:, :, None]
            found = torch.where(sizes > 0, members.mT @ points / sizes.clamp_min(1), found)
        return found


def _farthest_first(points: Tensor, centres: int) -> Tensor:
    chosen = points[:, :1]
    for _ in range(1, centres):
        gap = _distances(points, chosen).amin(dim=2)
        place = gap.argmax(dim=1)[:, None, None].expand(-1, 1, points.shape[2])
        chosen = torch.cat([chosen, points.gather(1, place)], dim=1)
    return chosen


def _distances(points: Tensor, centres: Tensor) -> Tensor:
    """Squared distances (g, n, c); what rounding leaves below zero is zero."""
    squares = points.square().sum(dim=2)[:, :, None] + centres.square().sum(dim=2)[:, None, :]
    return (squares - 2 * points @ centres.mT).clamp_min(0)
