"""Batch normalisation over some rows of a batch, fused with what follows: y = relu(keep · (γ·(x − μ)/σ + β) + add).

An ``offset`` per channel, the bias of the convolution before, counts as added to x. It shifts μ as well, so with the
statistics of the batch only the running mean depends on it, and its gradient is zero.

The statistics take one pass over x, the result another; a gradient takes two passes over x and dy. Where y is positive
is kept as bits. The last of the programs that compute a sum computes what follows from it. All arithmetic is in single
precision, whatever the type of x. Tensors are treated as matrices with a row per place of each image and a column per
channel, which is the memory layout ``channels_last``.
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

# Warps of a program, bytes of its tile for each of them (16 per thread and plane), and the most columns of the tile.
WARPS, BYTES, WIDEST = 4, 4096, 64
# How many programs run at once on a device.
PROGRAMS = 396


@triton.jit
def _share(columns, BC: tl.constexpr):
    """Returns a program's columns, which of them exist, its index among the programs for these, and their number."""
    across = tl.cdiv(columns, BC)
    c = tl.program_id(0) % across * BC + tl.arange(0, BC)
    return c, c < columns, tl.program_id(0) // across, tl.num_programs(0) // across


@triton.jit
def _tile(start, rows, columns, c, in_c, BR: tl.constexpr):
    """Returns a tile's rows, the offset of the first, its elements' offsets from there, and which of them exist."""
    local = tl.arange(0, BR)
    r = start + local
    inside = (r < rows)[:, None] & in_c[None, :]
    return r, tl.cast(start, tl.int64) * columns, local[:, None] * columns + c[None, :], inside


