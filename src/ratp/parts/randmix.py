"""RandMix: augmentation by random autoencoders that are never trained, Deja Vu (ICLR 2023), section 2.2.

Every branch is a convolution, a noisy instance normalisation (AdaIN) and a transposed convolution with
random weights, with its own kernel size:

    R_i(x) = dec_i( l₁(n)·IN(enc_i(x)) + l₂(n) ),   n ~ N(0, I)

The branches and the image itself are mixed with random weights and squashed:

    x̃ = σ( (w₀·x + Σ_i w_i·R_i(x)) / Σ_i w_i ),   w ~ N(0, 1)

A mixing weight may be negative, so a third of the batches come out with inverted contrast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp import kernels
from ratp.config import switch
from ratp.errors import ConfigError
from ratp.parts.randmix_draw import COLOUR_DROPOUT, SMALLEST_WEIGHT_SUM, Branch, Draw, Linear
from ratp.parts.random_convolutions import CHANNELS, Layers, convolution, transposed_convolution

if TYPE_CHECKING:
    from ratp.kernels.randmix import Mixture

NOISE_DIM = 10


@dataclass(frozen=True)
class RandMixConfig:
    """Switches of RandMix; defaults are the published code's."""

    kernel_sizes: tuple[int, ...] = switch((5, 9, 13, 17), "kernel size of each autoencoder", minimum=1)
    colour_branch: bool = switch(True, "a 1×1 convolution with dropout as one more branch (published code)", row=11)
    tanh: bool = switch(True, "tanh after every branch (published code)", row=12)
    adain: Literal["residual", "affine"] = switch(
        "residual", "(1+γ)·IN+β (published code) or l₁(n)·IN+l₂(n) (paper)", row=13
    )
    redraw_adain: bool = switch(False, "AdaIN's linear layers are drawn anew for every batch (paper)", row=14)
    noise_per: Literal["sample", "batch"] = switch(
        "sample", "each image has its own AdaIN noise, or a batch one", row=15
    )
    weights_per: Literal["batch", "sample"] = switch(
        "batch", "a batch shares its mixing weights, or each its own", row=15
    )
    init: Literal["uniform", "normal"] = switch(
        "uniform", "convolution weights: uniform (published code) or normal of that bound as deviation (paper)", row=16
    )
    input_noise: float = switch(0.001, "deviation of the noise added to the branches' input", row=17, minimum=0)
    renormalise: bool = switch(True, "bring σ's output back to the range of the network's input", row=18)
    safe_division: bool = switch(True, "keep Σw away from zero; off: divide as printed")


def check_kernels(config: RandMixConfig, image_size: tuple[int, int]) -> None:
    """Checks that the kernels fit into images.

    Raises:
        ConfigError: If one does not.
    """
    largest = max(config.kernel_sizes)
    if largest > min(image_size):
        raise ConfigError(
            f"randmix.kernel_sizes: a kernel of {largest} does not fit into images of "
            f"{'×'.join(map(str, image_size))}; use smaller kernels or larger images."
        )


