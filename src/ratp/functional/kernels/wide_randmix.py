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

from ratp.functional.kernels.common import DeviceKernel, tanh, zero
from ratp.functional.kernels.randmix import EPS, NOISE_DIM, dot, total_weight

STORED = torch.float16
BLOCK = 16  # adjacent pixels computed together
DEPTH = 32  # numbers multiplied at once; a power of two
BLOCKS_AT_ONCE = 128  # blocks of a program
ELEMENTS_AT_ONCE = 2048  # numbers packed by a program
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
        seen = tl.load(window + (step // STEPS * ROW + step % STEPS * DEPTH))
        result = tl.dot(seen, tl.load(weights + step * (DEPTH * COLUMNS)), result)
    return result


@triton.jit
def _places(
    HIGH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Returns row and first column of a program's blocks, the channels of its columns, and places in a result."""
    ACROSS: tl.constexpr = (WIDE + BLOCK - 1) // BLOCK
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    there = tl.minimum(block, HIGH * ACROSS - 1)
    y, left = there // ACROSS, there % ACROSS * BLOCK
    n = tl.arange(0, COLUMNS)
    channel, x = n // BLOCK, left[:, None] + (n % BLOCK)[None, :]
    inside = (block < HIGH * ACROSS)[:, None] & (channel < 3)[None, :] & (x < WIDE)
    return y, left, channel, (y * WIDE)[:, None] + x, inside


@DeviceKernel
@triton.jit
def _encode_kernel(
    packed, taps, hidden, parts,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr, SIZE: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Computes a convolution without bias; for each column also count, mean and sum of squared differences."""
    image = tl.program_id(1).to(tl.int64)
    HIGH: tl.constexpr = HEIGHT - SIZE + 1
    WIDE: tl.constexpr = WIDTH - SIZE + 1
    y, left, channel, at, inside = _places(HIGH, WIDE, BLOCK, COLUMNS, BLOCKS)
    own = packed + image * (HEIGHT * ROW)
    value = _correlate(own, taps + TAPS, y * ROW + left * 3, ROW, SIZE, BLOCK, DEPTH, COLUMNS)
    plane = (channel * (HIGH * WIDE))[None, :]
    tl.store(hidden + image * (3 * HIGH * WIDE) + plane + at, value, mask=inside)
    count = tl.sum(inside.to(tl.float32), 0)
    mean = tl.sum(tl.where(inside, value, 0.0), 0) / tl.maximum(count, 1.0)
    rest = tl.where(inside, value - mean[None, :], 0.0)
    part = parts + (image * tl.num_programs(0) + tl.program_id(0)) * (3 * COLUMNS) + tl.arange(0, COLUMNS)
    tl.store(part, count)
    tl.store(part + COLUMNS, mean)
    tl.store(part + 2 * COLUMNS, tl.sum(rest * rest, 0))


@DeviceKernel
@triton.jit
def _style_kernel(
    parts, numbers, noise, styles, noise_rows, tiles,
    AREA: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Computes what normalises, scales and shifts each channel of an image: a factor and a summand."""
    image = tl.program_id(0)
    t = tl.arange(0, TILES)
    lane = tl.arange(0, 16)
    own = noise + image % noise_rows * NOISE_DIM
    for c in tl.static_range(3):
        part = parts + (image * tiles + t)[:, None] * (3 * COLUMNS) + (c * BLOCK + tl.arange(0, BLOCK))[None, :]
        there = (t < tiles)[:, None]
        count = tl.load(part, mask=there, other=0.0)
        means = tl.load(part + COLUMNS, mask=there, other=0.0)
        mean = tl.sum(count * means) / AREA
        squares = tl.load(part + 2 * COLUMNS, mask=there, other=0.0) + count * (means - mean) * (means - mean)
        scale = tl.load(numbers + 6 * NOISE_DIM + c) + dot(numbers + c * NOISE_DIM, own, lane)
        shift = tl.load(numbers + 6 * NOISE_DIM + 3 + c) + dot(numbers + (3 + c) * NOISE_DIM, own, lane)
        if RESIDUAL:
            scale += 1.0
        scale /= tl.sqrt(tl.sum(squares) / AREA + EPS)
        tl.store(styles + image * 6 + c, scale)
        tl.store(styles + image * 6 + 3 + c, shift - mean * scale)


@DeviceKernel
@triton.jit
def _decode_kernel(
    images, packed, frames, taps, numbers, keep, weights, mean, std, result, weight_rows, smallest, dropout,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, FRAMES: tl.constexpr, TAPS: tl.constexpr, BIASES: tl.constexpr,
    TANH: tl.constexpr, COLOUR: tl.constexpr, SAFE: tl.constexpr, RENORMALISE: tl.constexpr, TERMS: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Decodes all branches and mixes them with the image."""
    image = tl.program_id(1).to(tl.int64)
    count = tl.num_programs(1)
    y, left, channel, at, inside = _places(HEIGHT, WIDTH, BLOCK, COLUMNS, BLOCKS)
    FIRST: tl.constexpr = 1 if COLOUR else 0
    own = weights + image % weight_rows * (BRANCHES + FIRST + 1)
    total = total_weight(own, BRANCHES + FIRST + 1, smallest, SAFE, TERMS)
    mixed = tl.zeros([BLOCKS, COLUMNS], tl.float32)
    known = channel < 3
    for this in tl.static_range(BRANCHES):
        frame = frames + (FRAMES[this] * count + image * (HEIGHT + SIZES[this] - 1)) * ROW
        start = y * ROW + left * 3
        value = _correlate(frame, taps + TAPS[this], start, ROW, SIZES[this], BLOCK, DEPTH, COLUMNS)
        value += tl.load(numbers + BIASES[this] + channel, mask=known, other=0.0)[None, :]
        mixed += tl.load(own + FIRST + this) / total * (tanh(value) if TANH else value)
    at += (channel * (HEIGHT * WIDTH))[None, :]
    planes = image * (3 * HEIGHT * WIDTH)
    if COLOUR:
        colour = tl.zeros([BLOCKS, COLUMNS], tl.float32) + tl.load(numbers + 10 + channel, mask=known, other=0.0)[None, :]
        pixel = packed + image * (HEIGHT * ROW) + (y * ROW + left * 3)[:, None]
        pixel += (tl.arange(0, COLUMNS) % BLOCK * 3)[None, :]
        for c in tl.static_range(3):
            weight = tl.load(numbers + 1 + channel * 3 + c, mask=known, other=0.0)
            colour += tl.load(pixel + c, mask=inside, other=0.0).to(tl.float32) * weight[None, :]
        colour *= tl.load(keep + planes + at, mask=inside, other=0).to(tl.float32) / (1 - dropout)
        mixed += tl.load(own) / total * (tanh(colour) if TANH else colour)
    mixed += tl.load(own + FIRST + BRANCHES) / total * tl.load(images + planes + at, mask=inside, other=0.0)
    mixed = tl.sigmoid(mixed)
    if RENORMALISE:
        mixed -= tl.load(mean + channel, mask=known, other=0.0)[None, :]
        mixed /= tl.load(std + channel, mask=known, other=1.0)[None, :]
    tl.store(result + planes + at, mixed, mask=inside)


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
    tile = {"BLOCK": BLOCK, "DEPTH": DEPTH, "COLUMNS": triton.next_power_of_2(3 * BLOCK)}
    # the last block of a row reads this far
    row = 3 * BLOCK * (triton.cdiv(width, BLOCK) - 1) + DEPTH * _steps(max(sizes), BLOCK, DEPTH)
    row = triton.cdiv(row, 16) * 16
    packed = torch.empty(count, height, row, dtype=STORED, device=device)
    _pack(images, input_noise, None, packed, 0)
    begins = [sum(height + k - 1 for k in sizes[:branch]) for branch in range(len(sizes) + 1)]
    frames = torch.empty(count * begins[-1], row, dtype=STORED, device=device)
    for branch, size in enumerate(sizes):
        high, wide = height - size + 1, width - size + 1
        tiles = triton.cdiv(high * triton.cdiv(wide, BLOCK), BLOCKS_AT_ONCE)
        hidden = torch.empty(count, 3, high, wide, device=device)
        parts = torch.empty(count, tiles, 3, tile["COLUMNS"], device=device)
        _encode_kernel[(tiles, count)](
            packed, taps, hidden, parts,
            HEIGHT=height, WIDTH=width, ROW=row, SIZE=size, TAPS=layout.encoders[branch],
            BLOCKS=BLOCKS_AT_ONCE, **tile, **LAUNCH,
        )  # fmt: skip
        styles = torch.empty(count, 6, device=device)
        _style_kernel[(count,)](
            parts, numbers[layout.adain[branch] :], noise[branch], styles, noise.shape[1], tiles,
            AREA=high * wide, RESIDUAL=residual, BLOCK=BLOCK, COLUMNS=tile["COLUMNS"],
            TILES=triton.next_power_of_2(tiles),
        )  # fmt: skip
        frame = frames[count * begins[branch] : count * begins[branch + 1]].view(count, -1, row)
        _pack(hidden, None, styles, frame, size - 1)
    result = torch.empty_like(images)
    blocks = height * triton.cdiv(width, BLOCK)
    _decode_kernel[(triton.cdiv(blocks, BLOCKS_AT_ONCE), count)](
        images, packed, frames, taps, numbers, images if keep is None else keep, weights, mean, std, result,
        len(weights), smallest, dropout,
        HEIGHT=height, WIDTH=width, ROW=row, BRANCHES=len(sizes), SIZES=sizes, FRAMES=tuple(begins[:-1]),
        TAPS=layout.decoders, BIASES=layout.biases, TANH=squash, COLOUR=keep is not None, SAFE=safe_division,
        RENORMALISE=renormalise, TERMS=triton.next_power_of_2(weights.shape[1]),
        BLOCKS=BLOCKS_AT_ONCE, **tile, **LAUNCH,
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
    """Which random number stands where in the matrices of the convolutions, and where each branch begins."""

    order: Tensor
    encoders: tuple[int, ...]  # in the matrices, as the decoders
    decoders: tuple[int, ...]
    biases: tuple[int, ...]  # of the decoders, in the random numbers, as AdaIN's
    adain: tuple[int, ...]


@cache
def _layout(sizes: tuple[int, ...], has_colour: bool, block: int, depth: int, device: torch.device) -> _Layout:
    """The layout for random numbers of which the first is zero."""
    orders, begins, biases, adain = [], [], [], []
    at = 1 + 12 * has_colour
    for size in sizes:
        for is_decoder in (False, True):
            weights = torch.arange(at, at + 9 * size * size).reshape(3, 3, size, size)
            # a transposed convolution lists its inputs first and is flipped
            weights = weights.flip(2, 3).transpose(0, 1) if is_decoder else weights
            begins.append(sum(map(torch.numel, orders)))
            orders.append(_shifted(weights, block, depth))
            at += 9 * size * size + 3
        biases.append(at - 3)
        adain.append(at)
        at += 6 * NOISE_DIM.value + 6
    order = torch.cat([part.reshape(-1) for part in orders]).to(device)
    return _Layout(order, tuple(begins[::2]), tuple(begins[1::2]), tuple(biases), tuple(adain))


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
