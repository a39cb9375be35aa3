"""L2D's style module on small images, with its gradient: two kernels forward, three backward.

Forward works like :mod:`ratp.functional.kernels.randmix`: a program of the first kernel handles one image and one
autoencoder and normalises, scales and shifts the hidden image; one of the second handles some pixels of one image and
loops over the autoencoders. Backward reverses this, after a pixelwise kernel. Convolutions are not trained and images
get no gradient: of the input, only the noise level does.

All sums are deterministic: those over images are left to PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratp.functional.kernels.common import (
    PIXELS_AT_ONCE,
    DeviceKernel,
    Packing,
    correlate_framed,
    correlate_inside,
    normalise,
    pack,
    place_in_frame,
    tanh,
    zero,
)

ELEMENTS_AT_ONCE = 1024
EPS = tl.constexpr(1e-5)


@triton.jit
def _encode(
    inputs, taps, bias, scales, shifts, hidden, normal, deviations,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, LEARN: tl.constexpr,
    SIZE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    HIGH: tl.constexpr = HEIGHT - SIZE + 1
    WIDE: tl.constexpr = WIDTH - SIZE + 1
    p = tl.arange(0, PIXELS)
    inside = p < HIGH * WIDE
    red, green, blue = correlate_inside(inputs, taps, p, inside, HEIGHT, WIDTH, SIZE, PIXELS)
    place = place_in_frame(p, WIDTH, MARGIN, SIZE)
    for out in tl.static_range(3):
        value = (red if out == 0 else (green if out == 1 else blue)) + tl.load(bias + out)
        value, deviation = normalise(value, inside, HIGH * WIDE, EPS)
        at = out * (HIGH * WIDE) + p
        scale = tl.load(scales + at, mask=inside, other=0.0)
        shift = tl.load(shifts + at, mask=inside, other=0.0)
        plane = hidden + out * ((HEIGHT + MARGIN) * (WIDTH + MARGIN))
        tl.store(plane + place, value * scale + shift, mask=inside)
        if LEARN:
            tl.store(normal + at, value, mask=inside)
            tl.store(deviations + out, deviation)


@DeviceKernel
@triton.jit
def _encode_kernel(
    inputs, numbers, styles, hidden, normal, deviations,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, LEARN: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, PIXELS: tl.constexpr,
    TAPS: tl.constexpr, BIASES: tl.constexpr, BEGINS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Computes an autoencoder's hidden image, in a frame of zeros."""
    image = tl.program_id(0)
    PLANES: tl.constexpr = 3 * (HEIGHT + MARGIN) * (WIDTH + MARGIN)
    for this in tl.static_range(BRANCHES):
        if tl.program_id(1) == this:
            _encode(
                inputs + image * (3 * HEIGHT * WIDTH), numbers + TAPS[this], numbers + BIASES[this],
                styles + BEGINS[this], styles + (LENGTH + BEGINS[this]),
                hidden + (this * tl.num_programs(0) + image) * PLANES,
                normal + image * LENGTH + BEGINS[this], deviations + (image * BRANCHES + this) * 3,
                HEIGHT, WIDTH, MARGIN, LEARN, SIZES[this], PIXELS[this],
            )  # fmt: skip


