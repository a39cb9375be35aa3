"""Max pooling of 3×3 windows with stride 2 and padding 1, as at the start of a ResNet.

Tensors are matrices with a row per window and a column per channel, in the memory layout ``channels_last``. The place
of a maximum in its window, 0 to 8, takes one byte. A gradient gathers: window (i, j) is centred on pixel (2i, 2j), so
the program of that window writes the gradients of the pixels (2i, 2j), (2i, 2j + 1), (2i + 1, 2j) and
(2i + 1, 2j + 1), which no windows share but itself and its neighbours to the right, below and in between.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratp.functional.kernels.common import DeviceKernel
from ratp.functional.kernels.norm import dense

# Values per program, the most columns of a tile, and warps per program.
TILE, WIDEST, WARPS = 2048, 64, 8


@triton.jit
def _windows(rows, columns, HIGH: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Returns the rows of a tile, their images, rows and columns of windows, the channels, and what is inside."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    return r.to(tl.int64), r // (HIGH * WIDE), r // WIDE % HIGH, r % WIDE, c, inside


@DeviceKernel
@triton.jit
def _pool_kernel(
    x, y, places, rows, columns,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    HIGH: tl.constexpr = (HEIGHT + 1) // 2
    WIDE: tl.constexpr = (WIDTH + 1) // 2
    r, image, i, j, c, inside = _windows(rows, columns, HIGH, WIDE, BR, BC)
    best = tl.full([BR, BC], float("-inf"), tl.float32)
    place = tl.zeros([BR, BC], tl.int32) + (tl.where(i == 0, 3, 0) + tl.where(j == 0, 1, 0))[:, None]
    centre = ((image.to(tl.int64) * HEIGHT + 2 * i) * WIDTH + 2 * j)[:, None] * columns + c[None, :]
    for k in tl.static_range(9):
        down, right = 2 * i + (k // 3 - 1), 2 * j + (k % 3 - 1)
        there = inside & ((down >= 0) & (down < HEIGHT) & (right >= 0) & (right < WIDTH))[:, None]
        offset = ((k // 3 - 1) * WIDTH + (k % 3 - 1)) * columns
        value = tl.load(x + centre + offset, mask=there, other=float("-inf")).to(tl.float32)
        larger = (value > best) | (value != value)  # like PyTorch: the first of equal values, but the last NaN
        best = tl.where(larger, value, best)
        if PLACES:
            place = tl.where(larger, k, place)
    at = r[:, None] * columns + c[None, :]
    tl.store(y + at, best.to(y.dtype.element_ty), mask=inside)
    if PLACES:
        tl.store(places + at, place.to(tl.uint8), mask=inside)


@triton.jit
def _gradient_at(dy, places, at, there):
    """Loads the gradients of windows, and the places they belong to."""
    slope = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
    return slope, tl.load(places + at, mask=there, other=9).to(tl.int32)


@DeviceKernel
@triton.jit
def _pool_gradient_kernel(
    dy, places, dx, rows, columns,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    HIGH: tl.constexpr = (HEIGHT + 1) // 2
    WIDE: tl.constexpr = (WIDTH + 1) // 2
    r, image, i, j, c, inside = _windows(rows, columns, HIGH, WIDE, BR, BC)
    at = r[:, None] * columns + c[None, :]
    to_right = inside & (j + 1 < WIDE)[:, None]
    below = inside & (i + 1 < HIGH)[:, None]
    here, p_here = _gradient_at(dy, places, at, inside)
    side, p_side = _gradient_at(dy, places, at + columns, to_right)
    under, p_under = _gradient_at(dy, places, at + WIDE * columns, below)
    corner, p_corner = _gradient_at(dy, places, at + (WIDE + 1) * columns, to_right & below)
    kind = dx.dtype.element_ty
    pixel = dx + ((image.to(tl.int64) * HEIGHT + 2 * i) * WIDTH + 2 * j)[:, None] * columns + c[None, :]
    tl.store(pixel, tl.where(p_here == 4, here, 0.0).to(kind), mask=inside)
    slope = tl.where(p_here == 5, here, 0.0) + tl.where(p_side == 3, side, 0.0)
    has_right = inside & (2 * j + 1 < WIDTH)[:, None]
    tl.store(pixel + columns, slope.to(kind), mask=has_right)
    pixel += WIDTH * columns
    slope = tl.where(p_here == 7, here, 0.0) + tl.where(p_under == 1, under, 0.0)
    has_below = (2 * i + 1 < HEIGHT)[:, None]
    tl.store(pixel, slope.to(kind), mask=inside & has_below)
    slope = tl.where(p_here == 8, here, 0.0) + tl.where(p_side == 6, side, 0.0)
    slope += tl.where(p_under == 2, under, 0.0) + tl.where(p_corner == 0, corner, 0.0)
    tl.store(pixel + columns, slope.to(kind), mask=has_right & has_below)


def _launch(kernel: Any, small: Tensor, large: Tensor, *tensors: Tensor, **settings: Any) -> None:
    """Runs a kernel over all windows; ``small`` has a value per window, ``large`` one per pixel."""
    columns, rows = small.shape[1], small.numel() // small.shape[1]
    wide = min(WIDEST, triton.next_power_of_2(columns))
    high = TILE // wide
    kernel[triton.cdiv(rows, high), triton.cdiv(columns, wide)](
        *tensors, rows, columns,
        HEIGHT=large.shape[2], WIDTH=large.shape[3], BR=high, BC=wide, num_warps=WARPS, **settings,
    )  # fmt: skip


def _pool(x: Tensor, *, find: bool) -> tuple[Tensor, Tensor]:
    """Returns the maxima and, if ``find``, their places."""
    n, columns, height, width = x.shape
    shape = n, columns, (height + 1) // 2, (width + 1) // 2
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    places = torch.empty_like(y, dtype=torch.uint8) if find else y
    if x.numel():
        _launch(_pool_kernel, y, x, x, y, places, PLACES=find)
    return y, places


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, places = _pool(x, find=True)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        if dx.numel():
            _launch(_pool_gradient_kernel, places, dx, dense(dy), places, dx)
        return dx


def max_pool(x: Tensor) -> Tensor:
    """Computes ``max_pool2d(x, 3, stride=2, padding=1)`` of maps (n, c, height, width) in float32 or less."""
    x = dense(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _MaxPool.apply(x)  # type: ignore[no-any-return]
    return _pool(x, find=False)[0]
