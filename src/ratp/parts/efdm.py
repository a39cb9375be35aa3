"""Exact feature distribution mixing (EFDM), CVPR 2022, section 3.

The style of an image is how the values of its feature maps are distributed. Matching gives a content image the values
of a style image, channel by channel: the smallest where the content has its smallest, and so on. Mixing goes only part
of the way, by a random weight λ that is mostly near 0 or 1:

    out = x + (1 − λ)·(style values at the ranks of x − sg(x)),   λ ~ Beta(α, α) an image

where sg stops the gradient: it passes to x unchanged, and to the style by 1 − λ.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ratp.parts.beta import beta_numbers

Styles = Literal["batch", "second half"]


def exact_mixing(content: Tensor, style: Tensor, weight: Tensor) -> Tensor:
    """Content with the distribution of values moved towards the style's.

    Equal values of the content keep their order: which of them gets which style value is fixed, if arbitrary.

    Args:
        content: x, shape (n, channels, …).
        style: As many values an image and channel.
        weight: λ, how much of the content is kept, shape (n,).
    """
    order = content.flatten(2).argsort(dim=2, stable=True)
    # The value for the place order[i] is the style's i-th smallest.
    matched = torch.zeros_like(style.flatten(2)).scatter(2, order, style.flatten(2).sort(dim=2).values)
    rest = (1 - weight).to(content.dtype).reshape(-1, *(1,) * (content.ndim - 1))
    return content + rest * (matched.reshape(content.shape) - content.detach())


class ExactMixing(nn.Module):
    """Mixes feature maps of images with those of others while training, in a share of the batches.

    It has no parameters. In the batches it leaves alone, λ is 1: a step has the same shapes every time.

    Attributes:
        generator: What it draws from.
        styles: Where styles come from: other images of the batch, at random, or its second half, one to one, which
            stays as it is itself.
    """

    def __init__(self, probability: float, alpha: float) -> None:
        """Makes a layer.

        Args:
            probability: Share of the batches that are mixed.
            alpha: α of the distribution of λ.
        """
        super().__init__()
        self.probability, self.alpha = probability, alpha
        self.generator: torch.Generator | None = None
        self.styles: Styles = "batch"

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps, mixed while training."""
        if not self.training:
            return x
        if self.styles == "batch":
            other = torch.rand(len(x), generator=self.generator, device=x.device).argsort()
            return exact_mixing(x, x[other], self._weights(len(x), x.device))
        content, style = x.chunk(2)
        return torch.cat([exact_mixing(content, style, self._weights(len(content), x.device)), style])

    def _weights(self, count: int, device: torch.device) -> Tensor:
        weights = beta_numbers(self.alpha, self.alpha, count, self.generator, device)
        mixes = torch.rand(1, generator=self.generator, device=device) < self.probability
        return torch.where(mixes, weights, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactMixing:
        """A copy without the generator: two modules drawing from one would shift each other's numbers."""
        copy = ExactMixing(self.probability, self.alpha).train(self.training)
        copy.styles = self.styles
        return copy
