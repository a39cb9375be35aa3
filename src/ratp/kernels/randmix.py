"""RandMix on small images in two kernels: all encoders with their normalisation, then all decoders with the mixture.

Each program of the first has one image and one autoencoder, so that the statistics of a channel lie within it; each of
the second has some pixels of one image and goes through the autoencoders. Channels are a dimension of their own, with
room for a fourth that is always zero, because sizes are powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from ratp.parts.randmix import Draw

# Beyond, one program has too many pixels to hold.
MOST_PIXELS = 1024
PIXELS_AT_ONCE = 256
NOISE_DIM = tl.constexpr(10)
EPS = tl.constexpr(1e-5)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _dot(numbers, noise, lane):
    """A row of AdaIN's layer times the noise."""
    there = lane < NOISE_DIM
    return tl.sum(tl.load(numbers + lane, mask=there, other=0.0) * tl.load(noise + lane, mask=there, other=0.0), 0)


@triton.jit
def _encode_kernel(
    images, numbers, layout, noise, hidden, noise_rows, branches,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RESIDUAL: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    branch = branches - 1 - tl.program_id(1)  # large kernels, which take longest, come first
    size = tl.load(layout + branch * 4)
    encoder = numbers + tl.load(layout + branch * 4 + 1)
    adain = numbers + tl.load(layout + branch * 4 + 3)
    area = size * size
    high, wide = HEIGHT - size + 1, WIDTH - size + 1
    p = tl.arange(0, PIXELS)
    c = tl.arange(0, 4)
    inside = p < high * wide
    there = (c < 3)[:, None] & inside[None, :]
    corner = images + (image * 3 + c)[:, None] * HEIGHT * WIDTH + (p // wide * WIDTH + p % wide)[None, :]
    red = tl.zeros([4, PIXELS], tl.float32)
    green = tl.zeros([4, PIXELS], tl.float32)
    blue = tl.zeros([4, PIXELS], tl.float32)
    for row in range(size):
        for column in range(size):
            value = tl.load(corner + (row * WIDTH + column), mask=there, other=0.0)
            tap = encoder + c * area + (row * size + column)
            red += value * tl.load(tap, mask=c < 3, other=0.0)[:, None]
            green += value * tl.load(tap + 3 * area, mask=c < 3, other=0.0)[:, None]
            blue += value * tl.load(tap + 6 * area, mask=c < 3, other=0.0)[:, None]
    count = (high * wide).to(tl.float32)
    n = noise + (branch * noise_rows + image % noise_rows) * NOISE_DIM
    lane = tl.arange(0, 16)
    for out in tl.static_range(3):
        value = tl.sum(red if out == 0 else (green if out == 1 else blue), 0) + tl.load(encoder + 9 * area + out)
        mean = tl.sum(tl.where(inside, value, 0.0), 0) / count
        value = tl.where(inside, value - mean, 0.0)
        deviation = tl.sqrt(tl.sum(value * value, 0) / count + EPS)
        scale = tl.load(adain + 6 * NOISE_DIM + out) + _dot(adain + out * NOISE_DIM, n, lane)
        shift = tl.load(adain + 6 * NOISE_DIM + 3 + out) + _dot(adain + (3 + out) * NOISE_DIM, n, lane)
        if RESIDUAL:
            scale += 1.0
        place = hidden + ((branch * tl.num_programs(0) + image) * 3 + out) * HEIGHT * WIDTH + p
        tl.store(place, value / deviation * scale + shift, mask=inside)


@triton.jit
def _decode_kernel(
    images, inputs, hidden, numbers, layout, keep, weights, mean, std, result, weight_rows, branches, smallest, dropout,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TANH: tl.constexpr, COLOUR: tl.constexpr, SAFE: tl.constexpr,
    RENORMALISE: tl.constexpr, TERMS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0)
    p = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    y, x = p // WIDTH, p % WIDTH
    inside = p < HEIGHT * WIDTH
    c = tl.arange(0, 4)
    # the weights: colour (if there is one), autoencoders, the image itself
    first = 1 if COLOUR else 0
    own = weights + (image % weight_rows) * (branches + first + 1)
    term = tl.arange(0, TERMS)
    total = tl.sum(tl.load(own + term, mask=term < branches + first + 1, other=0.0), 0)
    if SAFE:
        size_of_total = tl.maximum(tl.abs(total), smallest)
        total = tl.where(total < 0, -size_of_total, size_of_total)
    mixed_red = tl.zeros([PIXELS], tl.float32)
    mixed_green = tl.zeros([PIXELS], tl.float32)
    mixed_blue = tl.zeros([PIXELS], tl.float32)
    for branch in range(branches):
        size = tl.load(layout + branch * 4)
        decoder = numbers + tl.load(layout + branch * 4 + 2)
        area = size * size
        high, wide = HEIGHT - size + 1, WIDTH - size + 1
        plane = ((branch * tl.num_programs(0) + image) * 3 + c) * HEIGHT * WIDTH
        corner = hidden + plane[:, None] + (y * wide + x)[None, :]
        red = tl.zeros([4, PIXELS], tl.float32)
        green = tl.zeros([4, PIXELS], tl.float32)
        blue = tl.zeros([4, PIXELS], tl.float32)
        for row in range(size):
            in_row = inside & (y >= row) & (y - row < high)
            for column in range(size):
                there = in_row & (x >= column) & (x - column < wide)
                at = corner - (row * wide + column)
                value = tl.load(at, mask=(c < 3)[:, None] & there[None, :], other=0.0)
                tap = decoder + c * 3 * area + (row * size + column)
                red += value * tl.load(tap, mask=c < 3, other=0.0)[:, None]
                green += value * tl.load(tap + area, mask=c < 3, other=0.0)[:, None]
                blue += value * tl.load(tap + 2 * area, mask=c < 3, other=0.0)[:, None]
        share = tl.load(own + first + branch) / total
        bias = decoder + 9 * area
        new_red = tl.sum(red, 0) + tl.load(bias)
        new_green = tl.sum(green, 0) + tl.load(bias + 1)
        new_blue = tl.sum(blue, 0) + tl.load(bias + 2)
        mixed_red += share * (_tanh(new_red) if TANH else new_red)
        mixed_green += share * (_tanh(new_green) if TANH else new_green)
        mixed_blue += share * (_tanh(new_blue) if TANH else new_blue)
    base = image * 3 * HEIGHT * WIDTH + p
    share = tl.load(own + first + branches) / total
    for out in tl.static_range(3):
        mixed = mixed_red if out == 0 else (mixed_green if out == 1 else mixed_blue)
        at = base + out * HEIGHT * WIDTH
        if COLOUR:
            colour = tl.zeros([PIXELS], tl.float32) + tl.load(numbers + 9 + out)
            for channel in tl.static_range(3):
                value = tl.load(inputs + base + channel * HEIGHT * WIDTH, mask=inside, other=0.0)
                colour += value * tl.load(numbers + out * 3 + channel)
            colour *= tl.load(keep + at, mask=inside, other=0).to(tl.float32) / (1 - dropout)
            mixed += tl.load(own) / total * (_tanh(colour) if TANH else colour)
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
    smallest: float
    dropout: float
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
        parts: list[Tensor] = []
        if draw.colour is not None:
            parts += [draw.colour.weight, draw.colour.bias]
        for branch in branches:
            for layer in (branch.encoder, branch.decoder, branch.adain):
                parts += [layer.weight, layer.bias]
        numbers = torch.cat([part.reshape(-1) for part in parts])
        sizes = tuple(branch.encoder.weight.shape[-1] for branch in branches)
        layout = _layout(sizes, has_colour, images.device)
        noise = torch.stack([branch.noise for branch in branches])
        hidden = torch.empty(len(branches), count, 3, height, width, device=images.device)
        # (height − k + 1)·(width − k + 1) pixels are left by the smallest kernel k
        most = (height - min(sizes) + 1) * (width - min(sizes) + 1)
        _encode_kernel[(count, len(branches))](
            inputs, numbers, layout, noise, hidden, noise.shape[1], len(branches),
            HEIGHT=height, WIDTH=width, RESIDUAL=self.residual, PIXELS=triton.next_power_of_2(most), num_warps=8,
        )  # fmt: skip
        result = torch.empty_like(images)
        keep = inputs if draw.colour_keep is None else draw.colour_keep
        _decode_kernel[(count, triton.cdiv(height * width, PIXELS_AT_ONCE))](
            images, inputs, hidden, numbers, layout, keep, draw.weights, self.mean, self.std, result,
            len(draw.weights), len(branches), self.smallest, self.dropout,
            HEIGHT=height, WIDTH=width, TANH=self.tanh, COLOUR=has_colour, SAFE=self.safe,
            RENORMALISE=self.renormalise, TERMS=triton.next_power_of_2(draw.weights.shape[1]), PIXELS=PIXELS_AT_ONCE,
        )  # fmt: skip
        return result


@cache
def _layout(sizes: tuple[int, ...], has_colour: bool, device: torch.device) -> Tensor:
    """Of every autoencoder its kernel size and where encoder, decoder and AdaIN begin, each weight and bias."""
    rows, at = [], 12 * has_colour
    for size in sizes:
        convolution = 9 * size * size + 3
        rows.append([size, at, at + convolution, at + 2 * convolution])
        at += 2 * convolution + 6 * NOISE_DIM.value + 6
    return torch.tensor(rows, dtype=torch.int32).to(device)  # complete, whichever stream asks for it