@DeviceKernel
@triton.jit
def _decode_kernel(
    images, inputs, hidden, numbers, keep, weights, mean, std, result, branches, units,
    share, smallest, dropout,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, LEARN: tl.constexpr, DROP: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, TAPS: tl.constexpr, BIASES: tl.constexpr,
    TERMS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Mixes the outputs of all branches, and the result with the images."""
    image = tl.program_id(0)
    p = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    inside = p < HEIGHT * WIDTH
    SIZE_OF_ALL = tl.num_programs(0) * (3 * HEIGHT * WIDTH)
    term = tl.arange(0, TERMS)
    total = tl.sum(tl.load(weights + term, mask=term < BRANCHES + 1, other=0.0), 0)
    size_of_total = tl.maximum(tl.abs(total), smallest)
    total = tl.where(total < 0, -size_of_total, size_of_total)
    mixed_red = tl.zeros([PIXELS], tl.float32)
    mixed_green = tl.zeros([PIXELS], tl.float32)
    mixed_blue = tl.zeros([PIXELS], tl.float32)
    PLANE: tl.constexpr = (HEIGHT + MARGIN) * (WIDTH + MARGIN)
    base = image * (3 * HEIGHT * WIDTH) + p
    for this in tl.static_range(BRANCHES):
        planes = hidden + (this * tl.num_programs(0) + image) * (3 * PLANE)
        red, green, blue = correlate_framed(
            planes, numbers + TAPS[this], p, inside, HEIGHT, WIDTH, MARGIN, SIZES[this], PIXELS
        )
        bias = numbers + BIASES[this]
        red = tanh(red + tl.load(bias))
        green = tanh(green + tl.load(bias + 1))
        blue = tanh(blue + tl.load(bias + 2))
        weight = tl.load(weights + 1 + this) / total
        mixed_red += weight * red
        mixed_green += weight * green
        mixed_blue += weight * blue
        if LEARN:
            own = branches + (this + 1) * SIZE_OF_ALL + base
            tl.store(own, red, mask=inside)
            tl.store(own + HEIGHT * WIDTH, green, mask=inside)
            tl.store(own + 2 * HEIGHT * WIDTH, blue, mask=inside)
    for out in tl.static_range(3):
        at = base + out * (HEIGHT * WIDTH)
        colour = tl.zeros([PIXELS], tl.float32) + tl.load(numbers + 9 + out)
        for channel in tl.static_range(3):
            value = tl.load(inputs + base + channel * (HEIGHT * WIDTH), mask=inside, other=0.0)
            colour += value * tl.load(numbers + out * 3 + channel)
        if DROP:
            colour *= tl.load(keep + at, mask=inside, other=0).to(tl.float32) / (1 - dropout)
        colour = tanh(colour)
        mixed = mixed_red if out == 0 else (mixed_green if out == 1 else mixed_blue)
        unit = tl.sigmoid(mixed + tl.load(weights) / total * colour)
        styled = (unit - tl.load(mean + out)) / tl.load(std + out)
        plain = tl.load(images + at, mask=inside, other=0.0)
        tl.store(result + at, share * styled + (1 - share) * plain, mask=inside)
        if LEARN:
            tl.store(branches + at, colour, mask=inside)
            tl.store(units + at, unit, mask=inside)


@DeviceKernel
@triton.jit
def _pixel_slopes_kernel(
    slope, units, branches, std, slopes, share, count,
    AREA: tl.constexpr, TERMS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of the branches before their tanh, from that of the result."""
    e = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = e < count
    unit = tl.load(units + e, mask=inside, other=0.0)
    factor = share / tl.load(std + e // AREA % 3, mask=inside, other=1.0) * unit * (1 - unit) / TERMS
    mixed = tl.load(slope + e, mask=inside, other=0.0) * factor
    for term in tl.static_range(TERMS):
        branch = tl.load(branches + term * count + e, mask=inside, other=0.0)
        tl.store(slopes + term * count + e, mixed * (1 - branch * branch), mask=inside)


@triton.jit
def _encode_back(
    slopes, taps, scales, normal, deviations, scale_slopes, shift_slopes, hidden,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    HIGH: tl.constexpr = HEIGHT - SIZE + 1
    WIDE: tl.constexpr = WIDTH - SIZE + 1
    p = tl.arange(0, PIXELS)
    inside = p < HIGH * WIDE
    red, green, blue = correlate_inside(slopes, taps, p, inside, HEIGHT, WIDTH, SIZE, PIXELS)
    place = place_in_frame(p, WIDTH, MARGIN, SIZE)
    for out in tl.static_range(3):
        slope = tl.where(inside, red if out == 0 else (green if out == 1 else blue), 0.0)
        at = out * (HIGH * WIDE) + p
        value = tl.load(normal + at, mask=inside, other=0.0)
        tl.store(shift_slopes + at, slope, mask=inside)
        tl.store(scale_slopes + at, slope * value, mask=inside)
        slope *= tl.load(scales + at, mask=inside, other=0.0)
        mean = tl.sum(slope, 0) / (HIGH * WIDE)
        along = tl.sum(slope * value, 0) / (HIGH * WIDE)
        slope = (slope - mean - value * along) / tl.load(deviations + out)
        plane = hidden + out * ((HEIGHT + MARGIN) * (WIDTH + MARGIN))
        tl.store(plane + place, slope, mask=inside)


@DeviceKernel
@triton.jit
def _encode_back_kernel(
    slopes, numbers, styles, normal, deviations, style_slopes, hidden,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, PIXELS: tl.constexpr,
    TAPS: tl.constexpr, BEGINS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of scales and shifts, per image, and of the encoder's output, in a frame of zeros."""
    image = tl.program_id(0)
    count = tl.num_programs(0)
    PLANES: tl.constexpr = 3 * (HEIGHT + MARGIN) * (WIDTH + MARGIN)
    for this in tl.static_range(BRANCHES):
        if tl.program_id(1) == this:
            row = image * LENGTH + BEGINS[this]
            _encode_back(
                slopes + ((this + 1) * count + image) * (3 * HEIGHT * WIDTH), numbers + TAPS[this],
                styles + BEGINS[this], normal + row, deviations + (image * BRANCHES + this) * 3,
                style_slopes + row, style_slopes + count * LENGTH + row,
                hidden + (this * count + image) * PLANES,
                HEIGHT, WIDTH, MARGIN, SIZES[this], PIXELS[this],
            )  # fmt: skip


@DeviceKernel
@triton.jit
def _noise_back_kernel(
    slopes, hidden, noise, numbers, result,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, TAPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Sums the gradient of the input, times its noise, over some pixels of one image."""
    image = tl.program_id(0)
    p = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    inside = p < HEIGHT * WIDTH
    PLANE: tl.constexpr = (HEIGHT + MARGIN) * (WIDTH + MARGIN)
    all_red = tl.zeros([PIXELS], tl.float32)
    all_green = tl.zeros([PIXELS], tl.float32)
    all_blue = tl.zeros([PIXELS], tl.float32)
    for this in tl.static_range(BRANCHES):
        planes = hidden + (this * tl.num_programs(0) + image) * (3 * PLANE)
        red, green, blue = correlate_framed(
            planes, numbers + TAPS[this], p, inside, HEIGHT, WIDTH, MARGIN, SIZES[this], PIXELS
        )
        all_red += red
        all_green += green
        all_blue += blue
    base = image * (3 * HEIGHT * WIDTH) + p
    total = tl.zeros([PIXELS], tl.float32)
    for channel in tl.static_range(3):
        slope = all_red if channel == 0 else (all_green if channel == 1 else all_blue)
        for out in tl.static_range(3):
            colour = tl.load(slopes + base + out * (HEIGHT * WIDTH), mask=inside, other=0.0)
            slope += colour * tl.load(numbers + out * 3 + channel)
        total += slope * tl.load(noise + base + channel * (HEIGHT * WIDTH), mask=inside, other=0.0)
    tl.store(result + image * tl.num_programs(1) + tl.program_id(1), tl.sum(total, 0))


class Chance(NamedTuple):
    """The random numbers of a call, besides those of its convolutions."""

    weights: Tensor  # mixing weights of the branches, colours first
    keep: Tensor  # which colours stay, bool like the images
    smallest: float  # |Σw| is at least this
    dropout: float  # share of colours dropped


class _Layout(NamedTuple):
    """The order kernels read the numbers in, and where the parts of each branch begin in it.

    The colours' numbers come first, unchanged. ``turned`` kernels are flipped, with input and output exchanged.
    """

    order: Tensor
    encoders: tuple[int, ...]
    encoders_turned: tuple[int, ...]
    encoder_biases: tuple[int, ...]
    decoders: tuple[int, ...]
    decoders_turned: tuple[int, ...]
    decoder_biases: tuple[int, ...]


@cache
def _layout(sizes: tuple[int, ...], device: torch.device) -> _Layout:
    """The layout for autoencoders of given kernel sizes; a zero follows the last number."""
    nowhere = 12 + sum(2 * (9 * k * k + 3) for k in sizes)
    packing, at = Packing(), 12
    packing.add(torch.arange(12))
    begins: dict[str, list[int]] = {name: [] for name in _Layout._fields[1:]}
    for size in sizes:
        for kind in ("encoder", "decoder"):
            weight = torch.arange(at, at + 9 * size * size).reshape(3, 3, size, size)
            at += 9 * size * size
            begins[f"{kind}s"].append(packing.add(pack(weight, nowhere)))
            begins[f"{kind}s_turned"].append(packing.add(pack(weight.flip(2, 3).transpose(0, 1), nowhere)))
            begins[f"{kind}_biases"].append(packing.add(torch.tensor([at, at + 1, at + 2, nowhere])))
            at += 3
    return _Layout(packing.on(device), **{name: tuple(places) for name, places in begins.items()})


def restyle(
    images: Tensor,  # normalised, float32, shape (n, 3, height, width)
    inputs: Tensor,  # the same with noise
    numbers: Tensor,  # all numbers of the convolutions
    sizes: tuple[int, ...],  # kernel size of each autoencoder
    styles: Tensor,  # all scales, then all shifts, flat
    chance: Chance | None,  # further random numbers; None: the mean of all branches
    blend: tuple[float, Tensor, Tensor],  # share of the style, and mean and deviation of the images' normalisation
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Computes images in a new style, without recording a gradient; without chance, also what the gradient needs."""
    count, _, height, width = images.shape
    device, branches, learn = images.device, len(sizes), chance is None
    share, mean, std = blend
    layout = _layout(sizes, device)
    packed = torch.cat([numbers, zero(device)]).index_select(0, layout.order)
    pixels, begins, length = _extents(sizes, height, width)
    margin = max(sizes) - 1
    hidden = torch.zeros(branches, count, 3, height + margin, width + margin, device=device)
    normal = torch.empty(count, length, device=device) if learn else hidden
    deviations = torch.empty(count, branches, 3, device=device) if learn else hidden
    _encode_kernel[(count, branches)](
        inputs, packed, styles, hidden, normal, deviations,
        HEIGHT=height, WIDTH=width, MARGIN=margin, LEARN=learn, BRANCHES=branches, SIZES=sizes, PIXELS=pixels,
        TAPS=layout.encoders, BIASES=layout.encoder_biases, BEGINS=begins, LENGTH=length,
    )  # fmt: skip
    result = torch.empty_like(images)
    outputs = torch.empty(branches + 1, *images.shape, device=device) if learn else hidden
    units = torch.empty_like(images) if learn else hidden
    chance = chance or Chance(_ones(branches + 1, device), images, 0.0, 0.0)
    _decode_kernel[(count, triton.cdiv(height * width, PIXELS_AT_ONCE))](
        images, inputs, hidden, packed, chance.keep, chance.weights, mean, std, result, outputs, units,
        share, chance.smallest, chance.dropout,
        HEIGHT=height, WIDTH=width, MARGIN=margin, LEARN=learn, DROP=not learn,
        BRANCHES=branches, SIZES=sizes, TAPS=layout.decoders_turned, BIASES=layout.decoder_biases,
        TERMS=triton.next_power_of_2(branches + 1), PIXELS=PIXELS_AT_ONCE,
    )  # fmt: skip
    return result, (packed, normal, deviations, outputs, units)


def _extents(sizes: tuple[int, ...], height: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Pixels of each hidden image, rounded up to a power of two; where its scales begin; how many scales there are."""
    areas = [(height - k + 1) * (width - k + 1) for k in sizes]
    begins = tuple(3 * sum(areas[:i]) for i in range(len(areas)))
    return tuple(triton.next_power_of_2(area) for area in areas), begins, 3 * sum(areas)


class _Estimate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        noise: Tensor,
        unit: float,
        numbers: Tensor,
        sizes: tuple[int, ...],
        blend: tuple[float, Tensor, Tensor],
        level: Tensor,
        *styles: Tensor,
    ) -> Tensor:
        row = torch.cat([style.reshape(-1) for style in styles])
        inputs = torch.addcmul(images, level, noise, value=unit)
        result, kept = restyle(images, inputs, numbers, sizes, row, None, blend)
        ctx.save_for_backward(row, noise, blend[2], *kept)
        ctx.sizes, ctx.unit, ctx.share = sizes, unit, blend[0]
        ctx.shapes = [style.shape for style in styles]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        row, noise, std, packed, normal, deviations, outputs, units = ctx.saved_tensors
        sizes = ctx.sizes
        count, _, height, width = noise.shape
        device, branches, layout = noise.device, len(sizes), _layout(sizes, noise.device)
        pixels, begins, length = _extents(sizes, height, width)
        margin = max(sizes) - 1
        slopes = torch.empty_like(outputs)
        _pixel_slopes_kernel[(triton.cdiv(noise.numel(), ELEMENTS_AT_ONCE),)](
            gradients[0].contiguous(), units, outputs, std, slopes, ctx.share, noise.numel(),
            AREA=height * width, TERMS=branches + 1, ELEMENTS=ELEMENTS_AT_ONCE,
        )  # fmt: skip
        style_slopes = torch.empty(2, count, length, device=device)
        hidden = torch.zeros(branches, count, 3, height + margin, width + margin, device=device)
        _encode_back_kernel[(count, branches)](
            slopes, packed, row, normal, deviations, style_slopes, hidden,
            HEIGHT=height, WIDTH=width, MARGIN=margin, BRANCHES=branches, SIZES=sizes, PIXELS=pixels,
            TAPS=layout.decoders, BEGINS=begins, LENGTH=length,
        )  # fmt: skip
        chunks = triton.cdiv(height * width, PIXELS_AT_ONCE)
        along = torch.empty(count, chunks, device=device)
        _noise_back_kernel[(count, chunks)](
            slopes, hidden, noise, packed, along,
            HEIGHT=height, WIDTH=width, MARGIN=margin, BRANCHES=branches, SIZES=sizes,
            TAPS=layout.encoders_turned, PIXELS=PIXELS_AT_ONCE,
        )  # fmt: skip
        sums = style_slopes.sum(dim=1).reshape(-1).split([math.prod(shape) for shape in ctx.shapes])
        shaped = [part.view(shape) for part, shape in zip(sums, ctx.shapes, strict=True)]
        return None, None, None, None, None, None, along.sum() * ctx.unit, *shaped


def estimate(
    images: Tensor,  # normalised, float32, shape (n, 3, height, width)
    noise: Tensor,  # of the same shape
    unit: float,  # of the noise level
    numbers: Tensor,  # all numbers of the convolutions
    sizes: tuple[int, ...],  # kernel size of each autoencoder
    blend: tuple[float, Tensor, Tensor],  # as for :func:`restyle`
    level: Tensor,  # of the noise
    scales: Sequence[Tensor],  # γ, one per autoencoder
    shifts: Sequence[Tensor],  # β, one per autoencoder
) -> Tensor:
    """Computes images in the mean style of all branches, with gradients of noise level, scales and shifts."""
    return _Estimate.apply(  # type: ignore[no-any-return]
        images.contiguous(), noise, unit, numbers, sizes, blend, level, *scales, *shifts
    )


@cache
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count).to(device)
