"""RandMix on small images in two kernels: all encoders with their normalisation, then all decoders with the mixture.

Each program of the first has one image and one autoencoder, so that the statistics of a channel lie within it; each of
the second has some pixels of one image and goes through the autoencoders. Channels and weights lie as
:mod:`ratp.kernels.channels` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratp.kernels.channels import correlate_inside, place_in_frame, tanh
from ratp.kernels.launch import AtHome
from ratp.parts.randmix_draw import COLOUR_DROPOUT, SMALLEST_WEIGHT_SUM, Draw

# Beyond, one program has too many pixels to hold.
MOST_PIXELS = 1024
PIXELS_AT_ONCE = 256
NOISE_DIM = tl.constexpr(10)
EPS = tl.constexpr(1e-5)


@triton.jit
def _dot(numbers, noise, lane):
    """A row of AdaIN's layer times the noise."""
    there = lane < NOISE_DIM
    return tl.sum(tl.load(numbers + lane, mask=there, other=0.0) * tl.load(noise + lane, mask=there, other=0.0), 0)


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
        mean = tl.sum(tl.where(inside, value, 0.0), 0) / (HIGH * WIDE)
        value = tl.where(inside, value - mean, 0.0)
        deviation = tl.sqrt(tl.sum(value * value, 0) / (HIGH * WIDE) + EPS)
        scale = tl.load(adain + 6 * NOISE_DIM + out) + _dot(adain + out * NOISE_DIM, n, lane)
        shift = tl.load(adain + 6 * NOISE_DIM + 3 + out) + _dot(adain + (3 + out) * NOISE_DIM, n, lane)
        if RESIDUAL:
            scale += 1.0
        plane = hidden + ((branch * tl.num_programs(0) + image) * 3 + out) * PLANE
        tl.store(plane + place, value / deviation * scale + shift, mask=inside)


