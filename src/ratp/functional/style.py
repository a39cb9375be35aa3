"""The style module of "Learning to Diversify" (ICCV 2021), section 3.1: random autoencoders with a trained middle.

A branch is a convolution, instance normalisation with a scale and a shift per pixel, and a transposed convolution, each
branch with its own kernel size; one more branch is a 1×1 convolution, which changes colours:

    B_i(x) = tanh( dec_i( γ_i·IN(enc_i(x)) + β_i ) ),   B_0(x) = tanh( W x + b )

Scales γ, shifts β and the level of a noise added to x are trained, convolutions never are. To augment images, every
call resamples convolutions and mixing weights w and drops some colours: Σ w_i·B_i(x) / Σ w_i. To train the module,
the convolutions are fixed and the branches averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.errors import ConfigError
from ratp.functional import kernels
from ratp.functional.randmix import (
    CHANNELS,
    COLOUR_DROPOUT,
    SMALLEST_WEIGHT_SUM,
    Layers,
    convolution,
    transposed_convolution,
)

NOISE_UNIT = 0.01
SPREAD = 0.1
EPSILON = 1e-5


class Blend(NamedTuple):
    """How a new style is applied to images: x̃ = a·(σ(style) − mean)/std + (1 − a)·x."""

    share: float  # a
    mean: Tensor  # per channel, of the images' normalisation
    std: Tensor  # per channel, likewise

    def __call__(self, images: Tensor, styles: Tensor) -> Tensor:
        """Computes x̃ from normalised images and the module's output."""
        factor = self.share / self.std
        offset = -self.mean * factor
        unit = styles.sigmoid()
        return unit * factor.view(1, -1, 1, 1) + offset.view(1, -1, 1, 1) + (1 - self.share) * images


class StyleModule(nn.Module):
    """Changes the style of images."""

    fixed: Tensor  # all numbers of the fixed convolutions

    def __init__(self, image_size: tuple[int, int], kernel_sizes: Sequence[int] = (9, 13, 17, 5)) -> None:
        """Builds a module for images of a height and width, with random numbers from torch's generator."""
        super().__init__()
        height, width = image_size
        if min(image_size) <= max(kernel_sizes):
            raise ConfigError(
                f"images of {height}×{width} are too small for a style kernel of {max(kernel_sizes)}: "
                f"set kernel_sizes to numbers below {min(image_size)}."
            )
        # level of the noise added to images, in hundredths; initially 0
        self.noise_level = nn.Parameter(torch.zeros(()))
        shapes = [(CHANNELS, height - k + 1, width - k + 1) for k in kernel_sizes]
        # γ, one per branch, shape (3, height − k + 1, width − k + 1), initially N(1, 0.1)
        self.scales = nn.ParameterList(nn.Parameter(1 + SPREAD * torch.randn(shape)) for shape in shapes)
        # β, likewise, initially N(0, 0.1)
        self.shifts = nn.ParameterList(nn.Parameter(SPREAD * torch.randn(shape)) for shape in shapes)
        self._kernel_sizes = tuple(kernel_sizes)
        self._layers = Layers([1, *(k for k in kernel_sizes for _ in range(2))])
        self.register_buffer("fixed", self._layers.draw("uniform", torch.default_generator))

    def restyle(self, images: Tensor, blend: Blend, generator: torch.Generator) -> Tensor:
        """Restyles normalised images (n, 3, height, width) with fresh random numbers; records no gradient."""
        device = generator.device
        with torch.no_grad():
            noise = torch.randn(images.shape, generator=generator, device=device)
            numbers = self._layers.draw("uniform", generator)
            keep = torch.rand(images.shape, generator=generator, device=device) >= COLOUR_DROPOUT
            weights = torch.randn(len(self.scales) + 1, generator=generator, device=device)
            if kernels.usable_for(images):
                from ratp.functional.kernels import style

                images = images.contiguous()
                row = torch.cat([part.reshape(-1) for part in (*self.scales, *self.shifts)])
                inputs = self._add_noise(images, noise)
                chance = style.Chance(weights, keep, SMALLEST_WEIGHT_SUM, COLOUR_DROPOUT)
                return style.restyle(images, inputs, numbers, self._kernel_sizes, row, chance, blend)[0]
            total = weights.sum()
            shares = weights / torch.copysign(total.abs().clamp_min(SMALLEST_WEIGHT_SUM), total)
            branches = self._branches(images, noise, numbers, keep / (1 - COLOUR_DROPOUT))
            # Σ w_i·B_i(x) / Σ w_i
            return blend(images, (shares.view(-1, 1, 1, 1, 1) * branches).sum(dim=0))

    def estimate(self, images: Tensor, blend: Blend, generator: torch.Generator) -> Tensor:
        """Restyles normalised images by the fixed convolutions, with gradients: how the module itself is trained."""
        noise = torch.randn(images.shape, generator=generator, device=generator.device)
        if kernels.usable_for(images):
            from ratp.functional.kernels import style

            return style.estimate(
                images,
                noise,
                NOISE_UNIT,
                self.fixed,
                self._kernel_sizes,
                blend,
                self.noise_level,
                list(self.scales),
                list(self.shifts),
            )
        return blend(images, self._branches(images, noise, self.fixed, None).mean(dim=0))

    def _add_noise(self, images: Tensor, noise: Tensor) -> Tensor:
        return torch.addcmul(images, self.noise_level, noise, value=NOISE_UNIT)

    def _branches(self, images: Tensor, noise: Tensor, numbers: Tensor, keep: Tensor | None) -> Tensor:
        """Computes B_i(x), colours first, shape (branches, n, 3, height, width)."""
        inputs = self._add_noise(images, noise)
        colour, *layers = self._layers.split(numbers)
        colours = F.conv2d(inputs, colour.weight, colour.bias)
        results = [colours if keep is None else colours * keep]
        for encoder, decoder, scale, shift in zip(layers[::2], layers[1::2], self.scales, self.shifts, strict=True):
            hidden = F.instance_norm(convolution(inputs, encoder), eps=EPSILON)
            results.append(transposed_convolution(torch.addcmul(shift, scale, hidden), decoder))
        return torch.stack(results).tanh()
