"""Gaussian blur of whole batches: every image has a width of its own.

    x'(u) = Σ_d w(d)·x(u + d),   w(d) ∝ exp(−d²/2σ²) for |d| ≤ radius,   Σ w = 1

along columns, then along rows. With σ = 0 an image stays as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

SMALLEST_WIDTH = 1e-6


def blur(images: Tensor, sigmas: Tensor, radius: int) -> Tensor:
    """Blurred images of the same size; pixels at the edge go on beyond it.

    Args:
        images: Float, shape (n, channels, height, width).
        sigmas: Widths in pixels, shape (n,).
        radius: Where the Gaussian is cut off, in pixels.
    """
    return blur_inside(F.pad(images, (radius,) * 4, mode="replicate"), sigmas, radius)


def blur_inside(images: Tensor, sigmas: Tensor, radius: int) -> Tensor:
    """The same without the outer ``radius`` pixels of the images, which are looked at only."""
    distance = torch.arange(-radius, radius + 1, device=images.device)
    weights = (-0.5 * (distance / sigmas.clamp_min(SMALLEST_WIDTH)[:, None]).square()).exp()
    weights = weights / weights.sum(dim=1, keepdim=True)
    return _slide(_slide(images, weights, 3), weights, 2)


def _slide(images: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Weighted sums along an axis, of as many neighbours as there are weights (n, taps)."""
    length = images.shape[dim] - weights.shape[1] + 1
    first, *others = weights[:, :, None, None, None].unbind(dim=1)
    total = images.narrow(dim, 0, length) * first
    for start, weight in enumerate(others, start=1):
        total.addcmul_(images.narrow(dim, start, length), weight)
    return total
