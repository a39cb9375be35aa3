"""RandMix on small images in two kernels: all encoders with their normalisation, then all decoders with the mixture.

A program of the first kernel handles one image and one autoencoder, so that it sees all pixels a channel's statistics
need; one of the second handles some pixels of one image and loops over the autoencoders. See
:mod:`ratp.functional.kernels.common` for the memory layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratp.functional.kernels.common import (
    PIXELS_AT_ONCE,
    DeviceKernel,
    Packing,
    correlate,
    correlate_inside,
    normalise,
    pack,
    place_in_frame,
    tanh,
    zero,
)

NOISE_DIM = tl.constexpr(10)
EPS = tl.constexpr(1e-5)


@triton.jit
def dot(numbers, noise, lane):
    """Multiplies a row of AdaIN's layer by the noise."""
    there = lane < NOISE_DIM
    return tl.sum(tl.load(numbers + lane, mask=there, other=0.0) * tl.load(noise + lane, mask=there, other=0.0), 0)


@triton.jit
def total_weight(weights, count, smallest, SAFE: tl.constexpr, TERMS: tl.constexpr):
    """Sums the mixing weights, and keeps the sum away from zero."""
    term = tl.arange(0, TERMS)
    total = tl.sum(tl.load(weights + term, mask=term < count, other=0.0), 0)
    if SAFE:
        size = tl.maximum(tl.abs(total), smallest)
        total = tl.where(total < 0, -size, size)
    return total


