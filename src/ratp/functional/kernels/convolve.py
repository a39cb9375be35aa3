"""Convolutions between the three channels of small images; cuDNN's kernels are made for many channels.

Each program computes some pixels of one image; see :mod:`ratp.functional.kernels.common` for the memory layout. The
weights are never trained: only the images have a gradient, which is the convolution with the flipped kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratp.functional.kernels.common import PIXELS_AT_ONCE, DeviceKernel, normalise, pack, tanh


@DeviceKernel
@triton.jit
def _convolve_kernel(
    inputs, taps, bias, result,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PADDING: tl.constexpr, HAS_BIAS: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    HIGH: tl.constexpr = HEIGHT + 2 * PADDING - SIZE + 1
    WIDE: tl.constexpr = WIDTH + 2 * PADDING - SIZE + 1
    p = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    c = tl.arange(0, 4)
    inside = p < HIGH * WIDE
    top, left = p // WIDE - PADDING, p % WIDE - PADDING
    planes = inputs + (image * 3 + c)[:, None] * (HEIGHT * WIDTH)
    tap = taps + c
    red = tl.zeros([4, PIXELS], tl.float32)
    green = tl.zeros([4, PIXELS], tl.float32)
    blue = tl.zeros([4, PIXELS], tl.float32)
    for row in range(SIZE):
        y = top + row
        on_row = inside & (y >= 0) & (y < HEIGHT)
        for column in tl.static_range(SIZE):
            x = left + column
            there = (c < 3)[:, None] & (on_row & (x >= 0) & (x < WIDTH))[None, :]
            value = tl.load(planes + (y * WIDTH + x)[None, :], mask=there, other=0.0)
            red += value * tl.load(tap + 12 * column)[:, None]
            green += value * tl.load(tap + (12 * column + 4))[:, None]
            blue += value * tl.load(tap + (12 * column + 8))[:, None]
        tap += 12 * SIZE
    for out in tl.static_range(3):
        value = tl.sum(red if out == 0 else (green if out == 1 else blue), 0)
        if HAS_BIAS:
            value += tl.load(bias + out)
        tl.store(result + (image * 3 + out) * (HIGH * WIDE) + p, value, mask=inside)


def _convolve(inputs: Tensor, taps: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    count, channels, height, width = inputs.shape
    size = len(taps)
    high, wide = height + 2 * padding - size + 1, width + 2 * padding - size + 1
    result = torch.empty(count, channels, high, wide, device=inputs.device)
    _convolve_kernel[(count, triton.cdiv(high * wide, PIXELS_AT_ONCE))](
        inputs.contiguous(), taps, taps if bias is None else bias, result,
        HEIGHT=height, WIDTH=width, SIZE=size, PADDING=padding, HAS_BIAS=bias is not None, PIXELS=PIXELS_AT_ONCE,
    )  # fmt: skip
    return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, taps: Tensor, turned: Tensor, bias: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(turned)
        ctx.padding = padding
        return _convolve(inputs, taps, bias, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (turned,) = ctx.saved_tensors
        return _convolve(gradients[0], turned, None, len(turned) - 1 - ctx.padding), None, None, None, None


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor, padding: int = 0) -> Tensor:
    """Convolves float32 images (n, 3, height, width) with weights (3, 3, k, k) that are not trained.

    The padding is less than k zeros on every side.
    """
    taps = pack(weight)
    if not inputs.requires_grad:
        return _convolve(inputs, taps, bias, padding)
    turned = pack(weight.flip(2, 3).transpose(0, 1))
    return _Convolution.apply(inputs, taps, turned, bias, padding)  # type: ignore[no-any-return]


@DeviceKernel
@triton.jit
def _repeat_kernel(
    images, weight, scale, shift, repeats, mean, std, space, result,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, EPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Applies all repetitions to one image, which moves to and fro between two places in memory."""
    AREA: tl.constexpr = HEIGHT * WIDTH
    p = tl.arange(0, PIXELS)
    y, x = p // WIDTH - SIZE // 2, p % WIDTH - SIZE // 2
    inside = p < AREA
    own = tl.program_id(0) * (3 * AREA)
    other = tl.num_programs(0) * (3 * AREA)
    for plane in tl.static_range(3):
        at = own + plane * AREA + p
        tl.store(space + at, tl.load(images + at, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()  # other threads read what this one has stored
    times = tl.load(repeats).to(tl.int32)
    for done in range(times):
        read = space + own + done % 2 * other
        write = space + own + (done + 1) % 2 * other
        red = tl.zeros([PIXELS], tl.float32)
        green = tl.zeros([PIXELS], tl.float32)
        blue = tl.zeros([PIXELS], tl.float32)
        for tap in tl.static_range(3 * SIZE * SIZE):
            channel, row, column = tap // (SIZE * SIZE), tap // SIZE % SIZE, tap % SIZE
            there = inside & (y + row >= 0) & (y + row < HEIGHT) & (x + column >= 0) & (x + column < WIDTH)
            value = tl.load(read + channel * AREA + (y + row) * WIDTH + x + column, mask=there, other=0.0)
            red += value * tl.load(weight + tap)
            green += value * tl.load(weight + 3 * SIZE * SIZE + tap)
            blue += value * tl.load(weight + 6 * SIZE * SIZE + tap)
        for out in tl.static_range(3):
            value, _ = normalise(red if out == 0 else (green if out == 1 else blue), inside, AREA, EPS)
            value = tanh(value * tl.load(scale + out) + tl.load(shift + out))
            tl.store(write + out * AREA + p, value, mask=inside)
        tl.debug_barrier()
    for out in tl.static_range(3):
        at = own + out * AREA + p
        value = tl.load(space + times % 2 * other + at, mask=inside, other=0.0)
        value = ((value + 1) / 2 - tl.load(mean + out)) / tl.load(std + out)
        tl.store(result + at, value, mask=inside)


def repeat(
    images: Tensor,  # small, float32, shape (n, 3, height, width)
    weight: Tensor,  # shape (3, 3, k, k), k odd
    scale: Tensor,  # three numbers, as shift, mean and std
    shift: Tensor,
    repeats: Tensor,  # one number
    mean: Tensor,
    std: Tensor,
    eps: float,
) -> Tensor:
    """Convolves, normalises, scales, shifts and squashes images repeatedly; brings (−1, 1) to the input's range."""
    images = images.contiguous()
    count, _, height, width = images.shape
    result = torch.empty_like(images)
    _repeat_kernel[(count,)](
        images, weight.contiguous(), scale, shift, repeats, mean, std, images.new_empty(2, *images.shape), result,
        HEIGHT=height, WIDTH=width, SIZE=weight.shape[-1], EPS=eps, PIXELS=triton.next_power_of_2(height * width),
        num_warps=8,
    )  # fmt: skip
    return result
