"""Colour jitter and Gaussian blur of whole batches, with separate factors and order for every image.

Three of the four colour operations blend the image with its grey version and with the mean of that,

    x' = clamp(own·x + grey·Y(x) + mean·Ȳ(x), 0, 1),   Y = 0.2989·R + 0.587·G + 0.114·B

    brightness f:  own = f,  grey = 0,      mean = 0
    contrast f:    own = f,  grey = 0,      mean = 1 − f
    saturation f:  own = f,  grey = 1 − f,  mean = 0
    greyscale:     own = 0,  grey = 1,      mean = 0

so images at different operations share one step. The hue, which is costly and no blend, is rotated once: an image's
other operations happen in the steps before or after it, and its remaining steps apply the blend that changes nothing.
Four operations thus take six blends and one rotation; applying all at all positions would take twelve and four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Operation = Literal["brightness", "contrast", "saturation", "hue"]
SMALLEST_WIDTH = 1e-6
LUMINANCE = 0.2989, 0.587, 0.114
SMALLEST_CHROMA = torch.finfo(torch.float32).tiny


def blur(images: Tensor, sigmas: Tensor, radius: int) -> Tensor:
    """Blurs each image with a Gaussian of the given width, along columns, then rows, repeating the pixels at the edge.

    x'(u) = Σ_d w(d)·x(u + d),   w(d) ∝ exp(−d²/2σ²) for |d| ≤ radius,   Σ w = 1
    """
    return blur_inside(F.pad(images, (radius,) * 4, mode="replicate"), sigmas, radius)


def blur_inside(images: Tensor, sigmas: Tensor, radius: int) -> Tensor:
    """Blurs like :func:`blur`, but crops the outer ``radius`` pixels instead of padding."""
    distance = torch.arange(-radius, radius + 1, device=images.device)
    weights = (-0.5 * (distance / sigmas.clamp_min(SMALLEST_WIDTH)[:, None]).square()).exp()
    weights = weights / weights.sum(dim=1, keepdim=True)
    return _slide(_slide(images, weights, 3), weights, 2)


def _slide(images: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Weighted sums of neighbours along an axis, with weights (n, taps)."""
    length = images.shape[dim] - weights.shape[1] + 1
    first, *others = weights[:, :, None, None, None].unbind(dim=1)
    total = images.narrow(dim, 0, length) * first
    for start, weight in enumerate(others, start=1):
        total.addcmul_(images.narrow(dim, start, length), weight)
    return total


@dataclass(frozen=True)
class ColourPlan:
    """The colour operations of a batch: blends before the hue, its turns in full circles (n,) or None, blends after it.

    Blends have the shape (n, steps, 3) and hold the shares of image, grey image and mean.
    """

    before: Tensor
    turns: Tensor | None
    after: Tensor

    def __getitem__(self, rows: slice) -> ColourPlan:
        return ColourPlan(self.before[rows], None if self.turns is None else self.turns[rows], self.after[rows])


def plan_colours(
    operations: Sequence[Operation], order: Tensor | None, factors: Tensor | None, grey: Tensor | None
) -> ColourPlan | None:
    """Turns operations in any order into a plan; None when there is nothing to do."""
    plan = None
    if order is not None and factors is not None:
        columns = [_blend_of(operation, factors[:, index]) for index, operation in enumerate(operations)]
        blends = torch.stack(columns, dim=1).gather(1, order[:, :, None].expand(-1, -1, 3))
        if "hue" in operations:
            hue = operations.index("hue")
            position = (order == hue).int().argmax(dim=1)[:, None, None]
            steps = torch.arange(len(operations), device=order.device)[None, :, None]
            unchanged = _blend_of("hue", factors)
            before = torch.where(steps < position, blends, unchanged)[:, :-1]
            after = torch.where(steps > position, blends, unchanged)[:, 1:]
            plan = ColourPlan(before, factors[:, hue], after)
        else:
            plan = ColourPlan(blends, None, blends[:, :0])
    if grey is None:
        return plan
    last = _blend_of("saturation", 1 - grey.float())[:, None]
    plan = plan or ColourPlan(last[:, :0], None, last[:, :0])
    return ColourPlan(plan.before, plan.turns, torch.cat((plan.after, last), dim=1))


def apply_colours_(images: Tensor, plan: ColourPlan) -> Tensor:
    """Applies a plan to float images (n, 3, height, width) with values in [0, 1], in place."""
    for shares in plan.before.unbind(dim=1):
        blend_(images, shares)
    if plan.turns is not None:
        rotate_hue_(images, plan.turns)
    for shares in plan.after.unbind(dim=1):
        blend_(images, shares)
    return images


def blend_(images: Tensor, shares: Tensor) -> Tensor:
    """Blends images with their grey version and its mean, in place, by the three ``shares`` (n, 3) of each image."""
    own, grey, mean = shares[:, :, None, None].unbind(dim=1)
    luminance = images[:, 0] * LUMINANCE[0]
    luminance.add_(images[:, 1], alpha=LUMINANCE[1]).add_(images[:, 2], alpha=LUMINANCE[2])
    average = luminance.mean(dim=(1, 2), keepdim=True)
    rest = luminance.mul_(grey).add_(mean * average)
    # x' = clamp(own·x + grey·Y + mean·Ȳ, 0, 1)
    return images.mul_(own[:, None]).add_(rest[:, None]).clamp_(0, 1)


def rotate_hue_(images: Tensor, turns: Tensor) -> Tensor:
    """Rotates the hue of each image by ``turns`` (n,) full circles in place; keeps HSV's saturation and value.

    The hue is measured in sixths of the circle: red at 0, green at 2, blue at 4. Grey pixels stay.
    """
    red, green, blue = images.unbind(dim=1)
    lowest = torch.minimum(torch.minimum(red, green), blue)
    chroma = torch.maximum(torch.maximum(red, green), blue).sub_(lowest)
    # |h| = 1 + (g + b − r − min)/chroma, h ∈ [−3, 3] with the sign of g − b: all six sectors of HSV at once
    size = (green - red).add_(blue - lowest).div_(chroma.clamp_min(SMALLEST_CHROMA)).add_(1)
    hue = size.copysign_(green - blue).add_(6 * turns[:, None, None])
    # h ← h mod 6
    hue.sub_((hue / 6).floor_(), alpha=6)
    # x' = min + chroma·level:  R = clamp(|h−3| − 1),  G = clamp(2 − |h−2|),  B = clamp(2 − |h−4|)
    levels = ((hue - 3).abs_() - 1, 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_())
    for channel, level in zip((red, green, blue), levels, strict=True):
        torch.addcmul(lowest, chroma, level.clamp_(0, 1), out=channel)
    return images


def _blend_of(operation: Operation, factor: Tensor) -> Tensor:
    """The three shares of an operation; the hue's change nothing."""
    one, zero, rest = torch.ones_like(factor), torch.zeros_like(factor), 1 - factor
    shares = {
        "brightness": (factor, zero, zero),
        "contrast": (factor, zero, rest),
        "saturation": (factor, rest, zero),
        "hue": (one, zero, zero),
    }
    return torch.stack(shares[operation], dim=-1)
