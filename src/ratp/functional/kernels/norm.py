"""Batch normalisation over some rows of a batch, fused with what follows: y = relu(keep · (γ·(x − μ)/σ + β) + add).

An ``offset`` per channel, the bias of the convolution before, counts as added to x. It shifts μ as well, so with the
statistics of the batch only the running mean depends on it, and its gradient is zero.

The statistics take one pass over x, the result another; a gradient takes two passes over x, y and dy. All arithmetic
is in single precision, whatever the type of x. Tensors are treated as matrices with a row per place of each image and
a column per channel, which is the memory layout ``channels_last``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratp.functional.kernels.common import DeviceKernel

# Values per program at a time, and the most columns of a tile.
TILE, WIDEST = 4096, 64
# How many programs fill a device, and the most parts of a sum.
PROGRAMS, MOST_PARTS = 528, 256
CHANNELS_AT_ONCE = 16


@triton.jit
def _rows_and_columns(program, columns, BR: tl.constexpr, BC: tl.constexpr):
    r = program * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    return r, c, c < columns


@triton.jit
def _keep_part(parts, part, first, second, columns, c, in_c):
    """Stores the two sums of one part: all first sums precede all second ones."""
    tl.store(parts + part * columns + c, tl.sum(first, 0), mask=in_c)
    tl.store(parts + (tl.num_programs(0) + part) * columns + c, tl.sum(second, 0), mask=in_c)


@triton.jit
def _totals(parts, number, columns, c, in_c, MOST: tl.constexpr):
    """Adds up both sums over all parts."""
    part = tl.arange(0, MOST)
    at = part[:, None] * columns + c[None, :]
    there = (part < number)[:, None] & in_c[None, :]
    first = tl.sum(tl.load(parts + at, mask=there, other=0.0), 0)
    return first, tl.sum(tl.load(parts + number * columns + at, mask=there, other=0.0), 0)


@DeviceKernel
@triton.jit
def _sum_kernel(
    x, mask, pivot, offset, parts, rows, columns, space, per_part,
    MASKED: tl.constexpr, OFFSET: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes Σ(x − pivot) and Σ(x − pivot)² over one part of the rows that count."""
    part = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < columns
    shift = tl.load(pivot + c, mask=in_c, other=0.0)
    if OFFSET:
        shift -= tl.load(offset + c, mask=in_c, other=0.0)
    first = tl.zeros([BR, BC], tl.float32)
    second = tl.zeros([BR, BC], tl.float32)
    for start in range(part * per_part, min((part + 1) * per_part, rows), BR):
        r = start + tl.arange(0, BR)
        counts = r < rows
        at = r[:, None].to(tl.int64) * columns + c[None, :]
        value = tl.load(x + at, mask=counts[:, None] & in_c[None, :], other=0.0).to(tl.float32) - shift[None, :]
        if MASKED:
            counts = tl.load(mask + r // space, mask=counts, other=0) != 0
        value = tl.where(counts[:, None], value, 0.0)
        first += value
        second += value * value
    _keep_part(parts, part, first, second, columns, c, in_c)


@DeviceKernel
@triton.jit
def _statistics_kernel(
    parts, count, offset, mean, invstd, running_mean, running_var, tracked, columns, number, total, momentum, eps,
    MASKED: tl.constexpr, OFFSET: tl.constexpr, MOST: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes μ and 1/σ from the sums of all parts; updates the running statistics."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    in_c = c < columns
    first, second = _totals(parts, number, columns, c, in_c, MOST)
    usual_mean = tl.load(running_mean + c, mask=in_c, other=0.0)
    usual_var = tl.load(running_var + c, mask=in_c, other=1.0)
    m = total
    if MASKED:
        m = total * tl.load(count)
    some = m > 0
    several = m > 1
    m = tl.maximum(m, 1.0)
    first /= m
    mu = tl.where(some, usual_mean + first, usual_mean)
    var = tl.where(some, tl.maximum(second / m - first * first, 0.0), usual_var)
    tl.store(mean + c, mu - (tl.load(offset + c, mask=in_c, other=0.0) if OFFSET else 0.0), mask=in_c)
    tl.store(invstd + c, 1.0 / tl.sqrt(var + eps), mask=in_c)
    tl.store(running_mean + c, usual_mean + tl.where(some, momentum, 0.0) * (mu - usual_mean), mask=in_c)
    unbiased = var * (m / tl.maximum(m - 1.0, 1.0))
    tl.store(running_var + c, usual_var + tl.where(several, momentum, 0.0) * (unbiased - usual_var), mask=in_c)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + some.to(tl.int64))


@DeviceKernel
@triton.jit
def _normalise_kernel(
    x, offset, mean, spread, weight, bias, keep, add, y, rows, columns, space, eps,
    OFFSET: tl.constexpr, IS_VARIANCE: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    r, c, in_c = _rows_and_columns(tl.program_id(0), columns, BR, BC)
    inside = (r < rows)[:, None] & in_c[None, :]
    scale = tl.load(spread + c, mask=in_c, other=1.0)
    if IS_VARIANCE:
        scale = 1.0 / tl.sqrt(scale + eps)
    scale *= tl.load(weight + c, mask=in_c, other=0.0)
    centre = tl.load(mean + c, mask=in_c, other=0.0)
    if OFFSET:
        centre -= tl.load(offset + c, mask=in_c, other=0.0)
    shift = tl.load(bias + c, mask=in_c, other=0.0) - centre * scale
    at = r[:, None].to(tl.int64) * columns + c[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if KEEP:
        value *= tl.load(keep + (r // space)[:, None] * columns + c[None, :], mask=inside, other=0.0)
    if ADD:
        value += tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value > 0, value, tl.where(value <= 0, 0.0, value))  # NaN stays NaN
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_behind(dy, y, keep, at, r, c, columns, space, inside, KEEP: tl.constexpr, RELU: tl.constexpr):
    """Computes the gradients before ReLU, and before the channel dropout."""
    slope = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        slope = tl.where(tl.load(y + at, mask=inside, other=0.0).to(tl.float32) > 0, slope, 0.0)
    normal = slope
    if KEEP:
        normal *= tl.load(keep + (r // space)[:, None] * columns + c[None, :], mask=inside, other=0.0)
    return slope, normal


@DeviceKernel
@triton.jit
def _gradient_sum_kernel(
    x, y, dy, keep, mean, parts, rows, columns, space, per_part,
    KEEP: tl.constexpr, RELU: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes Σ dz and Σ dz·(x − μ) over one part of the rows."""
    part = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = c < columns
    mu = tl.load(mean + c, mask=in_c, other=0.0)
    first = tl.zeros([BR, BC], tl.float32)
    second = tl.zeros([BR, BC], tl.float32)
    for start in range(part * per_part, min((part + 1) * per_part, rows), BR):
        r = start + tl.arange(0, BR)
        inside = (r < rows)[:, None] & in_c[None, :]
        at = r[:, None].to(tl.int64) * columns + c[None, :]
        _, dz = _gradient_behind(dy, y, keep, at, r, c, columns, space, inside, KEEP, RELU)
        first += dz
        second += dz * (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mu[None, :])
    _keep_part(parts, part, first, second, columns, c, in_c)


@DeviceKernel
@triton.jit
def _gradient_statistics_kernel(
    parts, count, invstd, d_weight, d_bias, level, slope, columns, number, total,
    MASKED: tl.constexpr, MOST: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of γ and β from the sums of all parts, and what dx needs: Σdz/m, Σdz·(x − μ)/(σ²·m)."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    in_c = c < columns
    first, second = _totals(parts, number, columns, c, in_c, MOST)
    inverse = tl.load(invstd + c, mask=in_c, other=0.0)
    m = total
    if MASKED:
        m = tl.maximum(total * tl.load(count), 1.0)
    tl.store(d_weight + c, second * inverse, mask=in_c)
    tl.store(d_bias + c, first, mask=in_c)
    tl.store(level + c, first / m, mask=in_c)
    tl.store(slope + c, second * inverse * inverse / m, mask=in_c)


@DeviceKernel
@triton.jit
def _gradient_kernel(
    x, y, dy, keep, mask, mean, invstd, weight, level, slope, dx, d_add, rows, columns, space,
    MASKED: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes γ/σ·(dz − Σdz/m − (x − μ)/σ²·Σdz(x − μ)/m), the sums only where a row counts."""
    r, c, in_c = _rows_and_columns(tl.program_id(0), columns, BR, BC)
    inside = (r < rows)[:, None] & in_c[None, :]
    at = r[:, None].to(tl.int64) * columns + c[None, :]
    d_sum, dz = _gradient_behind(dy, y, keep, at, r, c, columns, space, inside, KEEP, RELU)
    if ADD:
        tl.store(d_add + at, d_sum.to(d_add.dtype.element_ty), mask=inside)
    scale = tl.load(invstd + c, mask=in_c, other=0.0) * tl.load(weight + c, mask=in_c, other=0.0)
    centred = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - tl.load(mean + c, mask=in_c, other=0.0)[None, :]
    common = tl.load(level + c, mask=in_c, other=0.0)[None, :] + centred * tl.load(slope + c, mask=in_c, other=0.0)
    if MASKED:
        counts = tl.load(mask + r // space, mask=r < rows, other=0) != 0
        common = tl.where(counts[:, None], common, 0.0)
    tl.store(dx + at, (scale[None, :] * (dz - common)).to(dx.dtype.element_ty), mask=inside)


class _Matrix:
    """How a tensor of shape (n, c) or (n, c, height, width) is tiled."""

    def __init__(self, x: Tensor) -> None:
        self.columns = x.shape[1]
        self.space = math.prod(x.shape[2:])
        self.rows = x.shape[0] * self.space
        self.wide = min(WIDEST, triton.next_power_of_2(self.columns))
        self.high = TILE // self.wide
        self.across = triton.cdiv(self.columns, self.wide)
        tiles = triton.cdiv(self.rows, self.high)
        parts = max(1, min(tiles, MOST_PARTS, PROGRAMS // self.across))
        self.per_part = triton.cdiv(tiles, parts) * self.high
        self.parts = triton.cdiv(self.rows, self.per_part)
        self.tiles = (tiles, self.across)
        self.sums = (self.parts, self.across)
        self.channels = (triton.cdiv(self.columns, CHANNELS_AT_ONCE),)
        self.most = triton.next_power_of_2(self.parts)


def infer(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    offset: Tensor | None = None,
    keep: Tensor | None = None,
    add: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Normalises with given statistics; records no gradient."""
    x = dense(x)
    y, cut = torch.empty_like(x), _Matrix(x)
    _normalise_kernel[cut.tiles](
        x, x if offset is None else offset, mean, variance, weight, bias,
        x if keep is None else keep, x if add is None else dense(add), y,
        cut.rows, cut.columns, cut.space, eps,
        OFFSET=offset is not None, IS_VARIANCE=True, KEEP=keep is not None, ADD=add is not None, RELU=relu,
        BR=cut.high, BC=cut.wide,
    )  # fmt: skip
    return y


class Normalise(torch.autograd.Function):
    """Normalises with the statistics of the batch, or of its rows that count; updates the running statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # shape (n, c) or (n, c, height, width)
        weight: Tensor,  # γ, shape (c,)
        bias: Tensor,  # β, shape (c,)
        offset: Tensor | None,  # counts as added to x, shape (c,)
        add: Tensor | None,  # added before ReLU, same shape as x
        keep: Tensor | None,  # factor on every channel of every image, float32 of shape (n, c)
        mask: Tensor | None,  # which images count, bool of shape (n,); None: all
        count: Tensor | None,  # how many images count, float32 scalar
        # running mean, running variance and number of batches, updated in place
        running: tuple[Tensor, Tensor, Tensor],
        momentum: float,  # share of the batch in the running statistics
        eps: float,  # added to the variance
        relu: bool,  # whether to apply ReLU last
    ) -> Tensor:
        """Normalises all rows."""
        x = dense(x)
        cut, y = _Matrix(x), torch.empty_like(x)
        mean, invstd = torch.empty(2, cut.columns, device=x.device)
        parts = torch.empty(2 * cut.parts, cut.columns, device=x.device)
        is_masked = mask is not None
        mask, count = (x, x) if mask is None or count is None else (mask, count)
        _sum_kernel[cut.sums](
            x, mask, running[0], x if offset is None else offset, parts,
            cut.rows, cut.columns, cut.space, cut.per_part,
            MASKED=is_masked, OFFSET=offset is not None, BR=cut.high, BC=cut.wide,
        )  # fmt: skip
        total = float(cut.space if is_masked else cut.rows)
        _statistics_kernel[cut.channels](
            parts, count, x if offset is None else offset, mean, invstd, *running,
            cut.columns, cut.parts, total, momentum, eps,
            MASKED=is_masked, OFFSET=offset is not None, MOST=cut.most, BC=CHANNELS_AT_ONCE,
        )  # fmt: skip
        _normalise_kernel[cut.tiles](
            x, x, mean, invstd, weight, bias, x if keep is None else keep, x if add is None else dense(add), y,
            cut.rows, cut.columns, cut.space, eps,
            OFFSET=False, IS_VARIANCE=False, KEEP=keep is not None, ADD=add is not None, RELU=relu,
            BR=cut.high, BC=cut.wide,
        )  # fmt: skip
        ctx.is_masked, ctx.relu, ctx.adds, ctx.total = is_masked, relu, add is not None, total
        ctx.save_for_backward(x, y if relu else None, weight, keep, mask, count, mean, invstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of x, γ, β, offset and add."""
        x, y, weight, keep, mask, count, mean, invstd = ctx.saved_tensors
        cut, dy = _Matrix(x), dense(dy)
        keeps, keep, y = keep is not None, x if keep is None else keep, x if y is None else y
        d_weight, d_bias, level, slope = torch.empty(4, cut.columns, device=x.device)
        parts = torch.empty(2 * cut.parts, cut.columns, device=x.device)
        _gradient_sum_kernel[cut.sums](
            x, y, dy, keep, mean, parts, cut.rows, cut.columns, cut.space, cut.per_part,
            KEEP=keeps, RELU=ctx.relu, BR=cut.high, BC=cut.wide,
        )  # fmt: skip
        _gradient_statistics_kernel[cut.channels](
            parts, count, invstd, d_weight, d_bias, level, slope, cut.columns, cut.parts, ctx.total,
            MASKED=ctx.is_masked, MOST=cut.most, BC=CHANNELS_AT_ONCE,
        )  # fmt: skip
        dx = torch.empty_like(x)
        d_add = torch.empty_like(x) if ctx.adds else None
        _gradient_kernel[cut.tiles](
            x, y, dy, keep, mask, mean, invstd, weight, level, slope, dx, dx if d_add is None else d_add,
            cut.rows, cut.columns, cut.space,
            MASKED=ctx.is_masked, KEEP=keeps, ADD=ctx.adds, RELU=ctx.relu, BR=cut.high, BC=cut.wide,
        )  # fmt: skip
        d_offset = torch.zeros_like(d_bias) if ctx.needs_input_grad[3] else None
        return dx, d_weight, d_bias, d_offset, d_add, *(None,) * 7


def dense(x: Tensor) -> Tensor:
    """Makes a tensor dense with the channels of a place adjacent."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.contiguous()
