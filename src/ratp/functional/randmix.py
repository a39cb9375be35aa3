"""RandMix: augmentation by random autoencoders that are never trained, Deja Vu (ICLR 2023), section 2.2.

Every branch is a convolution, a noisy instance normalisation (AdaIN) and a transposed convolution with
random weights, each branch with its own kernel size:

    R_i(x) = dec_i( l₁(n)·IN(enc_i(x)) + l₂(n) ),   n ~ N(0, I)

The branches and the image itself are mixed with random weights and squashed:

    x̃ = σ( (w₀·x + Σ_i w_i·R_i(x)) / Σ_i w_i ),   w ~ N(0, 1)

A mixing weight may be negative, so a third of the batches come out with inverted contrast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.errors import ConfigError
from ratp.functional import kernels

CHANNELS = 3
NOISE_DIM = 10
COLOUR_DROPOUT = 0.2
# Smallest |Σw|; the sign is kept. Such a batch is saturated by σ either way.
SMALLEST_WEIGHT_SUM = 1e-3
# Pixels packed into channels; on a GPU only for images of at least the width at which it pays.
PACKED_ON_CPU, PACKED_ON_GPU = 4, 8
WIDE = 64


@dataclass(frozen=True)
class Linear:
    """Weight and bias of a random layer."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Branch:
    """The random numbers of one autoencoder."""

    encoder: Linear
    decoder: Linear
    adain: Linear
    noise: Tensor


@dataclass(frozen=True)
class Draw:
    """All random numbers of one call of RandMix; indexing selects those of some images."""

    input_noise: Tensor | None
    colour: Linear | None
    colour_keep: Tensor | None
    branches: tuple[Branch, ...]
    weights: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Draw:
        return Draw(
            None if self.input_noise is None else _rows(self.input_noise, rows),
            self.colour,
            None if self.colour_keep is None else _rows(self.colour_keep, rows),
            tuple(replace(branch, noise=_rows(branch.noise, rows)) for branch in self.branches),
            _rows(self.weights, rows),
        )


def _rows(numbers: Tensor, rows: Tensor | slice) -> Tensor:
    """Selects rows; a single row serves all images."""
    return numbers if len(numbers) == 1 else numbers[rows]


