"""What L2D's style module draws for a use, and how it puts a style on images."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Chance(NamedTuple):
    """What is drawn for a use of the module, beside its convolutions.

    Attributes:
        weights: Of the branches, colours first.
        keep: Which colours stay, bool like the images.
    """

    weights: Tensor
    keep: Tensor


class Blend(NamedTuple):
    """How a new style is put on images: x̃ = a·(σ(style) − mean)/std + (1 − a)·x.

    Attributes:
        share: a.
        mean: By channel, what normalised images were shifted by.
        std: By channel, what they were divided by.
    """

    share: float
    mean: Tensor
    std: Tensor

    def __call__(self, images: Tensor, styles: Tensor) -> Tensor:
        """x̃ of normalised images and what the module makes of them."""
        factor = self.share / self.std
        offset = -self.mean * factor
        unit = styles.sigmoid()
        return unit * factor.view(1, -1, 1, 1) + offset.view(1, -1, 1, 1) + (1 - self.share) * images
