"""Maximum mean discrepancy (MMD) of two sets of features, class by class, with Gaussian kernels of several widths.

For the pairs (a_i, b_i) of one class, n of them,

    MMD = 1/n² · Σ_ij [k(a_i, a_j) + k(b_i, b_j) − 2·k(a_i, b_j)],   k(x, y) = Σ_{m=0..4} exp(−‖x − y‖² / (w·2^m))

where 4w is the mean squared distance between two different ones of the 2n features, taken as a number.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

KERNELS, STEP = 5, 2.0
# Fewer pairs than this tell nothing about a class.
FEWEST = 2


def conditional_mmd(some: Tensor, others: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean MMD over the classes with two pairs or more; 0 if there are none. Shapes never depend on the labels.

    Args:
        some: a, shape (n, d).
        others: b, shape (n, d); each of the class of the feature in its place.
        labels: Classes, shape (n,).
        classes: Number of classes.
    """
    dtype = torch.promote_types(some.dtype, torch.float32)
    features, both = torch.cat([some, others]).to(dtype), torch.cat([labels, labels])
    members = (labels[:, None] == torch.arange(classes, device=labels.device)).to(dtype)
    pairs = members.sum(dim=0)
    same = (both[:, None] == both[None, :]).to(dtype)
    squares = (features[:, None] - features[None, :]).square().sum(dim=2)
    # w = Σ‖x − y‖² / (2n·(2n − 1)) / 2², for the class of each row
    in_class = (squares.detach() * same).sum(dim=1)
    rows = torch.cat([members, members])
    total, count = rows.T @ in_class, 2 * pairs
    widths = total / (count * (count - 1)).clamp_min(1) / STEP ** (KERNELS // 2)
    width = (rows @ widths)[:, None].clamp_min(torch.finfo(dtype).tiny ** 0.5)
    kernel = (squares / width * _factors(features.device, dtype)).exp().sum(dim=0)
    # every class by its own n², and only where there are enough
    enough = (pairs >= FEWEST).to(dtype)
    share = rows @ (enough / pairs.clamp_min(1).square())
    weights = same * _signs(len(labels), features.device, dtype) * share[:, None]
    return (kernel * weights).sum() / enough.sum().clamp_min(1)


@cache
def _factors(device: torch.device, dtype: torch.dtype) -> Tensor:
    """−1/2^m, shape (kernels, 1, 1)."""
    return (-(STEP ** -torch.arange(KERNELS, dtype=dtype)))[:, None, None].to(device)


@cache
def _signs(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """+ within a and within b, − between them, shape (2n, 2n)."""
    side = torch.ones(2 * count, dtype=dtype)
    side[count:] = -1
    return (side[:, None] * side[None, :]).to(device)  # complete, whichever stream asks for it