@triton.jit
def _planes(values, BR: tl.constexpr, BC: tl.constexpr):
    """Splits a tile into eight planes of rows. A thread holds the same places of all, so adding them up is quick."""
    return tl.reshape(values, [8, BR // 8, BC])


@triton.jit
def _bits_at(start, columns, c, BR: tl.constexpr):
    """Returns the offsets of a tile's bits: a byte has those of one place in all eight planes."""
    return tl.cast(start // 8, tl.int64) * columns + (tl.arange(0, BR // 8)[:, None] * columns + c[None, :])


@triton.jit
def _keep_part(parts, part, number, first, second, columns, c, in_c):
    """Stores the two sums of one part: all first sums precede all second ones."""
    tl.store(parts + part * columns + c, tl.sum(first, 0), mask=in_c)
    tl.store(parts + (number + part) * columns + c, tl.sum(second, 0), mask=in_c)


@triton.jit
def _is_last(tickets, number, columns, BC: tl.constexpr):
    """Whether all other programs for these columns have stored their sums. The last one makes the ticket zero again."""
    tl.debug_barrier()  # until all threads of this program have stored theirs
    ticket = tickets + tl.program_id(0) % tl.cdiv(columns, BC)
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == number - 1
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def _totals(parts, number, columns, c, in_c, BC: tl.constexpr):
    """Adds up both sums over all parts, in a fixed order."""
    first = tl.zeros([64, BC], tl.float32)
    second = tl.zeros([64, BC], tl.float32)
    for begin in range(0, number, 64):
        part = begin + tl.arange(0, 64)
        at = part[:, None] * columns + c[None, :]
        there = (part < number)[:, None] & in_c[None, :]
        first += tl.load(parts + at, mask=there, other=0.0)
        second += tl.load(parts + number * columns + at, mask=there, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@DeviceKernel
@triton.jit
def _sum_kernel(
    x, mask, count, offset, parts, tickets, new_tickets, mean, invstd, running_mean, running_var, tracked,
    rows, columns, space, total, momentum, eps,
    MASKED: tl.constexpr, OFFSET: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes μ and 1/σ of the rows that count, and updates the running statistics.

    Each program computes Σ(x − p) and Σ(x − p)² over every n-th tile, where p is the running mean; the last one does
    the rest, and makes ``new_tickets`` zero, which are for the gradient.
    """
    c, in_c, part, number = _share(columns, BC)
    shift = tl.load(running_mean + c, mask=in_c, other=0.0)
    if OFFSET:
        shift -= tl.load(offset + c, mask=in_c, other=0.0)
    first = tl.zeros([BR // 8, BC], tl.float32)
    second = tl.zeros([BR // 8, BC], tl.float32)
    for start in range(part * BR, rows, number * BR):
        r, base, at, inside = _tile(start, rows, columns, c, in_c, BR)
        counts = r < rows
        value = tl.load(x + base + at, mask=inside, other=0.0).to(tl.float32) - shift[None, :]
        if MASKED:
            counts = tl.load(mask + r // space, mask=counts, other=0) != 0
        value = tl.where(counts[:, None], value, 0.0)
        first += tl.sum(_planes(value, BR, BC), 0)
        second += tl.sum(_planes(value * value, BR, BC), 0)
    _keep_part(parts, part, number, first, second, columns, c, in_c)
    if _is_last(tickets, number, columns, BC):
        total_first, total_second = _totals(parts, number, columns, c, in_c, BC)
        usual_mean = tl.load(running_mean + c, mask=in_c, other=0.0)
        usual_var = tl.load(running_var + c, mask=in_c, other=1.0)
        m = total
        if MASKED:
            m = total * tl.load(count)
        some = m > 0
        several = m > 1
        m = tl.maximum(m, 1.0)
        distance = total_first / m
        mu = tl.where(some, usual_mean + distance, usual_mean)
        var = tl.where(some, tl.maximum(total_second / m - distance * distance, 0.0), usual_var)
        tl.store(mean + c, mu - (tl.load(offset + c, mask=in_c, other=0.0) if OFFSET else 0.0), mask=in_c)
        tl.store(invstd + c, 1.0 / tl.sqrt(var + eps), mask=in_c)
        tl.store(running_mean + c, usual_mean + tl.where(some, momentum, 0.0) * (mu - usual_mean), mask=in_c)
        unbiased = var * (m / tl.maximum(m - 1.0, 1.0))
        tl.store(running_var + c, usual_var + tl.where(several, momentum, 0.0) * (unbiased - usual_var), mask=in_c)
        group = tl.program_id(0) % tl.cdiv(columns, BC)
        tl.store(new_tickets + group, 0)
        if group == 0:
            tl.store(tracked, tl.load(tracked) + some.to(tl.int64))


@DeviceKernel
@triton.jit
def _normalise_kernel(
    x, offset, mean, spread, weight, bias, keep, add, y, bits, rows, columns, space, eps,
    OFFSET: tl.constexpr, IS_VARIANCE: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
    BITS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes the result, last rows first: they are still in the cache. Keeps where it is positive as bits."""
    c, in_c, index, number = _share(columns, BC)
    start = (number - 1 - index) * BR
    r, base, at, inside = _tile(start, rows, columns, c, in_c, BR)
    scale = tl.load(spread + c, mask=in_c, other=1.0)
    if IS_VARIANCE:
        scale = 1.0 / tl.sqrt(scale + eps)
    scale *= tl.load(weight + c, mask=in_c, other=0.0)
    centre = tl.load(mean + c, mask=in_c, other=0.0)
    if OFFSET:
        centre -= tl.load(offset + c, mask=in_c, other=0.0)
    shift = tl.load(bias + c, mask=in_c, other=0.0) - centre * scale
    value = tl.load(x + base + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    value = value * scale[None, :] + shift[None, :]
    if KEEP:
        value *= tl.load(keep + (r // space)[:, None] * columns + c[None, :], mask=inside, other=0.0)
    if ADD:
        value += tl.load(add + base + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value > 0, value, tl.where(value <= 0, 0.0, value))  # NaN stays NaN
    result = value.to(y.dtype.element_ty)
    tl.store(y + base + at, result, mask=inside)
    if BITS:
        positive = _planes((result.to(tl.float32) > 0).to(tl.int32), BR, BC) << tl.arange(0, 8)[:, None, None]
        tl.store(bits + _bits_at(start, columns, c, BR), tl.sum(positive, 0).to(tl.uint8), mask=in_c[None, :])


@triton.jit
def _gradient_behind(
    dy, bits, keep, start, at, r, c, in_c, columns, space, inside,
    KEEP: tl.constexpr, RELU: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Computes the gradients before ReLU, and before the channel dropout."""
    slope = tl.load(dy + at, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if RELU:
        byte = tl.load(bits + _bits_at(start, columns, c, BR), mask=in_c[None, :], other=0).to(tl.int32)
        bit = (byte[None, :, :] >> tl.arange(0, 8)[:, None, None]) & 1
        slope = tl.where(tl.reshape(bit, [BR, BC]) != 0, slope, 0.0)
    normal = slope
    if KEEP:
        normal *= tl.load(keep + (r // space)[:, None] * columns + c[None, :], mask=inside, other=0.0)
    return slope, normal


@DeviceKernel
@triton.jit
def _gradient_sum_kernel(
    x, bits, dy, keep, mean, parts, tickets, count, invstd, d_weight, d_bias, d_offset, level, slope,
    rows, columns, space, total,
    MASKED: tl.constexpr, KEEP: tl.constexpr, RELU: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of γ, β and the offset, and what dx needs: Σdz/m, Σdz·(x − μ)/(σ²·m).

    Each program computes Σdz and Σdz·(x − μ) over every n-th tile; the last one does the rest.
    """
    c, in_c, part, number = _share(columns, BC)
    mu = tl.load(mean + c, mask=in_c, other=0.0)
    first = tl.zeros([BR // 8, BC], tl.float32)
    second = tl.zeros([BR // 8, BC], tl.float32)
    for start in range(part * BR, rows, number * BR):
        r, base, at, inside = _tile(start, rows, columns, c, in_c, BR)
        _, dz = _gradient_behind(
            dy + base, bits, keep, start, at, r, c, in_c, columns, space, inside, KEEP, RELU, BR, BC, ""
        )  # fmt: skip
        value = tl.load(x + base + at, mask=inside, other=0.0).to(tl.float32) - mu[None, :]
        first += tl.sum(_planes(dz, BR, BC), 0)
        second += tl.sum(_planes(dz * value, BR, BC), 0)
    _keep_part(parts, part, number, first, second, columns, c, in_c)
    if _is_last(tickets, number, columns, BC):
        total_first, total_second = _totals(parts, number, columns, c, in_c, BC)
        inverse = tl.load(invstd + c, mask=in_c, other=0.0)
        m = total
        if MASKED:
            m = tl.maximum(total * tl.load(count), 1.0)
        tl.store(d_weight + c, total_second * inverse, mask=in_c)
        tl.store(d_bias + c, total_first, mask=in_c)
        tl.store(d_offset + c, tl.zeros([BC], tl.float32), mask=in_c)
        tl.store(level + c, total_first / m, mask=in_c)
        tl.store(slope + c, total_second * inverse * inverse / m, mask=in_c)


@DeviceKernel
@triton.jit
def _gradient_kernel(
    x, bits, dy, keep, mask, mean, invstd, weight, level, slope, dx, d_add, rows, columns, space,
    MASKED: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Computes γ/σ·(dz − Σdz/m − (x − μ)/σ²·Σdz(x − μ)/m), the sums only where a row counts; last rows first."""
    c, in_c, index, number = _share(columns, BC)
    start = (number - 1 - index) * BR
    r, base, at, inside = _tile(start, rows, columns, c, in_c, BR)
    d_sum, dz = _gradient_behind(
        dy + base, bits, keep, start, at, r, c, in_c, columns, space, inside, KEEP, RELU, BR, BC, "evict_first"
    )  # fmt: skip
    value = tl.load(x + base + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if ADD:
        tl.store(d_add + base + at, d_sum.to(d_add.dtype.element_ty), mask=inside)
    scale = tl.load(invstd + c, mask=in_c, other=0.0) * tl.load(weight + c, mask=in_c, other=0.0)
    centred = value - tl.load(mean + c, mask=in_c, other=0.0)[None, :]
    common = tl.load(level + c, mask=in_c, other=0.0)[None, :] + centred * tl.load(slope + c, mask=in_c, other=0.0)
    if MASKED:
        counts = tl.load(mask + r // space, mask=r < rows, other=0) != 0
        common = tl.where(counts[:, None], common, 0.0)
    tl.store(dx + base + at, (scale[None, :] * (dz - common)).to(dx.dtype.element_ty), mask=inside)


class _Matrix:
    """How a tensor of shape (n, c) or (n, c, height, width) is tiled."""

    def __init__(self, x: Tensor) -> None:
        self.columns = x.shape[1]
        self.space = math.prod(x.shape[2:])
        self.rows = x.shape[0] * self.space
        self.wide = min(WIDEST, triton.next_power_of_2(self.columns))
        self.across = triton.cdiv(self.columns, self.wide)
        self.high = WARPS * BYTES // x.element_size() // self.wide
        tiles = max(1, triton.cdiv(self.rows, self.high))
        self.parts = triton.cdiv(tiles, triton.cdiv(tiles, max(1, PROGRAMS // self.across)))
        self.tiles = (self.across * tiles,)
        self.sums = (self.across * self.parts,)
        self.bits = (tiles * self.high // 8, self.columns)  # one byte for eight rows of a tile
        self.settings = {"BR": self.high, "BC": self.wide, "num_warps": WARPS}


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
        x if keep is None else keep, x if add is None else dense(add), y, y,
        cut.rows, cut.columns, cut.space, eps,
        OFFSET=offset is not None, IS_VARIANCE=True, KEEP=keep is not None, ADD=add is not None, RELU=relu,
        BITS=False, **cut.settings,
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
        tickets: Tensor,  # zeros, int32 of shape (c,), which no other launch uses meanwhile
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
        total, new_tickets = float(cut.space if is_masked else cut.rows), torch.empty_like(tickets)
        _sum_kernel[cut.sums](
            x, mask, count, x if offset is None else offset, parts, tickets, new_tickets, mean, invstd, *running,
            cut.rows, cut.columns, cut.space, total, momentum, eps,
            MASKED=is_masked, OFFSET=offset is not None, **cut.settings,
        )  # fmt: skip
        bits = torch.empty(cut.bits, dtype=torch.uint8, device=x.device) if relu else None
        _normalise_kernel[cut.tiles](
            x, x, mean, invstd, weight, bias, x if keep is None else keep, x if add is None else dense(add), y,
            y if bits is None else bits, cut.rows, cut.columns, cut.space, eps,
            OFFSET=False, IS_VARIANCE=False, KEEP=keep is not None, ADD=add is not None, RELU=relu,
            BITS=relu, **cut.settings,
        )  # fmt: skip
        ctx.is_masked, ctx.relu, ctx.adds, ctx.total = is_masked, relu, add is not None, total
        ctx.save_for_backward(x, bits, weight, keep, mask, count, mean, invstd, new_tickets)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of x, γ, β, offset and add."""
        x, bits, weight, keep, mask, count, mean, invstd, tickets = ctx.saved_tensors
        cut, dy = _Matrix(x), dense(dy)
        keeps, keep, bits = keep is not None, x if keep is None else keep, x if bits is None else bits
        d_weight, d_bias, d_offset, level, slope = torch.empty(5, cut.columns, device=x.device)
        parts = torch.empty(2 * cut.parts, cut.columns, device=x.device)
        _gradient_sum_kernel[cut.sums](
            x, bits, dy, keep, mean, parts, tickets, count, invstd, d_weight, d_bias, d_offset, level, slope,
            cut.rows, cut.columns, cut.space, ctx.total,
            MASKED=ctx.is_masked, KEEP=keeps, RELU=ctx.relu, **cut.settings,
        )  # fmt: skip
        dx = torch.empty_like(x)
        d_add = torch.empty_like(x) if ctx.adds else None
        _gradient_kernel[cut.tiles](
            x, bits, dy, keep, mask, mean, invstd, weight, level, slope, dx, dx if d_add is None else d_add,
            cut.rows, cut.columns, cut.space,
            MASKED=ctx.is_masked, KEEP=keeps, ADD=ctx.adds, RELU=ctx.relu, **cut.settings,
        )  # fmt: skip
        return dx, d_weight, d_bias, d_offset if ctx.needs_input_grad[3] else None, d_add, *(None,) * 8


def dense(x: Tensor) -> Tensor:
    """Makes a tensor dense with the channels of a place adjacent."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x.contiguous()
