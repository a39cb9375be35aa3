"""Places within groups."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks_within(groups: Tensor, order: Tensor | None = None) -> Tensor:
    """How many elements of its own group come before each: 0, 1, 2, … in every group.

    Args:
        groups: Group of every element, shape (n,), whole numbers from 0.
        order: Positions of all elements, the first one's first; None: as they lie.
    """
    place = torch.arange(len(groups), device=groups.device)
    order = place if order is None else order
    order = order[groups[order].argsort(stable=True)]
    sizes = groups.bincount()
    ranks = torch.empty_like(place)
    ranks[order] = place - (sizes.cumsum(0) - sizes)[groups[order]]
    return ranks
