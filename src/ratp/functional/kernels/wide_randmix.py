"""RandMix on large images: convolutions on tensor cores, with everything around them fused into load and store.

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
import triton
import triton.language as tl
from torch import Tensor

from ratp.functional.kernels.common import PIXELS_AT_ONCE, DeviceKernel, tanh, zero
from ratp.functional.kernels.randmix import EPS, NOISE_DIM, dot, total_weight

STORED = torch.float16
BLOCK = 16  # adjacent pixels computed together
DEPTH = 32  # numbers multiplied at once; a power of two
BLOCKS_AT_ONCE = 128  # blocks of a program
ELEMENTS_AT_ONCE = 2048  # numbers packed by a program
CACHE = tl.constexpr(".ca")  # windows overlap
LAUNCH = {"num_warps": 4, "num_stages": 4}


@DeviceKernel
@triton.jit
def _pack_kernel(
    planes, noise, styles, packed, high, wide, margin,
    ROW: tl.constexpr, NOISE: tl.constexpr, STYLED: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Packs images after adding noise, or after scaling and shifting every channel, into a frame of zeros."""
    image = tl.program_id(1).to(tl.int64)
    e = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    rows = high + 2 * margin
    y, c, x = e // ROW - margin, e % ROW % 3, e % ROW // 3 - margin
    inside = (y >= 0) & (y < high) & (x >= 0) & (x < wide)
    at = image * (3 * high * wide) + (c * high + y) * wide + x
    value = tl.load(planes + at, mask=inside, other=0.0)
    if NOISE:
        value += tl.load(noise + at, mask=inside, other=0.0)
    if STYLED:
        style = styles + image * 6 + c
        value = value * tl.load(style) + tl.load(style + 3)
    value = tl.where(inside, value, 0.0)
    tl.store(packed + image * (rows * ROW) + e, value.to(packed.dtype.element_ty), mask=e < rows * ROW)


