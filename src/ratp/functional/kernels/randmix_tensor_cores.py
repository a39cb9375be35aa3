"""RandMix on tensor cores, for images of any size: convolutions with everything around them fused into load and store.

A program computes BLOCK adjacent pixels of a row at once, for many such blocks, as a product of two matrices. One holds
what the blocks see of the input: in *packed* images, (rows, columns, channels) and framed with zeros, that is one
contiguous window per row of the kernel. The other holds the weights of the kernel, shifted for every pixel of a block.

The matrices are float16, which has the same ten bits of mantissa as TF32 and half its size; sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from ratp.functional.kernels.common import PIXELS_AT_ONCE, DeviceKernel, tanh, zero
from ratp.functional.kernels.randmix import EPS, NOISE_DIM, dot, total_weight

STORED = torch.float16
BLOCK = 16  # adjacent pixels computed together
DEPTH = 32  # numbers multiplied at once; a power of two
BLOCKS_AT_ONCE = 128  # most blocks of a program, which computes a part of one image
ELEMENTS_AT_ONCE = 2048  # numbers packed by a program
CACHE = ".ca"  # of what the blocks see: also L1, because they overlap
LAUNCH = {"num_warps": 4, "num_stages": 4}


@triton.jit
def _entry(layout, branch, COLUMN: tl.constexpr):
    """Looks up a branch's kernel size, or where its numbers begin."""
    return tl.load(layout + branch * 5 + COLUMN)


@DeviceKernel
@triton.jit
def _pack_kernel(
    planes, noise, styles, packed, layout, first,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr,
    STYLED: tl.constexpr, NOISE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Packs images after adding noise, or what encoders made of them after scaling and shifting every channel."""
    branch = tl.program_id(2)
    image = branch.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)  # of this branch
    margin = _entry(layout, branch + first, 0) - 1
    e = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    y, c, x = e // ROW - margin, e % ROW % 3, e % ROW // 3 - margin
    inside = (y >= 0) & (y < HEIGHT - margin) & (x >= 0) & (x < WIDTH - margin)
    at = image * (3 * HEIGHT * WIDTH) + ((c * HEIGHT + y) * WIDTH + x)
    value = tl.load(planes + at, mask=inside, other=0.0)
    if NOISE:
        value += tl.load(noise + at, mask=inside, other=0.0)
    if STYLED:
        value = value * tl.load(styles + image * 6 + c) + tl.load(styles + image * 6 + 3 + c)
    value = tl.where(inside, value, 0.0).to(packed.dtype.element_ty)
    tl.store(packed + image * (ROWS * ROW) + e, value, mask=e < (HEIGHT + margin) * ROW)


@DeviceKernel
@triton.jit
def _convolve_kernel(
    packed, taps, numbers, layout, result, parts,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr,
    ENCODE: tl.constexpr, TANH: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Encodes, without bias, and describes each column by count, mean and sum of squared differences; or decodes."""
    branch = tl.num_programs(2) - 1 - tl.program_id(2)  # large kernels take longest and come first
    image = branch.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)  # of this branch
    size = _entry(layout, branch, 0)
    high, wide = HEIGHT, WIDTH
    if ENCODE:  # all branches see the same images
        high, wide = HEIGHT - size + 1, WIDTH - size + 1
        packed += tl.program_id(1).to(tl.int64) * (ROWS * ROW)
        taps += tl.multiple_of(_entry(layout, branch, 1), 16)
    else:
        packed += image * (ROWS * ROW)
        taps += tl.multiple_of(_entry(layout, branch, 2), 16)
    across = (wide + BLOCK - 1) // BLOCK
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    y, left = block // across, block % across * BLOCK
    k = tl.arange(0, DEPTH)
    n = tl.arange(0, COLUMNS)
    start = tl.minimum(y, high - 1) * ROW + left * 3
    value = tl.zeros([BLOCKS, COLUMNS], tl.float32)
    steps = (3 * (BLOCK + size - 1) + DEPTH - 1) // DEPTH  # per row of the kernel
    offset, step = 0, 0
    for _ in range(tl.where(tl.program_id(0) * BLOCKS < high * across, size * steps, 0)):
        seen = tl.load(packed + tl.multiple_of(offset, 16) + (start[:, None] + k[None, :]), cache_modifier=CACHE)
        value = tl.dot(seen, tl.load(taps + (k[:, None] * COLUMNS + n[None, :])), value)
        taps += DEPTH * COLUMNS
        step += 1
        offset += tl.where(step == steps, ROW - (steps - 1) * DEPTH, DEPTH)
        step = tl.where(step == steps, 0, step)
    channel, x = n // BLOCK, left[:, None] + (n % BLOCK)[None, :]
    inside = (y < high)[:, None] & (channel < 3)[None, :] & (x < wide)
    if ENCODE:
        total = tl.sum(inside.to(tl.float32), 0)
        mean = tl.sum(tl.where(inside, value, 0.0), 0) / tl.maximum(total, 1.0)
        rest = tl.where(inside, value - mean[None, :], 0.0)
        part = parts + (image * tl.num_programs(0) + tl.program_id(0)) * (3 * COLUMNS) + n
        tl.store(part, total)
        tl.store(part + COLUMNS, mean)
        tl.store(part + 2 * COLUMNS, tl.sum(rest * rest, 0))
    else:
        value += tl.load(numbers + _entry(layout, branch, 3) + channel, mask=channel < 3, other=0.0)[None, :]
        if TANH:
            value = tanh(value)
    at = (channel * (HEIGHT * WIDTH))[None, :] + (y * WIDTH)[:, None] + x
    stored = (y < high)[:, None] & (channel < 3)[None, :] & (x < WIDTH)  # whole blocks, though some may be too wide
    tl.store(result + image * (3 * HEIGHT * WIDTH) + at, value.to(result.dtype.element_ty), mask=stored)