@AtHome
@triton.jit
def _encode_kernel(
    images, numbers, layout, noise, hidden, noise_rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, RESIDUAL: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """One autoencoder's hidden image, in a frame of zeros; large kernels, which take longest, come first."""
    branch = BRANCHES - 1 - tl.program_id(1)
    encoder = numbers + tl.multiple_of(tl.load(layout + branch * 3), 4)
    adain = numbers + tl.load(layout + branch * 3 + 2)
    for this in tl.static_range(BRANCHES):
        if branch == this:
            _encode(
                images, noise, hidden, noise_rows, branch, encoder, adain, HEIGHT, WIDTH, MARGIN, RESIDUAL,
                SIZES[this], PIXELS[this],
            )  # fmt: skip


@triton.jit
def _decode(
    hidden, decoder, corner_pixel, there, c, STRIDE: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr
):  # fmt: skip
    """Three channels of a transposed convolution, at some pixels."""
    corner = hidden + (corner_pixel + (SIZE - 1) * STRIDE)
    tap = decoder + c
    red = tl.zeros([4, PIXELS], tl.float32)
    green = tl.zeros([4, PIXELS], tl.float32)
    blue = tl.zeros([4, PIXELS], tl.float32)
    for _ in range(SIZE):
        for column in tl.static_range(SIZE):
            value = tl.load(corner + (SIZE - 1 - column), mask=there, other=0.0)
            red += value * tl.load(tap + 12 * column)[:, None]
            green += value * tl.load(tap + (12 * column + 4))[:, None]
            blue += value * tl.load(tap + (12 * column + 8))[:, None]
        corner -= STRIDE
        tap += 12 * SIZE
    bias = decoder + 12 * SIZE * SIZE
    return tl.sum(red, 0) + tl.load(bias), tl.sum(green, 0) + tl.load(bias + 1), tl.sum(blue, 0) + tl.load(bias + 2)


@AtHome
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
    term = tl.arange(0, TERMS)
    total = tl.sum(tl.load(own + term, mask=term < BRANCHES + first + 1, other=0.0), 0)
    if SAFE:
        size_of_total = tl.maximum(tl.abs(total), smallest)
        total = tl.where(total < 0, -size_of_total, size_of_total)
    mixed_red = tl.zeros([PIXELS], tl.float32)
    mixed_green = tl.zeros([PIXELS], tl.float32)
    mixed_blue = tl.zeros([PIXELS], tl.float32)
    PLANE: tl.constexpr = (HEIGHT + MARGIN) * (WIDTH + MARGIN)
    corner = c[:, None] * PLANE + (y * (WIDTH + MARGIN) + x)[None, :]
    for branch in tl.static_range(BRANCHES):
        planes = hidden + (branch * tl.num_programs(0) + image) * 3 * PLANE
        decoder = numbers + tl.multiple_of(tl.load(layout + branch * 3 + 1), 4)
        new_red, new_green, new_blue = _decode(planes, decoder, corner, there, c, WIDTH + MARGIN, SIZES[branch], PIXELS)
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


@dataclass(frozen=True)
class Mixture:
    """The switches of RandMix that its kernels follow, and the images' mean and deviation."""

    residual: bool
    tanh: bool
    safe: bool
    renormalise: bool
    mean: Tensor
    std: Tensor

    def fits(self, images: Tensor) -> bool:
        """Whether the kernels can take images of this size."""
        return math.prod(images.shape[2:]) <= MOST_PIXELS

    def __call__(self, images: Tensor, draw: Draw) -> Tensor:
        """The mixture of normalised images, shape (n, 3, height, width), and their random autoencoders."""
        images = images.contiguous()
        count, _, height, width = images.shape
        inputs = images if draw.input_noise is None else images + draw.input_noise
        branches = draw.branches
        has_colour = draw.colour is not None
        parts = [_zero(images.device)]
        if draw.colour is not None:
            parts += [draw.colour.weight, draw.colour.bias]
        for branch in branches:
            for layer in (branch.encoder, branch.decoder, branch.adain):
                parts += [layer.weight, layer.bias]
        sizes = tuple(branch.encoder.weight.shape[-1] for branch in branches)
        order, layout = _layout(sizes, has_colour, images.device)
        numbers = torch.cat([part.reshape(-1) for part in parts]).index_select(0, order)
        noise = torch.stack([branch.noise for branch in branches])
        pixels = tuple(triton.next_power_of_2((height - k + 1) * (width - k + 1)) for k in sizes)
        margin = max(sizes) - 1
        hidden = torch.zeros(len(branches), count, 3, height + margin, width + margin, device=images.device)
        _encode_kernel[(count, len(branches))](
            inputs, numbers, layout, noise, hidden, noise.shape[1],
            HEIGHT=height, WIDTH=width, MARGIN=margin, RESIDUAL=self.residual,
            BRANCHES=len(sizes), SIZES=sizes, PIXELS=pixels,
        )  # fmt: skip
        result = torch.empty_like(images)
        keep = inputs if draw.colour_keep is None else draw.colour_keep
        _decode_kernel[(count, triton.cdiv(height * width, PIXELS_AT_ONCE))](
            images, inputs, hidden, numbers, layout, keep, draw.weights, self.mean, self.std, result,
            len(draw.weights), SMALLEST_WEIGHT_SUM, COLOUR_DROPOUT,
            HEIGHT=height, WIDTH=width, MARGIN=margin, BRANCHES=len(sizes), SIZES=sizes,
            TANH=self.tanh, COLOUR=has_colour, SAFE=self.safe, RENORMALISE=self.renormalise,
            TERMS=triton.next_power_of_2(draw.weights.shape[1]), PIXELS=PIXELS_AT_ONCE,
        )  # fmt: skip
        return result


@cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1).to(device)


@cache
def _layout(sizes: tuple[int, ...], has_colour: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """How the random numbers lie in memory: the order to bring them into, and where layers begin in it.

    A zero comes first among the numbers. Of a convolution, a thread then finds the four weights of a tap and an
    output channel, the fourth zero, side by side.

    Returns:
        Places of the numbers in this order; places of encoder, decoder and AdaIN of every autoencoder, one row each.
    """
    at = 1 + 12 * has_colour
    order, begins = [torch.arange(1, at)] if has_colour else [], []
    length = 12 * has_colour
    for size in sizes:
        row = []
        for is_decoder in (False, True):
            weights = torch.arange(at, at + 9 * size * size).reshape(3, 3, size, size)
            if is_decoder:
                weights = weights.transpose(0, 1)  # a transposed convolution names its inputs first
            packed = torch.zeros(size, size, 3, 4, dtype=torch.int64)
            packed[..., :3] = weights.permute(2, 3, 0, 1)
            bias = torch.arange(at + 9 * size * size, at + 9 * size * size + 3)
            order += [packed.reshape(-1), bias, torch.zeros(1, dtype=torch.int64)]
            row.append(length)
            at, length = at + 9 * size * size + 3, length + 12 * size * size + 4
        adain = 6 * NOISE_DIM.value + 6
        order.append(torch.arange(at, at + adain))
        row.append(length)
        at, length = at + adain, length + adain
        padding = -length % 4
        order.append(torch.zeros(padding, dtype=torch.int64))
        length += padding
        begins.append(row)
    # complete, whichever stream asks for them
    return torch.cat(order).to(device), torch.tensor(begins, dtype=torch.int32).to(device)
