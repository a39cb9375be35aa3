"""Convolutions between the three channels of images with random weights, which are never trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp import kernels
from ratp.parts.randmix_draw import Linear

CHANNELS = 3
# Pixels convolved at a time; on a GPU only where images are so wide that it pays.
PACKED_ON_CPU, PACKED_ON_GPU = 4, 8
WIDE = 64


class Layers:
    """Random convolutions of given kernel sizes, all drawn at once: one call instead of one for each tensor."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._shapes: list[tuple[int, ...]] = []
        self._bounds: list[float] = []
        for size in sizes:
            self._shapes += [(CHANNELS, CHANNELS, size, size), (CHANNELS,)]
            self._bounds += [1 / math.sqrt(CHANNELS * size * size)] * 2
        self._counts = [math.prod(shape) for shape in self._shapes]
        self._bounds_on: dict[torch.device, Tensor] = {}

    def draw(self, init: Literal["uniform", "normal"], generator: torch.Generator) -> list[Linear]:
        """Weights and biases: uniform within ±bound, or normal with that bound as deviation."""
        return self.split(self.numbers(init, generator))

    def numbers(self, init: Literal["uniform", "normal"], generator: torch.Generator) -> Tensor:
        """The numbers of all of them, in a row."""
        device = generator.device
        if device not in self._bounds_on:
            bounds = torch.tensor(self._bounds).repeat_interleave(torch.tensor(self._counts))
            self._bounds_on[device] = bounds.to(device)
        bound = self._bounds_on[device]
        if init == "normal":
            return torch.randn(len(bound), generator=generator, device=device) * bound
        return torch.rand(len(bound), generator=generator, device=device).mul_(2).sub_(1) * bound

    def split(self, numbers: Tensor) -> list[Linear]:
        """The weights and biases that lie in a row of numbers."""
        parts = zip(torch.split(numbers, self._counts), self._shapes, strict=True)
        tensors = [part.view(shape) for part, shape in parts]
        return [Linear(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]


def transposed_convolution(hidden: Tensor, layer: Linear) -> Tensor:
    """A transposed convolution as the padded convolution with the flipped kernel: on CPUs five times faster."""
    padding = layer.weight.shape[-1] - 1
    return convolution(hidden, Linear(layer.weight.flip(2, 3).transpose(0, 1), layer.bias), padding)


def convolution(inputs: Tensor, layer: Linear, padding: int = 0) -> Tensor:
    """A convolution between three channels, which suit neither vector units nor tensor cores.

    More channels are packed, or on a GPU, for small images, a kernel of ours does it. The weights get no gradient.
    """
    if not inputs.is_cuda:
        return packed_convolution(inputs, layer, padding, PACKED_ON_CPU)
    if inputs.shape[-1] >= WIDE:
        return packed_convolution(inputs, layer, padding, PACKED_ON_GPU)
    if kernels.usable(inputs.device):
        from ratp.kernels.convolve import convolve

        return convolve(inputs, layer.weight, layer.bias, padding)
    return F.conv2d(inputs, layer.weight, layer.bias, padding=padding)


def packed_convolution(inputs: Tensor, layer: Linear, padding: int, block: int) -> Tensor:
    """The same convolution between ``block`` times as many channels: pixels side by side become channels.

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
    return column.where((column >= 0) & (column < size), size).to(device)  # complete, whichever stream asks for it
