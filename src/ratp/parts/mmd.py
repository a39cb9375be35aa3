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


def conditional_mmd(features: Tensor, labels: Tensor) -> Tensor:
    """Mean MMD over the classes with two pairs or more; 0 if there are none. Shapes never depend on the labels.

    Args:
        features: a, then b, each of the class of the feature in its place; shape (2n, d).
        labels: Classes, shape (n,).
    """
    dtype = torch.promote_types(features.dtype, torch.float32)
    features, both = features.to(dtype), torch.cat([labels, labels])
    same = (both[:, None] == both[None, :]).to(dtype)
    count = same.sum(dim=1)  # of the class of each row, 2n
    squares = (features[:, None] - features[None, :]).square().sum(dim=2)
    # w = Σ‖x − y‖² / (2n·(2n − 1)) / 2²
    total = same @ (squares.detach() * same).sum(dim=1)
    width = (total / (count * (count - 1) * STEP ** (KERNELS // 2))).clamp_min(torch.finfo(dtype).tiny ** 0.5)
    kernel = (squares * (_factors(features.device, dtype) / width[:, None])).exp().sum(dim=0)
    # every class by its own n², and only where there are enough
    enough = (count >= 2 * FEWEST).to(dtype)
    weights = same * _signs(len(labels), features.device, dtype) * (enough / (count / 2).square())[:, None]
    # each of a class's 2n rows counts 1/2n of it
    return (kernel * weights).sum() / (enough / count).sum().clamp_min(1)


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