@triton.jit
def _correlate(
    packed, taps, start, ROW: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Convolves the blocks that start at given places of a packed image; columns are output channels and pixels."""
    STEPS: tl.constexpr = (3 * (BLOCK + SIZE - 1) + DEPTH - 1) // DEPTH
    k = tl.arange(0, DEPTH)
    window = packed + start[:, None] + k[None, :]
    weights = taps + k[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    result = tl.zeros([start.shape[0], COLUMNS], tl.float32)
    for step in range(SIZE * STEPS):
        seen = tl.load(window + (step // STEPS * ROW + step % STEPS * DEPTH), cache_modifier=CACHE)
        result = tl.dot(seen, tl.load(weights + step * (DEPTH * COLUMNS)), result)
    return result


@DeviceKernel
@triton.jit
def _convolve_kernel(
    packed, taps, bias, result, parts,
    HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ROW: tl.constexpr, SIZE: tl.constexpr,
    ENCODE: tl.constexpr, TANH: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Encodes, without bias, and describes each column by count, mean and sum of squared differences; or decodes."""
    ACROSS: tl.constexpr = (WIDE + BLOCK - 1) // BLOCK
    image = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    there = tl.minimum(block, HIGH * ACROSS - 1)
    y, left = there // ACROSS, there % ACROSS * BLOCK
    value = _correlate(packed + image * (ROWS * ROW), taps, y * ROW + left * 3, ROW, SIZE, BLOCK, DEPTH, COLUMNS)
    n = tl.arange(0, COLUMNS)
    channel, x = n // BLOCK, left[:, None] + (n % BLOCK)[None, :]
    inside = (block < HIGH * ACROSS)[:, None] & (channel < 3)[None, :] & (x < WIDE)
    if ENCODE:
        count = tl.sum(inside.to(tl.float32), 0)
        mean = tl.sum(tl.where(inside, value, 0.0), 0) / tl.maximum(count, 1.0)
        rest = tl.where(inside, value - mean[None, :], 0.0)
        part = parts + (image * tl.num_programs(0) + tl.program_id(0)) * (3 * COLUMNS) + n
        tl.store(part, count)
        tl.store(part + COLUMNS, mean)
        tl.store(part + 2 * COLUMNS, tl.sum(rest * rest, 0))
    else:
        value += tl.load(bias + channel, mask=channel < 3, other=0.0)[None, :]
        if TANH:
            value = tanh(value)
    at = (channel * (HIGH * WIDE))[None, :] + (y * WIDE)[:, None] + x
    tl.store(result + image * (3 * HIGH * WIDE) + at, value.to(result.dtype.element_ty), mask=inside)


@DeviceKernel
@triton.jit
def _style_kernel(
    parts, numbers, noise, styles, adain, first_row, noise_rows, tiles, area,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Computes what normalises, scales and shifts each channel of an image: a factor and a summand."""
    image = tl.program_id(0)
    t = tl.arange(0, TILES)
    lane = tl.arange(0, 16)
    own = noise + (first_row + image % noise_rows) * NOISE_DIM
    numbers += adain
    for c in tl.static_range(3):
        part = parts + (image * tiles + t)[:, None] * (3 * COLUMNS) + (c * BLOCK + tl.arange(0, BLOCK))[None, :]
        there = (t < tiles)[:, None]
        count = tl.load(part, mask=there, other=0.0)
        means = tl.load(part + COLUMNS, mask=there, other=0.0)
        mean = tl.sum(count * means) / area
        squares = tl.load(part + 2 * COLUMNS, mask=there, other=0.0) + count * (means - mean) * (means - mean)
        scale = tl.load(numbers + 6 * NOISE_DIM + c) + dot(numbers + c * NOISE_DIM, own, lane)
        shift = tl.load(numbers + 6 * NOISE_DIM + 3 + c) + dot(numbers + (3 + c) * NOISE_DIM, own, lane)
        if RESIDUAL:
            scale += 1.0
        scale /= tl.sqrt(tl.sum(squares) / area + EPS)
        tl.store(styles + image * 6 + c, scale)
        tl.store(styles + image * 6 + 3 + c, shift - mean * scale)


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


def mix_wide(
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
    layout = _layout(sizes, keep is not None, BLOCK, DEPTH, device)
    numbers = torch.cat([zero(device), *(part.reshape(-1) for part in layers)])
    taps = numbers.to(STORED).index_select(0, layout.order)
    tile = {"BLOCK": BLOCK, "DEPTH": DEPTH, "COLUMNS": triton.next_power_of_2(3 * BLOCK), "BLOCKS": BLOCKS_AT_ONCE}
    tile |= LAUNCH
    # the last block of a row reads this far
    row = 3 * BLOCK * (triton.cdiv(width, BLOCK) - 1) + DEPTH * _steps(max(sizes), BLOCK, DEPTH)
    row = triton.cdiv(row, 16) * 16
    packed = torch.empty(count, height, row, dtype=STORED, device=device)
    _pack(images, input_noise, None, packed, 0)
    branches = torch.empty(len(sizes), *images.shape, dtype=STORED, device=device)
    for branch, size in enumerate(sizes):
        high, wide = height - size + 1, width - size + 1
        encoder, decoder, bias, adain = layout.begins[branch]
        tiles = triton.cdiv(high * triton.cdiv(wide, BLOCK), BLOCKS_AT_ONCE)
        hidden = torch.empty(count, 3, high, wide, device=device)
        parts = torch.empty(count, tiles, 3, tile["COLUMNS"], device=device)
        _convolve_kernel[(tiles, count)](
            packed, taps[encoder:], numbers, hidden, parts,
            HIGH=high, WIDE=wide, ROWS=height, ROW=row, SIZE=size, ENCODE=True, TANH=False, **tile,
        )  # fmt: skip
        styles = torch.empty(count, 6, device=device)
        _style_kernel[(count,)](
            parts, numbers, noise, styles, adain, branch * noise.shape[1], noise.shape[1], tiles, high * wide,
            RESIDUAL=residual, BLOCK=BLOCK, COLUMNS=tile["COLUMNS"], TILES=triton.next_power_of_2(tiles),
        )  # fmt: skip
        frame = torch.empty(count, high + 2 * (size - 1), row, dtype=STORED, device=device)
        _pack(hidden, None, styles, frame, size - 1)
        _convolve_kernel[(triton.cdiv(height * triton.cdiv(width, BLOCK), BLOCKS_AT_ONCE), count)](
            frame, taps[decoder:], numbers[bias:], branches[branch], parts,
            HIGH=height, WIDE=width, ROWS=frame.shape[1], ROW=row, SIZE=size, ENCODE=False, TANH=squash, **tile,
        )  # fmt: skip
    result = torch.empty_like(images)
    _mix_kernel[(triton.cdiv(height * width, PIXELS_AT_ONCE), count)](
        images, packed, branches, numbers, images if keep is None else keep, weights, mean, std, result,
        len(weights), smallest, dropout,
        HEIGHT=height, WIDTH=width, ROW=row, BRANCHES=len(sizes), TANH=squash, COLOUR=keep is not None,
        SAFE=safe_division, RENORMALISE=renormalise, TERMS=triton.next_power_of_2(weights.shape[1]),
        PIXELS=PIXELS_AT_ONCE,
    )  # fmt: skip
    return result


def _pack(planes: Tensor, noise: Tensor | None, styles: Tensor | None, packed: Tensor, margin: int) -> None:
    count, _, high, wide = planes.shape
    row = packed.shape[-1]
    _pack_kernel[(triton.cdiv((high + 2 * margin) * row, ELEMENTS_AT_ONCE), count)](
        planes, planes if noise is None else noise, planes if styles is None else styles, packed, high, wide, margin,
        ROW=row, NOISE=noise is not None, STYLED=styles is not None, ELEMENTS=ELEMENTS_AT_ONCE,
    )  # fmt: skip


class _Layout(NamedTuple):
    """Which random number stands where in the matrices of the convolutions, and where each branch begins.

    A branch begins in the matrices with its encoder and its decoder, in the numbers with its decoder's bias and AdaIN.
    """

    order: Tensor
    begins: tuple[tuple[int, int, int, int], ...]


@cache
def _layout(sizes: tuple[int, ...], has_colour: bool, block: int, depth: int, device: torch.device) -> _Layout:
    """The layout for random numbers of which the first is zero."""
    parts: list[Tensor] = []
    begins = []
    at, done = 1 + 12 * has_colour, 0
    for size in sizes:
        count = 9 * size * size
        encoder = torch.arange(at, at + count).reshape(3, 3, size, size)
        # a transposed convolution lists its inputs first and is flipped
        decoder = (encoder + count + 3).flip(2, 3).transpose(0, 1)
        matrices = [_shifted(weights, block, depth) for weights in (encoder, decoder)]
        at += 2 * (count + 3)
        begins.append((done, done + matrices[0].numel(), at - 3, at))
        parts += matrices
        done += 2 * matrices[0].numel()
        at += 6 * NOISE_DIM.value + 6
    return _Layout(torch.cat([part.reshape(-1) for part in parts]).to(device), tuple(begins))


def _shifted(weights: Tensor, block: int, depth: int) -> Tensor:
    """Arranges weights (3, 3, k, k) as (row, seen pixel and channel, output channel and pixel of the block)."""
    size = weights.shape[-1]
    seen = torch.arange(depth * _steps(size, block, depth))
    column = (seen // 3)[:, None] - torch.arange(block)
    shifted = weights[:, seen % 3].permute(2, 1, 0, 3)  # row, seen, output channel, column
    index = column.clamp(0, size - 1)[None, :, None].expand(size, -1, 3, -1)
    shifted = shifted.gather(3, index).where(((column >= 0) & (column < size))[:, None], 0).flatten(2)
    return torch.nn.functional.pad(shifted, (0, triton.next_power_of_2(3 * block) - 3 * block))


def _steps(size: int, block: int, depth: int) -> int:
    """In how many parts a row of what a block sees is multiplied."""
    return -(-3 * (block + size - 1) // depth)
