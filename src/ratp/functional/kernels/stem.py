"""ResNet's first convolution, 7×7 with stride 2 on three channels, as tensor cores like it: on sixteen channels.

Squares of 2×2 pixels become channels, and the weights get a row and a column of zeros in front, w'[k] = w[k − 1]. Then

    y(i) = Σ_{k<8} w'[k] · x(2i − 4 + k) = Σ_{a<4} Σ_{b<2} w'[2a + b] · x(2(i + a) − 4 + b)

is a 4×4 convolution with stride 1. Packed images include their padding. Four channels hold a pixel; the last is zero.
In bf16, the four columns of a become channels, too, which makes it a convolution of four rows on 64 channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratp.functional.kernels.common import DeviceKernel

# Numbers packed by a program, and its warps.
NUMBERS, WARPS = 4096, 4


@DeviceKernel
@triton.jit
def _pack_kernel(
    x, packed, pixels, per_image, per_channel, per_row, per_column,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, START: tl.constexpr,
    COLUMNS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    k = tl.arange(0, 16 * COLUMNS)
    channel = (k % 4)[None, :]
    row = (p // WIDE % HIGH * 2 - START)[:, None] + (k // 8 % 2)[None, :]
    column = (p % WIDE * 2 - START)[:, None] + (k // 16 * 2 + k // 4 % 2)[None, :]
    inside = (p < pixels)[:, None]
    there = inside & (channel < 3) & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    image = (p // (HIGH * WIDE)).to(tl.int64)[:, None] * per_image
    value = tl.load(x + image + channel * per_channel + row * per_row + column * per_column, mask=there, other=0.0)
    at = p.to(tl.int64)[:, None] * (16 * COLUMNS) + k[None, :]
    tl.store(packed + at, value.to(packed.dtype.element_ty), mask=inside)


def _pack(x: Tensor, dtype: torch.dtype, start: int, high: int, wide: int, columns: int = 1) -> Tensor:
    """Packs images or weights; the first packed pixel begins ``start`` rows and columns before them."""
    count, _, height, width = x.shape
    shape = count, 16 * columns, high, wide
    packed = torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)
    pixels, at_once = count * high * wide, NUMBERS // (16 * columns)
    if pixels:
        _pack_kernel[(triton.cdiv(pixels, at_once),)](
            x, packed, pixels, *x.stride(),
            HEIGHT=height, WIDTH=width, HIGH=high, WIDE=wide, START=start, COLUMNS=columns, PIXELS=at_once,
            num_warps=WARPS,
        )  # fmt: skip
    return packed


def _columns(dtype: torch.dtype) -> int:
    return 4 if dtype == torch.bfloat16 else 1


def pack_images(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Packs images (n, 3, height, width) in any memory layout."""
    high, wide = ((side + 1) // 2 + 3 for side in images.shape[2:])
    columns = _columns(dtype)
    return _pack(images, dtype, 4, high, wide - columns + 1, columns)


def pack_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Packs weights (n, 3, 7, 7); without a gradient."""
    packed, columns = _pack(weight, dtype, 1, 4, 4).permute(0, 2, 3, 1), _columns(dtype)
    return packed.reshape(len(weight), 4, 4 // columns, 16 * columns).permute(0, 3, 1, 2)


class _PackWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.like = weight  # not saved: its values may change before the backward pass
        return pack_weight(weight, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        count = len(ctx.like)
        pairs = slope.permute(0, 2, 3, 1).reshape(count, 4, 4, 2, 2, 4)  # output, two a, two b, channel
        flat = pairs.permute(0, 5, 1, 3, 2, 4).reshape(count, 4, 8, 8)
        return torch.empty_like(ctx.like).copy_(flat[:, :3, 1:, 1:]), None


def convolve(images: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes ``conv2d(images, weight, stride=2, padding=3)`` in ``dtype``; images get no gradient."""
    return F.conv2d(pack_images(images, dtype), _PackWeight.apply(weight, dtype))