class RandMix:
    """RandMix for images normalised with ``mean`` and ``std``.

    The AdaIN layers of the published code are drawn once, here; everything else is drawn in every call.
    """

    def __init__(self, config: RandMixConfig, mean: Tensor, std: Tensor, generator: torch.Generator) -> None:
        self.config = config
        self._mean = mean.reshape(1, CHANNELS, 1, 1)
        self._std = std.reshape(1, CHANNELS, 1, 1)
        self._layers = Layers([1] * config.colour_branch + [k for k in config.kernel_sizes for _ in range(2)])
        self._adain = self._draw_adain(generator)

    def __call__(self, images: Tensor, generator: torch.Generator, rows: Tensor | None = None) -> Tensor:
        """Augments a batch of normalised images; no gradient is recorded.

        Args:
            images: Shape (n, 3, height, width).
            generator: Source of the random numbers, which are drawn for all images.
            rows: Which images to augment and return, bool of shape (n,); None: all.
        """
        with torch.no_grad():
            draw = self.draw(images.shape, generator)
            if rows is not None:
                images, draw = images[rows], draw[rows]
            return self.apply(images, draw) if len(images) else images

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Draw:
        """Draws everything one call needs for images of ``shape`` (n, 3, height, width)."""
        config, count = self.config, shape[0]
        device = generator.device
        noise_rows = count if config.noise_per == "sample" else 1
        weight_rows = count if config.weights_per == "sample" else 1
        input_noise = colour = keep = None
        if config.input_noise:
            input_noise = config.input_noise * torch.randn(shape, generator=generator, device=device)
        convolutions = self._layers.draw(config.init, generator)
        if config.colour_branch:
            colour, *convolutions = convolutions
            keep = torch.rand(shape, generator=generator, device=device) >= COLOUR_DROPOUT
        adain = self._draw_adain(generator) if config.redraw_adain else self._adain
        noise = torch.randn(len(adain), noise_rows, NOISE_DIM, generator=generator, device=device)
        parts = zip(convolutions[::2], convolutions[1::2], adain, noise, strict=True)
        branches = tuple(Branch(*part) for part in parts)
        terms = len(branches) + int(config.colour_branch) + 1
        weights = torch.randn(weight_rows, terms, generator=generator, device=device)
        return Draw(input_noise, colour, keep, branches, weights)

    def apply(self, images: Tensor, draw: Draw) -> Tensor:
        """Augments ``images`` with given random numbers."""
        if kernels.usable(images.device):
            kernel = self._kernel()
            if kernel.fits(images):
                return kernel(images, draw)
        inputs = images if draw.input_noise is None else images + draw.input_noise
        squash = torch.tanh if self.config.tanh else _identity
        terms: list[Tensor] = []
        if draw.colour is not None and draw.colour_keep is not None:
            colour = F.conv2d(inputs, draw.colour.weight, draw.colour.bias)
            terms.append(squash(colour * draw.colour_keep / (1 - COLOUR_DROPOUT)))
        terms += [squash(self._autoencode(inputs, branch)) for branch in draw.branches]
        terms.append(images)
        total = draw.weights.sum(dim=1)
        if self.config.safe_division:
            total = torch.copysign(total.abs().clamp_min(SMALLEST_WEIGHT_SUM), total)
        shares = (draw.weights / total[:, None]).T[:, :, None, None, None]
        mixed = terms[0] * shares[0]
        for term, share in zip(terms[1:], shares[1:], strict=True):
            mixed = mixed + term * share
        mixed = mixed.sigmoid()
        return (mixed - self._mean) / self._std if self.config.renormalise else mixed

    def _kernel(self) -> Mixture:
        from ratp.kernels.randmix import Mixture

        config = self.config
        return Mixture(
            residual=config.adain == "residual",
            tanh=config.tanh,
            safe=config.safe_division,
            renormalise=config.renormalise,
            mean=self._mean,
            std=self._std,
        )

    def _autoencode(self, inputs: Tensor, branch: Branch) -> Tensor:
        hidden = convolution(inputs, branch.encoder)
        variance, mean = torch.var_mean(hidden, dim=(2, 3), correction=0, keepdim=True)
        normalised = (hidden - mean) * (variance + 1e-5).rsqrt()
        scale, shift = F.linear(branch.noise, branch.adain.weight, branch.adain.bias)[:, :, None, None].chunk(2, dim=1)
        if self.config.adain == "residual":
            scale = 1 + scale
        return transposed_convolution(scale * normalised + shift, branch.decoder)

    def _draw_adain(self, generator: torch.Generator) -> tuple[Linear, ...]:
        """AdaIN's linear layers, one a branch."""
        shape = len(self.config.kernel_sizes), 2 * CHANNELS, NOISE_DIM + 1
        numbers = torch.rand(shape, generator=generator, device=generator.device).mul_(2).sub_(1)
        numbers /= math.sqrt(NOISE_DIM)
        return tuple(Linear(layer[:, :-1].contiguous(), layer[:, -1].contiguous()) for layer in numbers)

    def state(self) -> dict[str, Tensor]:
        """The layers that are drawn once."""
        tensors = {f"{i}.weight": layer.weight for i, layer in enumerate(self._adain)}
        return tensors | {f"{i}.bias": layer.bias for i, layer in enumerate(self._adain)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        device = self._mean.device
        self._adain = tuple(
            Linear(state[f"{i}.weight"].to(device), state[f"{i}.bias"].to(device)) for i in range(len(self._adain))
        )


def _identity(tensor: Tensor) -> Tensor:
    return tensor