class Layers:
    """Random convolutions of given kernel sizes, sampled together in one call instead of one per tensor."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._shapes: list[tuple[int, ...]] = []
        self._bounds: list[float] = []
        for size in sizes:
            self._shapes += [(CHANNELS, CHANNELS, size, size), (CHANNELS,)]
            self._bounds += [1 / math.sqrt(CHANNELS * size * size)] * 2
        self._counts = [math.prod(shape) for shape in self._shapes]
        self._bounds_on: dict[torch.device, Tensor] = {}

    def draw(self, init: Literal["uniform", "normal"], generator: torch.Generator) -> Tensor:
        """Draws all numbers, flat: uniform within ±bound, or normal with that bound as deviation."""
        device = generator.device
        if device not in self._bounds_on:
            bounds = torch.tensor(self._bounds).repeat_interleave(torch.tensor(self._counts))
            self._bounds_on[device] = bounds.to(device)
        bound = self._bounds_on[device]
        if init == "normal":
            return torch.randn(len(bound), generator=generator, device=device) * bound
        return torch.rand(len(bound), generator=generator, device=device).mul_(2).sub_(1) * bound

    def split(self, numbers: Tensor) -> list[Linear]:
        """Splits flat numbers into weights and biases."""
        tensors = [t.view(shape) for t, shape in zip(torch.split(numbers, self._counts), self._shapes, strict=True)]
        return [Linear(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def transposed_convolution(hidden: Tensor, layer: Linear) -> Tensor:
    """Computes a transposed convolution as a padded convolution with the flipped kernel: five times faster on CPUs."""
    padding = layer.weight.shape[-1] - 1
    return convolution(hidden, Linear(layer.weight.flip(2, 3).transpose(0, 1), layer.bias), padding)


def convolution(inputs: Tensor, layer: Linear, padding: int = 0) -> Tensor:
    """Convolves three channels, which suit neither vector units nor tensor cores; the weights get no gradient.

    Packs pixels into channels, or, for small images on a GPU, uses a kernel.
    """
    if not inputs.is_cuda:
        return packed_convolution(inputs, layer, padding, PACKED_ON_CPU)
    if inputs.shape[-1] >= WIDE:
        return packed_convolution(inputs, layer, padding, PACKED_ON_GPU)
    if kernels.usable(inputs.device):
        from ratp.functional.kernels.convolve import convolve

        return convolve(inputs, layer.weight, layer.bias, padding)
    return F.conv2d(inputs, layer.weight, layer.bias, padding=padding)


def packed_convolution(inputs: Tensor, layer: Linear, padding: int, block: int) -> Tensor:
    """Computes the same convolution with ``block`` times as many channels: adjacent pixels become channels.

    Output pixel block·X + q takes input pixel block·(X + J) + i with the kernel's column block·J + i − q, or with
    zero where the kernel has no such column.
    """
    count, channels, height, width = inputs.shape
    outputs, _, _, size = layer.weight.shape
    across = width + 2 * padding - size + 1
    blocks, spanned = -(-across // block), -(-(size - 1 + block) // block)
    wide = (blocks + spanned - 1) * block
    packed = F.pad(inputs, (padding, wide - width - padding)).view(count, channels, height, -1, block)
    packed = packed.permute(0, 1, 4, 2, 3).reshape(count, channels * block, height, -1)
    kernel = F.pad(layer.weight, (0, 1))[:, :, :, _columns(block, spanned, size, inputs.device)]
    # from (out, in, row, q, i, J)
    kernel = kernel.permute(0, 3, 1, 4, 2, 5).reshape(outputs * block, channels * block, size, spanned)
    result = F.conv2d(packed, kernel, layer.bias.repeat_interleave(block), padding=(padding, 0))
    result = result.view(count, outputs, block, -1, blocks).permute(0, 1, 3, 4, 2)
    return result.reshape(count, outputs, -1, blocks * block)[..., :across]


@cache
def _columns(block: int, spanned: int, size: int, device: torch.device) -> Tensor:
    """The kernel's column for each q, i and J of a packed convolution; ``size`` where there is none."""
    q, i, j = torch.meshgrid(*(torch.arange(n) for n in (block, block, spanned)), indexing="ij")
    column = block * j + i - q
    return column.where((column >= 0) & (column < size), size).to(device)  # synchronous: any stream may read it


@dataclass(frozen=True)
class RandMixConfig:
    """Switches of RandMix; defaults are the published code's."""

    kernel_sizes: tuple[int, ...] = switch((5, 9, 13, 17), "kernel size of each autoencoder", minimum=1)
    colour_branch: bool = switch(True, "a 1×1 convolution with dropout as one more branch (published code)", doc_ref=11)
    tanh: bool = switch(True, "tanh after every branch (published code)", doc_ref=12)
    adain: Literal["residual", "affine"] = switch(
        "residual", "(1+γ)·IN+β (published code) or l₁(n)·IN+l₂(n) (paper)", doc_ref=13
    )
    redraw_adain: bool = switch(False, "AdaIN's linear layers are redrawn for every batch (paper)", doc_ref=14)
    noise_per: Literal["sample", "batch"] = switch("sample", "AdaIN noise per image, or one per batch", doc_ref=15)
    weights_per: Literal["batch", "sample"] = switch("batch", "mixing weights per batch, or per image", doc_ref=15)
    init: Literal["uniform", "normal"] = switch(
        "uniform",
        "convolution weights: uniform (published code) or normal of that bound as deviation (paper)",
        doc_ref=16,
    )
    input_noise: float = switch(0.001, "deviation of the noise added to the branches' input", doc_ref=17, minimum=0)
    renormalise: bool = switch(True, "bring σ's output back to the range of the network's input", doc_ref=18)
    safe_division: bool = switch(True, "keep Σw away from zero; off: divide as printed")