@DeviceKernel
@triton.jit
def _style_kernel(
    parts, numbers, layout, noise, styles, noise_rows, tiles,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Computes what normalises, scales and shifts each channel of an image: a factor and a summand."""
    image, branch = tl.program_id(0), tl.program_id(1)
    row = branch * tl.num_programs(0) + image
    margin = _entry(layout, branch, 0) - 1
    area = (HEIGHT - margin) * (WIDTH - margin)
    adain = numbers + _entry(layout, branch, 4)
    own = noise + (branch * noise_rows + image % noise_rows) * NOISE_DIM
    t = tl.arange(0, TILES)
    lane = tl.arange(0, 16)
    there = (t < tiles)[:, None]
    for c in tl.static_range(3):
        part = parts + (row * tiles + t)[:, None] * (3 * COLUMNS) + (c * BLOCK + tl.arange(0, BLOCK))[None, :]
        count = tl.load(part, mask=there, other=0.0)
        means = tl.load(part + COLUMNS, mask=there, other=0.0)
        mean = tl.sum(count * means) / area
        squares = tl.load(part + 2 * COLUMNS, mask=there, other=0.0) + count * (means - mean) * (means - mean)
        scale = tl.load(adain + 6 * NOISE_DIM + c) + dot(adain + c * NOISE_DIM, own, lane)
        shift = tl.load(adain + 6 * NOISE_DIM + 3 + c) + dot(adain + (3 + c) * NOISE_DIM, own, lane)
        if RESIDUAL:
            scale += 1.0
        scale /= tl.sqrt(tl.sum(squares) / area + EPS)
        tl.store(styles + row * 6 + c, scale)
        tl.store(styles + row * 6 + 3 + c, shift - mean * scale)


@DeviceKernel
@triton.jit
def _mix_kernel(
    images, packed, branches, numbers, keep, weights, mean, std, result, weight_rows, smallest, dropout,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr, BRANCHES: tl.constexpr,
    TANH: tl.constexpr, COLOUR: tl.constexpr, SAFE: tl.constexpr, RENORMALISE: tl.constexpr, TERMS: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    """Mixes what the branches made with the colours and the image itself."""
    image = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    inside = p < HEIGHT * WIDTH
    FIRST: tl.constexpr = 1 if COLOUR else 0
    own = weights + image % weight_rows * (BRANCHES + FIRST + 1)
    total = total_weight(own, BRANCHES + FIRST + 1, smallest, SAFE, TERMS)
    seen = packed + image * (HEIGHT * ROW) + p // WIDTH * ROW + p % WIDTH * 3
    for out in tl.static_range(3):
        at = (image * 3 + out) * (HEIGHT * WIDTH) + p
        mixed = tl.load(own + FIRST + BRANCHES) / total * tl.load(images + at, mask=inside, other=0.0)
        if COLOUR:
            colour = tl.zeros([PIXELS], tl.float32) + tl.load(numbers + 10 + out)
            for c in tl.static_range(3):
                value = tl.load(seen + c, mask=inside, other=0.0).to(tl.float32)
                colour += value * tl.load(numbers + 1 + out * 3 + c)
            colour *= tl.load(keep + at, mask=inside, other=0).to(tl.float32) / (1 - dropout)
            mixed += tl.load(own) / total * (tanh(colour) if TANH else colour)
        for branch in tl.static_range(BRANCHES):
            made = branches + tl.num_programs(1).to(tl.int64) * (branch * 3 * HEIGHT * WIDTH) + at
            share = tl.load(own + FIRST + branch) / total
            mixed += share * tl.load(made, mask=inside, other=0.0).to(tl.float32)
        mixed = tl.sigmoid(mixed)
        if RENORMALISE:
            mixed = (mixed - tl.load(mean + out)) / tl.load(std + out)
        tl.store(result + at, mixed, mask=inside)


def mix(
    images: Tensor,  # shape (n, 3, height, width)
    input_noise: Tensor | None,  # added to what the branches see
    layers: Sequence[Tensor],  # this and what follows: as for :func:`ratp.functional.kernels.randmix.mix`
    sizes: tuple[int, ...],
    noise: Tensor,
    keep: Tensor | None,
    weights: Tensor,
    mean: Tensor,
    std: Tensor,
    *,
    residual: bool,
    squash: bool,
    safe_division: bool,
    renormalise: bool,
    smallest: float,
    dropout: float,
) -> Tensor:
    """Mixes normalised images with what random autoencoders make of them."""
    images, device = images.contiguous(), images.device
    count, _, height, width = images.shape
    branches = len(sizes)
    # the last block of a row sees this far
    row = 3 * BLOCK * (triton.cdiv(width, BLOCK) - 1) + DEPTH * _steps(max(sizes), BLOCK, DEPTH)
    row = triton.cdiv(row, 16) * 16
    layout = _layout(sizes, keep is not None, BLOCK, DEPTH, device)
    numbers = torch.cat([zero(device), *(part.reshape(-1) for part in layers)])
    taps = numbers.to(STORED).index_select(0, layout.order)
    blocks = height * triton.cdiv(width, BLOCK)
    at_once = max(16, min(BLOCKS_AT_ONCE, triton.next_power_of_2(blocks)))
    shape = {"HEIGHT": height, "WIDTH": width}
    tile = {"BLOCK": BLOCK, "COLUMNS": triton.next_power_of_2(3 * BLOCK)}
    dots = {"ROW": row, "DEPTH": DEPTH, "BLOCKS": at_once, "CACHE": CACHE, **shape, **tile, **LAUNCH}

    packed = torch.empty(count, height, row, dtype=STORED, device=device)
    _pack_kernel[(triton.cdiv(height * row, ELEMENTS_AT_ONCE), count, 1)](
        images, images if input_noise is None else input_noise, images, packed, layout.branches, branches,
        ROWS=height, ROW=row, STYLED=False, NOISE=input_noise is not None, ELEMENTS=ELEMENTS_AT_ONCE, **shape,
    )  # fmt: skip
    wide = width - min(sizes) + 1
    tiles = triton.cdiv((height - min(sizes) + 1) * triton.cdiv(wide, BLOCK), at_once)
    hidden = torch.empty(branches, *images.shape, device=device)
    parts = torch.empty(branches, count, tiles, 3, tile["COLUMNS"], device=device)
    _convolve_kernel[(tiles, count, branches)](
        packed, taps, numbers, layout.branches, hidden, parts, ROWS=height, ENCODE=True, TANH=False, **dots
    )
    styles = torch.empty(branches, count, 6, device=device)
    _style_kernel[(count, branches)](
        parts, numbers, layout.branches, noise, styles, noise.shape[1], tiles,
        RESIDUAL=residual, TILES=triton.next_power_of_2(tiles), **shape, **tile,
    )  # fmt: skip
    rows = height + max(sizes) - 1
    frames = torch.empty(branches, count, rows, row, dtype=STORED, device=device)
    _pack_kernel[(triton.cdiv(rows * row, ELEMENTS_AT_ONCE), count, branches)](
        hidden, hidden, styles, frames, layout.branches, 0,
        ROWS=rows, ROW=row, STYLED=True, NOISE=False, ELEMENTS=ELEMENTS_AT_ONCE, **shape,
    )  # fmt: skip
    decoded = torch.empty(branches, *images.shape, dtype=STORED, device=device)
    _convolve_kernel[(triton.cdiv(blocks, at_once), count, branches)](
        frames, taps, numbers, layout.branches, decoded, parts, ROWS=rows, ENCODE=False, TANH=squash, **dots
    )
    result = torch.empty_like(images)
    _mix_kernel[(triton.cdiv(height * width, PIXELS_AT_ONCE), count)](
        images, packed, decoded, numbers, images if keep is None else keep, weights, mean, std, result,
        len(weights), smallest, dropout,
        ROW=row, BRANCHES=branches, TANH=squash, COLOUR=keep is not None, SAFE=safe_division,
        RENORMALISE=renormalise, TERMS=triton.next_power_of_2(weights.shape[1]), PIXELS=PIXELS_AT_ONCE, **shape,
    )  # fmt: skip
    return result


class _Layout(NamedTuple):
    """Which random number stands where in the matrices of the convolutions, and where each branch begins.

    Of a branch, there are the kernel size, where encoder and decoder begin in the matrices, and where the decoder's
    bias and AdaIN begin in the numbers. The images themselves follow as a branch with a kernel of one pixel.
    """

    order: Tensor
    branches: Tensor


@cache
def _layout(sizes: tuple[int, ...], has_colour: bool, block: int, depth: int, device: torch.device) -> _Layout:
    """The layout for random numbers of which the first is zero."""
    matrices: list[Tensor] = []
    branches = []
    at, done = 1 + 12 * has_colour, 0
    for size in sizes:
        count = 9 * size * size
        encoder = torch.arange(at, at + count).reshape(3, 3, size, size)
        # a transposed convolution lists its inputs first and is flipped
        decoder = (encoder + count + 3).flip(2, 3).transpose(0, 1)
        pair = torch.stack([_shifted(weights, block, depth) for weights in (encoder, decoder)])
        at += 2 * (count + 3)
        branches.append((size, done, done + pair.numel() // 2, at - 3, at))
        matrices.append(pair.reshape(-1))
        done += pair.numel()
        at += 6 * NOISE_DIM.value + 6
    entries = torch.tensor([*branches, (1, 0, 0, 0, 0)], dtype=torch.int32)
    return _Layout(torch.cat(matrices).to(device), entries.to(device))


def _shifted(weights: Tensor, block: int, depth: int) -> Tensor:
    """Arranges weights (3, 3, k, k) as (row, seen pixel and channel, output channel and pixel of the block)."""
    size = weights.shape[-1]
    seen = torch.arange(depth * _steps(size, block, depth))
    column = (seen // 3)[:, None] - torch.arange(block)
    shifted = weights[:, seen % 3].permute(2, 1, 0, 3)  # row, seen, output channel, column
    index = column.clamp(0, size - 1)[None, :, None].expand(size, -1, 3, -1)
    shifted = shifted.gather(3, index).where(((column >= 0) & (column < size))[:, None], 0).flatten(2)
    return F.pad(shifted, (0, triton.next_power_of_2(3 * block) - 3 * block))


def _steps(size: int, block: int, depth: int) -> int:
    """In how many parts a row of what a block sees is multiplied."""
    return -(-3 * (block + size - 1) // depth)
