"""Pro-RandConv: augmentation by one small random convolution, repeated; Choi et al., CVPR 2023.

A block is a random convolution, a standardisation of each image and channel, a random affine map and tanh. It is
applied L times with the same numbers:

    x ← tanh( γ·(w ∗ x − μ)/s + β ),   L ~ U{1, …, 10},   γ, β ~ N(0, ½²)

The kernel is Gaussian noise, which a bell curve of random width fades out towards its edge:

    w_ij = n_ij·e^{−(i² + j²)/(2σ²)},   n ~ N(0, 1/27),   σ ~ U(0.01, 1)

One draw serves a batch, as in the paper. Guesses, where this package has no source for the detail: the lower end of σ,
zeros around the image, no bias, the same γ and β in all repetitions, and the last step, which brings (−1, 1) to the
range of the network's input. The paper's deformable offsets are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ratp.functional import kernels
from ratp.functional.randmix import CHANNELS, Linear, convolution

REPEATS = 10
SIZE = 3
DEVIATION = 0.5
SMALLEST_WIDTH = 0.01
EPSILON = 1e-5


class Draw(NamedTuple):
    """All random numbers of one call: kernel w, factors γ and shifts β per channel, repetitions L as a tensor."""

    kernel: Tensor
    scale: Tensor
    shift: Tensor
    repeats: Tensor


class ProRandConv:
    """Pro-RandConv for images normalised with ``mean`` and ``std``."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self._mean, self._std = mean.reshape(1, CHANNELS, 1, 1), std.reshape(1, CHANNELS, 1, 1)
        offsets = torch.arange(SIZE, device=mean.device) - SIZE // 2
        # i² + j²
        self._distances = offsets.square()[:, None] + offsets.square()[None, :]

    def __call__(self, images: Tensor, generator: torch.Generator, rows: Tensor | None = None) -> Tensor:
        """Augments a batch of normalised images (n, 3, height, width); records no gradient.

        Returns only those that ``rows`` (bool, (n,)) selects, if given.
        """
        with torch.no_grad():
            draw = self.draw(generator)
            images = images if rows is None else images[rows]
            return self.apply(images, draw) if len(images) else images

    def draw(self, generator: torch.Generator) -> Draw:
        """Samples all random numbers of one call."""
        device = generator.device
        noise = torch.randn(CHANNELS, CHANNELS, SIZE, SIZE, generator=generator, device=device)
        noise = noise / (CHANNELS * SIZE * SIZE) ** 0.5
        width = SMALLEST_WIDTH + (1 - SMALLEST_WIDTH) * torch.rand((), generator=generator, device=device)
        scale, shift = DEVIATION * torch.randn(2, 1, CHANNELS, 1, 1, generator=generator, device=device)
        repeats = torch.randint(1, REPEATS + 1, (), generator=generator, device=device)
        return Draw(noise * (-self._distances / (2 * width.square())).exp(), scale, shift, repeats)

    def apply(self, images: Tensor, draw: Draw) -> Tensor:
        """Augments ``images`` with given random numbers.

        Without a kernel, it always makes all repetitions, so that CUDA can capture it.
        """
        if images.is_cuda and kernels.usable_for(images):
            return self._apply_kernel(images, draw)
        layer = Linear(draw.kernel, draw.kernel.new_zeros(CHANNELS))
        for done in range(REPEATS):
            hidden = convolution(images, layer, SIZE // 2)
            variance, mean = torch.var_mean(hidden, dim=(2, 3), correction=0, keepdim=True)
            block = (draw.scale * (hidden - mean) * (variance + EPSILON).rsqrt() + draw.shift).tanh()
            images = torch.where(draw.repeats > done, block, images)
        return ((images + 1) / 2 - self._mean) / self._std

    def _apply_kernel(self, images: Tensor, draw: Draw) -> Tensor:
        from ratp.functional.kernels.convolve import repeat

        return repeat(images, *draw, self._mean, self._std, EPSILON)