def check_kernels(config: RandMixConfig, image_size: tuple[int, int]) -> None:
    """Raises a ConfigError if a kernel does not fit into images of this size."""
    largest = max(config.kernel_sizes)
    if largest > min(image_size):
        raise ConfigError(
            f"randmix.kernel_sizes: a kernel of {largest} does not fit into images of "
            f"{'×'.join(map(str, image_size))}; use smaller kernels or larger images."
        )


class RandMix:
    """RandMix for images normalised with ``mean`` and ``std``.

    As in the published code, the AdaIN layers are sampled once, here; everything else is sampled in every call.
    """

    def __init__(self, config: RandMixConfig, mean: Tensor, std: Tensor, generator: torch.Generator) -> None:
        self.config = config
        self._mean = mean.reshape(1, CHANNELS, 1, 1)
        self._std = std.reshape(1, CHANNELS, 1, 1)
        self._layers = Layers([1] * config.colour_branch + [k for k in config.kernel_sizes for _ in range(2)])
        self._adain = self._draw_adain(generator)

    def __call__(self, images: Tensor, generator: torch.Generator, rows: Tensor | None = None) -> Tensor:
        """Augments a batch of normalised images (n, 3, height, width); records no gradient.

        Returns only those that ``rows`` (bool, (n,)) selects, if given; random numbers are sampled for all.
        """
        with torch.no_grad():
            draw = self.draw(images.shape, generator)
            if rows is not None:
                images, draw = images[rows], draw[rows]
            return self.apply(images, draw) if len(images) else images

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Draw:
        """Samples all random numbers of one call for images of ``shape`` (n, 3, height, width)."""
        config, count = self.config, shape[0]
        device = generator.device
        noise_rows = count if config.noise_per == "sample" else 1
        weight_rows = count if config.weights_per == "sample" else 1
        input_noise = colour = keep = None
        if config.input_noise:
            input_noise = config.input_noise * torch.randn(shape, generator=generator, device=device)
        convolutions = self._layers.split(self._layers.draw(config.init, generator))
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
        if images.is_cuda and kernels.usable(images.device) and (kernels.may_round() or kernels.usable_for(images)):
            return self._apply_kernel(images, draw)
        inputs = images if draw.input_noise is None else images + draw.input_noise
        terms: list[Tensor] = []
        if draw.colour is not None and draw.colour_keep is not None:
            colour = F.conv2d(inputs, draw.colour.weight, draw.colour.bias)
            terms.append(self._squash(colour * draw.colour_keep / (1 - COLOUR_DROPOUT)))
        terms += [self._squash(self._autoencode(inputs, branch)) for branch in draw.branches]
        terms.append(images)
        total = draw.weights.sum(dim=1)
        if self.config.safe_division:
            total = torch.copysign(total.abs().clamp_min(SMALLEST_WEIGHT_SUM), total)
        # x̃ = σ( (w₀·x + Σ_i w_i·R_i(x)) / Σ_i w_i )
        shares = (draw.weights / total[:, None]).T[:, :, None, None, None]
        mixed = terms[0] * shares[0]
        for term, share in zip(terms[1:], shares[1:], strict=True):
            mixed = mixed + term * share
        mixed = mixed.sigmoid()
        return (mixed - self._mean) / self._std if self.config.renormalise else mixed

    def _apply_kernel(self, images: Tensor, draw: Draw) -> Tensor:
        if kernels.may_round():
            from ratp.functional.kernels.randmix_tensor_cores import mix
        else:
            from ratp.functional.kernels.randmix import mix
        layers = [layer for branch in draw.branches for layer in (branch.encoder, branch.decoder, branch.adain)]
        if draw.colour is not None:
            layers.insert(0, draw.colour)
        return mix(
            images,
            draw.input_noise,
            [tensor for layer in layers for tensor in (layer.weight, layer.bias)],
            tuple(branch.encoder.weight.shape[-1] for branch in draw.branches),
            torch.stack([branch.noise for branch in draw.branches]),
            draw.colour_keep,
            draw.weights,
            self._mean,
            self._std,
            residual=self.config.adain == "residual",
            squash=self.config.tanh,
            safe_division=self.config.safe_division,
            renormalise=self.config.renormalise,
            smallest=SMALLEST_WEIGHT_SUM,
            dropout=COLOUR_DROPOUT,
        )

    def _squash(self, output: Tensor) -> Tensor:
        return output.tanh() if self.config.tanh else output

    def _autoencode(self, inputs: Tensor, branch: Branch) -> Tensor:
        # R_i(x) = dec_i( l₁(n)·IN(enc_i(x)) + l₂(n) )
        hidden = convolution(inputs, branch.encoder)
        variance, mean = torch.var_mean(hidden, dim=(2, 3), correction=0, keepdim=True)
        normalised = (hidden - mean) * (variance + 1e-5).rsqrt()
        scale, shift = F.linear(branch.noise, branch.adain.weight, branch.adain.bias)[:, :, None, None].chunk(2, dim=1)
        if self.config.adain == "residual":
            scale = 1 + scale
        return transposed_convolution(scale * normalised + shift, branch.decoder)

    def _draw_adain(self, generator: torch.Generator) -> tuple[Linear, ...]:
        shape = len(self.config.kernel_sizes), 2 * CHANNELS, NOISE_DIM + 1
        numbers = torch.rand(shape, generator=generator, device=generator.device).mul_(2).sub_(1)
        numbers /= math.sqrt(NOISE_DIM)
        return tuple(Linear(layer[:, :-1].contiguous(), layer[:, -1].contiguous()) for layer in numbers)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the layers that are sampled once."""
        tensors = {f"{i}.weight": layer.weight for i, layer in enumerate(self._adain)}
        return tensors | {f"{i}.bias": layer.bias for i, layer in enumerate(self._adain)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what :meth:`state_dict` returned."""
        device = self._mean.device
        self._adain = tuple(
            Linear(state[f"{i}.weight"].to(device), state[f"{i}.bias"].to(device)) for i in range(len(self._adain))
        )


