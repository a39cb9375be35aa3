"""Networks that follow another one slowly."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def follow_(averages: Iterable[Tensor], values: Iterable[Tensor], keep: float) -> None:
    """Moves averages towards values, in place; the tensors of both come in the same order.

    Args:
        averages: What follows.
        values: What is followed.
        keep: Share of an average that stays; 1: it never moves.
    """
    # θ̄ ← keep·θ̄ + (1 − keep)·θ
    torch._foreach_lerp_(list(averages), list(values), 1 - keep)