@triton.jit
def _encode(
    images, noise, hidden, noise_rows, branch, encoder, adain,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, RESIDUAL: tl.constexpr,
    SIZE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    HIGH: tl.constexpr = HEIGHT - SIZE + 1
    WIDE: tl.constexpr = WIDTH - SIZE + 1
    p = tl.arange(0, PIXELS)
    inside = p < HIGH * WIDE
    own = images + image * (3 * HEIGHT * WIDTH)
    red, green, blue = correlate_inside(own, encoder, p, inside, HEIGHT, WIDTH, SIZE, PIXELS)
    n = noise + (branch * noise_rows + image % noise_rows) * NOISE_DIM
    lane = tl.arange(0, 16)
    PLANE: tl.constexpr = (HEIGHT + MARGIN) * (WIDTH + MARGIN)
    place = place_in_frame(p, WIDTH, MARGIN, SIZE)
    for out in tl.static_range(3):
        value = (red if out == 0 else (green if out == 1 else blue)) + tl.load(encoder + 12 * SIZE * SIZE + out)
        value, _ = normalise(value, inside, HIGH * WIDE, EPS)
        scale = tl.load(adain + 6 * NOISE_DIM + out) + dot(adain + out * NOISE_DIM, n, lane)
        shift = tl.load(adain + 6 * NOISE_DIM + 3 + out) + dot(adain + (3 + out) * NOISE_DIM, n, lane)
        if RESIDUAL:
            scale += 1.0
        plane = hidden + ((branch * tl.num_programs(0) + image) * 3 + out) * PLANE
        tl.store(plane + place, value * scale + shift, mask=inside)


@DeviceKernel
@triton.jit
def _encode_kernel(
    images, numbers, layout, noise, hidden, noise_rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, RESIDUAL: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Computes an autoencoder's hidden image, in a frame of zeros; large kernels take longest and come first."""
    branch = BRANCHES - 1 - tl.program_id(1)
    encoder = numbers + tl.multiple_of(tl.load(layout + branch * 3), 4)
    adain = numbers + tl.load(layout + branch * 3 + 2)
    for this in tl.static_range(BRANCHES):
        if branch == this:
            _encode(
                images, noise, hidden, noise_rows, branch, encoder, adain, HEIGHT, WIDTH, MARGIN, RESIDUAL,
                SIZES[this], PIXELS[this],
            )  # fmt: skip


@DeviceKernel
@triton.jit
def _decode_kernel(
    images, inputs, hidden, numbers, layout, keep, weights, mean, std, result, weight_rows, smallest, dropout,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr,
    TANH: tl.constexpr, COLOUR: tl.constexpr, SAFE: tl.constexpr, RENORMALISE: tl.constexpr,
    TERMS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    p = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    y, x = p // WIDTH, p % WIDTH
    inside = p < HEIGHT * WIDTH
    c = tl.arange(0, 4)
    there = (c < 3)[:, None] & inside[None, :]
    # the weights: colour (if there is one), autoencoders, the image itself
    first = 1 if COLOUR else 0
    own = weights + (image % weight_rows) * (BRANCHES + first + 1)
    total = total_weight(own, BRANCHES + first + 1, smallest, SAFE, TERMS)
    mixed_red = tl.zeros([PIXELS], tl.float32)
    mixed_green = tl.zeros([PIXELS], tl.float32)
    mixed_blue = tl.zeros([PIXELS], tl.float32)
    PLANE: tl.constexpr = (HEIGHT + MARGIN) * (WIDTH + MARGIN)
    corner = c[:, None] * PLANE + (y * (WIDTH + MARGIN) + x)[None, :]
    for branch in tl.static_range(BRANCHES):
        planes = hidden + (branch * tl.num_programs(0) + image) * 3 * PLANE
        decoder = numbers + tl.multiple_of(tl.load(layout + branch * 3 + 1), 4)
        last = planes + corner + ((SIZES[branch] - 1) * (WIDTH + MARGIN) + SIZES[branch] - 1)
        new_red, new_green, new_blue = correlate(last, decoder, there, WIDTH + MARGIN, SIZES[branch], PIXELS, -1)
        bias = decoder + 12 * SIZES[branch] * SIZES[branch]
        new_red += tl.load(bias)
        new_green += tl.load(bias + 1)
        new_blue += tl.load(bias + 2)
        share = tl.load(own + first + branch) / total
        mixed_red += share * (tanh(new_red) if TANH else new_red)
        mixed_green += share * (tanh(new_green) if TANH else new_green)
        mixed_blue += share * (tanh(new_blue) if TANH else new_blue)
    base = image * 3 * HEIGHT * WIDTH + p
    share = tl.load(own + first + BRANCHES) / total
    for out in tl.static_range(3):
        mixed = mixed_red if out == 0 else (mixed_green if out == 1 else mixed_blue)
        at = base + out * HEIGHT * WIDTH
        if COLOUR:
            colour = tl.zeros([PIXELS], tl.float32) + tl.load(numbers + 9 + out)
            for channel in tl.static_range(3):
                value = tl.load(inputs + base + channel * HEIGHT * WIDTH, mask=inside, other=0.0)
                colour += value * tl.load(numbers + out * 3 + channel)
            colour *= tl.load(keep + at, mask=inside, other=0).to(tl.float32) / (1 - dropout)
            mixed += tl.load(own) / total * (tanh(colour) if TANH else colour)
        mixed += share * tl.load(images + at, mask=inside, other=0.0)
        mixed = tl.sigmoid(mixed)
        if RENORMALISE:
            mixed = (mixed - tl.load(mean + out)) / tl.load(std + out)
        tl.store(result + at, mixed, mask=inside)


def mix(
    images: Tensor,  # shape (n, 3, height, width)
    input_noise: Tensor | None,  # added to what the branches see
    # weight and bias of the colour layer, if any; then those of encoder, decoder and AdaIN of every autoencoder
    layers: Sequence[Tensor],
    sizes: tuple[int, ...],  # kernel size of each autoencoder
    noise: Tensor,  # AdaIN's, shape (autoencoders, n or 1, 10)
    keep: Tensor | None,  # which colours stay, bool like the images; None: no colour branch
    weights: Tensor,  # mixing weights, shape (n or 1, terms)
    mean: Tensor,  # of the images' normalisation
    std: Tensor,  # likewise
    *,
    residual: bool,  # whether AdaIN's scale is 1 + γ
    squash: bool,  # whether every branch ends in tanh
    safe_division: bool,  # whether |Σw| is at least ``smallest``
    renormalise: bool,  # whether the result is normalised again
    smallest: float,
    dropout: float,  # share of colours dropped
) -> Tensor:
    """Mixes normalised images with what random autoencoders make of them."""
    images = images.contiguous()
    inputs = images if input_noise is None else images + input_noise
    count, _, height, width = images.shape
    order, layout = _layout(sizes, keep is not None, images.device)
    numbers = torch.cat([zero(images.device), *(part.reshape(-1) for part in layers)]).index_select(0, order)
    pixels = tuple(triton.next_power_of_2((height - k + 1) * (width - k + 1)) for k in sizes)
    margin = max(sizes) - 1
    hidden = torch.zeros(len(sizes), count, 3, height + margin, width + margin, device=images.device)
    _encode_kernel[(count, len(sizes))](
        inputs, numbers, layout, noise, hidden, noise.shape[1],
        HEIGHT=height, WIDTH=width, MARGIN=margin, RESIDUAL=residual,
        BRANCHES=len(sizes), SIZES=sizes, PIXELS=pixels,
    )  # fmt: skip
    result = torch.empty_like(images)
    _decode_kernel[(count, triton.cdiv(height * width, PIXELS_AT_ONCE))](
        images, inputs, hidden, numbers, layout, inputs if keep is None else keep, weights, mean, std, result,
        len(weights), smallest, dropout,
        HEIGHT=height, WIDTH=width, MARGIN=margin, BRANCHES=len(sizes), SIZES=sizes,
        TANH=squash, COLOUR=keep is not None, SAFE=safe_division, RENORMALISE=renormalise,
        TERMS=triton.next_power_of_2(weights.shape[1]), PIXELS=PIXELS_AT_ONCE,
    )  # fmt: skip
    return result


@cache
def _layout(sizes: tuple[int, ...], has_colour: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The order kernels read the random numbers in, of which the first is zero, and where the layers begin in it.

    The latter are the places of encoder, decoder and AdaIN of every autoencoder, one row each.
    """
    packing, begins = Packing(), []
    at = 1 + 12 * has_colour
    packing.add(torch.arange(1, at))
    for size in sizes:
        row = []
        for is_decoder in (False, True):
            weights = torch.arange(at, at + 9 * size * size).reshape(3, 3, size, size)
            at += 9 * size * size
            # a transposed convolution lists its inputs first
            row.append(packing.add(pack(weights.transpose(0, 1) if is_decoder else weights)))
            packing.add(torch.tensor([at, at + 1, at + 2, 0]))
            at += 3
        adain = 6 * NOISE_DIM.value + 6
        row.append(packing.add(torch.arange(at, at + adain)))
        at += adain
        packing.add(torch.zeros(-adain % 4, dtype=torch.int64))
        begins.append(row)
    return packing.on(device), torch.tensor(begins, dtype=torch.int32).to(device)