class Inputs(NamedTuple):
    """The input of one step: the images of a batch, followed by copies of them, one round after the other.

    Attributes:
        images: Shape (n, 3, height, width).
        labels: Shape (n,).
        valid: Which rows count, shape (n,); None: all.
        confident: Which images of the batch have copies; None: the step does not choose them.
        rounds: How many copies these have.
    """

    images: Tensor
    labels: Tensor
    valid: Tensor | None = None
    confident: Tensor | None = None
    rounds: int = 1

    def views(self, rows: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Splits an output of the network into that of images and those of their copies; also returns which count."""
        if self.confident is None:
            return list(rows.chunk(1 + self.rounds)), None
        clean, copies = rows[: len(self.confident)], rows[len(self.confident) :]
        clean = clean if self.valid is not None else clean[self.confident]
        return [clean, *torch.split(copies, [len(clean)] * self.rounds)], None if self.valid is None else self.confident


def with_copies(
    images: Tensor, labels: Tensor, copies: Sequence[Tensor], chosen: Tensor | None = None, *, static: bool = False
) -> Inputs:
    """Adds copies of images to a batch; a copy has the label of its image.

    How many images are chosen depends on the data. A *compact* batch holds copies of these only. A *static* one holds
    copies of all, and a mask leaves the others out: more work for the same result, but its shapes never change, so
    CUDA can capture the step.

    Args:
        images: Normalised images, shape (n, 3, height, width).
        labels: Shape (n,).
        copies: In each round a copy of every image, or, in a compact batch, of every chosen one.
        chosen: Which images are chosen, bool of shape (n,); None: all.
        static: Whether the batch is static.
    """
    rounds, valid = len(copies), None
    copied = labels if chosen is None or static else labels[chosen]
    if chosen is not None and static:
        # Masked rows hold the clean image, so that a NaN in an unwanted copy cannot poison the others.
        copies = [torch.where(chosen[:, None, None, None], part, images) for part in copies]
        valid = torch.cat([torch.ones_like(chosen), *[chosen] * rounds])
    return Inputs(torch.cat([images, *copies]), torch.cat([labels, *[copied] * rounds]), valid, chosen, rounds)
