"""Random views of images as CoTTA (CVPR 2022) draws them; RMT and ROID take theirs from it.

A view changes, in this order: brightness, contrast, saturation, hue and gamma, in random order; rotation, shift and
scale about the centre; a slight blur; mirroring; noise. Values are clipped to [0, 1]. The published code pads images by
half their side, transforms all of it and cuts out the centre. Here only the pixels of that centre are computed, and
positions outside the image take the colour of its edge, as in the padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.functional.colour import blend_, blur_inside, rotate_hue_

# Factors of brightness, contrast and saturation; rotation of the hue, in full circles; exponents of gamma.
RANGES = (0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3)
BRIGHTNESS, CONTRAST, SATURATION, HUE, GAMMA = range(len(RANGES))
ANGLE = math.radians(15)
SHIFT = 1 / 16  # of the padded side
SCALES = 0.9, 1.1
BLUR_RADIUS, BLUR_WIDTHS = 2, (0.001, 0.5)
NOISE = 0.005


@dataclass(frozen=True)
class CoTTADraw:
    """All random numbers of one call, a row per image."""

    order: Tensor  # the colour operation at each of five positions (n, 5)
    factors: Tensor  # the parameter of each colour operation (n, 5), in the order of ``RANGES``
    angles: Tensor  # rotations in radians (n,)
    shifts: Tensor  # to the right and down, whole pixels (n, 2)
    scales: Tensor  # magnifications (n,)
    widths: Tensor  # of the blur (n,)
    flip: Tensor  # which images are mirrored left to right (n,)
    noise: Tensor  # added at the end (n, 3, height, width)


class CoTTAView:
    """Random views of images, mirrored left to right with probability ``flip``."""

    def __init__(self, flip: float) -> None:
        self.flip = flip

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Returns a view of each image; images and views are floats in [0, 1]."""
        return self.apply(images, self.draw(images.shape, generator))

    def draw(self, shape: torch.Size, generator: torch.Generator) -> CoTTADraw:
        """Draws all random numbers for images of ``shape``."""
        count, device = shape[0], generator.device
        order = torch.rand(count, len(RANGES), generator=generator, device=device).argsort(dim=1)
        uniform = torch.rand(count, len(RANGES) + 6, generator=generator, device=device)
        colours, (angle, right, down, scale, width, flip) = uniform[:, :5], uniform[:, 5:].unbind(dim=1)
        low, high = torch.tensor(RANGES, device=device).unbind(dim=1)
        farthest = [SHIFT * (side + 2 * (side // 2)) for side in (shape[3], shape[2])]
        shifts = [(most * (2 * u - 1)).round() for most, u in zip(farthest, (right, down), strict=True)]
        return CoTTADraw(
            order=order,
            factors=low + (high - low) * colours,
            angles=ANGLE * (2 * angle - 1),
            shifts=torch.stack(shifts, dim=1),
            scales=SCALES[0] + (SCALES[1] - SCALES[0]) * scale,
            widths=BLUR_WIDTHS[0] + (BLUR_WIDTHS[1] - BLUR_WIDTHS[0]) * width,
            flip=flip < self.flip,
            noise=NOISE * torch.randn(shape, generator=generator, device=device),
        )

    @torch.no_grad()
    def apply(self, images: Tensor, draw: CoTTADraw) -> Tensor:
        """Returns views of images for the given random numbers."""
        views = recolour(images.clamp(0, 1), draw.order, draw.factors)
        views = blur_inside(warp(views, draw, BLUR_RADIUS), draw.widths, BLUR_RADIUS)
        views = torch.where(draw.flip[:, None, None, None], views.flip(3), views)
        return views.add_(draw.noise).clamp_(0, 1)


def recolour(images: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Applies the five colour operations to each image in its own order.

    Blends and gamma are neutral for images whose turn it is not. The costly hue rotation runs once, between the
    operations that precede it and those that follow.
    """
    images = images.clone()
    hue_at = (order == HUE).int().argmax(dim=1)
    last = order.shape[1] - 1
    for position in range(last):  # nothing precedes the hue from the last position
        _step_(images, order[:, position], factors, hue_at > position)
    rotate_hue_(images, factors[:, HUE])
    for position in range(1, last + 1):
        _step_(images, order[:, position], factors, hue_at < position)
    return images


def _step_(images: Tensor, operation: Tensor, factors: Tensor, active: Tensor) -> None:
    """Applies one operation to each ``active`` image: a blend with its grey version or its mean, or gamma."""
    factor = factors.gather(1, operation[:, None])[:, 0]
    blends = active & (operation <= SATURATION)
    own = torch.where(blends, factor, 1)
    grey = torch.where(blends & (operation == SATURATION), 1 - factor, 0)
    mean = torch.where(blends & (operation == CONTRAST), 1 - factor, 0)
    blend_(images, torch.stack((own, grey, mean), dim=1))
    # x ← x^γ
    images.pow_(torch.where(active & (operation == GAMMA), factor, 1)[:, None, None, None])


def warp(images: Tensor, draw: CoTTADraw, margin: int) -> Tensor:
    """Rotates, shifts and scales images about their centres; the result is larger by ``margin`` on each side."""
    height, width = images.shape[2:]
    x = torch.arange(-margin, width + margin, device=images.device) - (width - 1) / 2
    y = torch.arange(-margin, height + margin, device=images.device) - (height - 1) / 2
    right, down = draw.shifts[:, :, None, None].unbind(dim=1)
    across, along = x[None, None, :] - right, y[None, :, None] - down
    # u = R(φ)ᵀ·(v − t)/s: the position in the image that pixel v of the result comes from
    cosine = (draw.angles.cos() / draw.scales)[:, None, None]
    sine = (draw.angles.sin() / draw.scales)[:, None, None]
    grid = torch.stack(
        ((cosine * across + sine * along) * (2 / width), (cosine * along - sine * across) * (2 / height)), dim=3
    )
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
