"""Generators of PDEN, "Progressive Domain Expansion Network" (CVPR 2021), section 3.2: an image in, an image out.

    G(x, n) = σ( C₄ r(C₃ A(r(C₂ r(C₁ x)), n)) ),   A(h, n) = (1 + γ)·IN(h) + β,   (γ, β) = linear(n),   n ~ N(0, I)

with 3×3 convolutions C of 16, 32, 64 and 3 channels and r = ReLU. Images have values in [0, 1]. A generator without
noise has no A.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call

from ratp.errors import RatpError

CHANNELS = 3
WIDTH = 16
NOISE_DIM = 10
EPSILON = 1e-5
# Output channels of the last layer on a GPU. For three, cuDNN took a kernel without tensor cores: a quarter of a
# millisecond for 64 pictures of 32×32 on an H200.
WIDE = 8


class ImageGenerator(nn.Module):
    """Makes images of another look.

    Attributes:
        layers: C₁ to C₄.
        noise: The linear layer of A; None: there is no A.
    """

    def __init__(self, *, noisy: bool = True) -> None:
        """Makes a generator with random numbers, drawn from torch's generator.

        Args:
            noisy: Whether it takes noise.
        """
        super().__init__()
        widths = CHANNELS, WIDTH, 2 * WIDTH, 4 * WIDTH, CHANNELS
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, kernel_size=3, padding=1) for before, after in pairwise(widths)
        )
        self.noise = nn.Linear(NOISE_DIM, 2 * 2 * WIDTH) if noisy else None

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Images with values in (0, 1).

        Args:
            images: Values in [0, 1], shape (n, 3, height, width).
            noise: n, shape (n, 10), for a generator that takes it.
        """
        return self.draw(self.look(images), noise)

    def look(self, images: Tensor) -> Tensor:
        """IN(r(C₂ r(C₁ x))), which all draws from the same images have in common; without A, what IN would take.

        Args:
            images: As for a whole pass.
        """
        first, second, _, _ = self.layers
        hidden = F.relu(second(F.relu(first(images))))
        if self.noise is None:
            return hidden
        variance, mean = torch.var_mean(hidden, dim=(2, 3), correction=0, keepdim=True)
        return (hidden - mean) * (variance + EPSILON).rsqrt()

    def draw(self, seen: Tensor, noise: Tensor | None = None) -> Tensor:
        """Images with values in (0, 1).

        Args:
            seen: What :meth:`look` gave.
            noise: As for a whole pass.
        """
        _, _, third, last = self.layers
        if self.noise is not None and noise is not None:
            scale, shift = self.noise(noise)[:, :, None, None].chunk(2, dim=1)
            seen = (1 + scale) * seen + shift
        hidden = F.relu(third(seen))
        return torch.sigmoid(widened(cast(nn.Conv2d, last), hidden) if hidden.is_cuda else last(hidden))

    if TYPE_CHECKING:

        def __call__(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
            """Types what ``nn.Module`` leaves untyped."""


def widened(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """What a convolution to a few channels gives, computed with further ones whose weights are zero.

    Args:
        layer: The convolution, of stride 1.
        images: What it is given.
    """
    missing = max(0, WIDE - layer.out_channels)
    weight = F.pad(layer.weight, (0, 0, 0, 0, 0, 0, 0, missing))
    bias = None if layer.bias is None else F.pad(layer.bias, (0, missing))
    return F.conv2d(images, weight, bias, padding=layer.padding)[:, : layer.out_channels]


class GeneratorPool:
    """Generators that have learnt; one at a time makes images, and which one is a number on the device.

    Args:
        generators: One or more, all alike in shape. Their numbers are copied.
    """

    def __init__(self, generators: Sequence[ImageGenerator]) -> None:
        if not generators:
            raise RatpError("a pool needs a generator at least.")
        self._shape = generators[0]
        names = [name for name, _ in self._shape.named_parameters()]
        self._numbers = {
            name: torch.stack([generator.get_parameter(name).detach() for generator in generators]) for name in names
        }
        self.size = len(generators)

    def __call__(self, images: Tensor, noise: Tensor, which: Tensor) -> Tensor:
        """What one generator makes of images; no gradient is recorded.

        Args:
            images: Values in [0, 1], shape (n, 3, height, width).
            noise: Shape (n, 10).
            which: Its place in the pool, whole number of shape (1,).
        """
        with torch.no_grad():
            chosen = {name: numbers.index_select(0, which).squeeze(0) for name, numbers in self._numbers.items()}
            return cast(Tensor, functional_call(self._shape, chosen, (images, noise)))


def diversity(some: Tensor, others: Tensor, limit: float) -> Tensor:
    """How far the images of two draws are apart: mean over images of min(mean |x − x′|, δ).

    Args:
        some: x, shape (n, 3, height, width).
        others: x′, likewise.
        limit: δ; no image counts for more.
    """
    return (some - others).abs().mean(dim=(1, 2, 3)).clamp(max=limit).mean()
