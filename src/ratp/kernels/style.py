"""L2D's style module on small images, with its gradient: two kernels one way, three the other.

Forth, as in :mod:`ratp.kernels.randmix`: a program of the first kernel has one image and one autoencoder, whose hidden
image it normalises, scales and shifts; one of the second has some pixels of one image and goes through the
autoencoders. Back, the same in reverse order, after a kernel for what is done pixel by pixel. Convolutions are not
trained, and images get no gradient: of what goes in, only the noise's level does.

Nothing is added up in an order that could change: sums over images are left to PyTorch.
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

from ratp.kernels.channels import correlate_framed, correlate_inside, place_in_frame, tanh
from ratp.kernels.launch import AtHome
from ratp.parts.randmix_draw import COLOUR_DROPOUT, SMALLEST_WEIGHT_SUM
from ratp.parts.style_draw import Blend, Chance

# Beyond, one program has too many pixels to hold.
MOST_PIXELS = 1024
PIXELS_AT_ONCE = 256
ELEMENTS_AT_ONCE = 1024
EPS = tl.constexpr(1e-5)


def fits(images: Tensor) -> bool:
    """Whether the kernels can take images of this size."""
    return math.prod(images.shape[2:]) <= MOST_PIXELS


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
        mean = tl.sum(tl.where(inside, value, 0.0), 0) / (HIGH * WIDE)
        value = tl.where(inside, value - mean, 0.0)
        deviation = tl.sqrt(tl.sum(value * value, 0) / (HIGH * WIDE) + EPS)
        value = value / deviation
        at = out * (HIGH * WIDE) + p
        scale = tl.load(scales + at, mask=inside, other=0.0)
        shift = tl.load(shifts + at, mask=inside, other=0.0)
        plane = hidden + out * ((HEIGHT + MARGIN) * (WIDTH + MARGIN))
        tl.store(plane + place, value * scale + shift, mask=inside)
        if LEARN:
            tl.store(normal + at, value, mask=inside)
            tl.store(deviations + out, deviation)


@AtHome
@triton.jit
def _encode_kernel(
    inputs, numbers, styles, hidden, normal, deviations,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, LEARN: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, PIXELS: tl.constexpr,
    TAPS: tl.constexpr, BIASES: tl.constexpr, BEGINS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """One autoencoder's hidden image, in a frame of zeros."""
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


@AtHome
@triton.jit
def _decode_kernel(
    images, inputs, hidden, numbers, keep, weights, mean, std, result, branches, units,
    share, smallest, dropout,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, LEARN: tl.constexpr, DROP: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, TAPS: tl.constexpr, BIASES: tl.constexpr,
    TERMS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Images in their new style: what all branches give, mixed, and mixed with the images."""
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


@AtHome
@triton.jit
def _pixel_slopes_kernel(
    slope, units, branches, std, slopes, share, count,
    AREA: tl.constexpr, TERMS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """From the gradient of the images in their new style to those of the branches, before their tanh."""
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


@AtHome
@triton.jit
def _encode_back_kernel(
    slopes, numbers, styles, normal, deviations, style_slopes, hidden,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, PIXELS: tl.constexpr,
    TAPS: tl.constexpr, BEGINS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """Gradients of scales and shifts, for each image, and of the encoder's output, in a frame of zeros."""
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


@AtHome
@triton.jit
def _noise_back_kernel(
    slopes, hidden, noise, numbers, result,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr,
    BRANCHES: tl.constexpr, SIZES: tl.constexpr, TAPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """The gradient of what goes in, times the noise in it, summed over some pixels of one image."""
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


class _Layout(NamedTuple):
    """How the numbers of all convolutions lie in memory for the kernels: those of the colours first, as they are.

    Attributes:
        order: Where each of them comes from; behind the last of the numbers there is a zero.
        encoders: Where the encoders' taps begin, one a branch.
        encoders_turned: Those of the kernels turned around, in- and output exchanged.
        decoders: Likewise the decoders', as a convolution reads them.
        decoders_turned: As the transposed convolution does.
        encoder_biases: Where they begin.
        decoder_biases: Where they begin.
    """

    order: Tensor
    encoders: tuple[int, ...]
    encoders_turned: tuple[int, ...]
    decoders: tuple[int, ...]
    decoders_turned: tuple[int, ...]
    encoder_biases: tuple[int, ...]
    decoder_biases: tuple[int, ...]


@cache
def _layout(sizes: tuple[int, ...], device: torch.device) -> _Layout:
    """For autoencoders of given kernel sizes, whose numbers follow those of the colours."""
    nowhere = 12 + sum(2 * (9 * k * k + 3) for k in sizes)
    parts, at, length = [torch.arange(12)], 12, 12
    begins: dict[tuple[bool, str], list[int]] = {}
    for size in sizes:
        for is_decoder in (False, True):
            weight = torch.arange(at, at + 9 * size * size).reshape(3, 3, size, size)
            at += 9 * size * size
            bias = torch.cat([torch.arange(at, at + 3), torch.tensor([nowhere])])
            at += 3
            turned = weight.flip(2, 3).transpose(0, 1)
            for name, kernel in (("taps", weight), ("turned", turned)):
                packed = torch.full((size, size, 3, 4), nowhere)
                packed[..., :3] = kernel.permute(2, 3, 0, 1)
                begins.setdefault((is_decoder, name), []).append(length)
                parts.append(packed.reshape(-1))
                length += packed.numel()
            begins.setdefault((is_decoder, "bias"), []).append(length)
            parts.append(bias)
            length += 4
    found = [tuple(begins[d, name]) for name in ("taps", "turned", "bias") for d in (False, True)]
    encoders, decoders, encoders_turned, decoders_turned, encoder_biases, decoder_biases = found
    return _Layout(
        torch.cat(parts).to(device),  # complete, whichever stream asks for it
        encoders,
        encoders_turned,
        decoders,
        decoders_turned,
        encoder_biases,
        decoder_biases,
    )


def restyle(
    images: Tensor,
    inputs: Tensor,
    numbers: Tensor,
    sizes: tuple[int, ...],
    styles: Tensor,
    chance: Chance,
    blend: Blend,
) -> Tensor:
    """Images in a new style; no gradient is recorded.

    Args:
        images: Normalised, float32, shape (n, 3, height, width).
        inputs: The same with noise.
        numbers: All numbers of the convolutions.
        sizes: Kernel size of each autoencoder.
        styles: All scales, then all shifts, in a row.
        chance: What else is drawn.
        blend: How the style is put on the images.
    """
    return _forward(images, inputs, numbers, sizes, styles, chance, blend)[0]


def _forward(
    images: Tensor,
    inputs: Tensor,
    numbers: Tensor,
    sizes: tuple[int, ...],
    styles: Tensor,
    chance: Chance | None,
    blend: Blend,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Images in a new style and, without chance, what the gradient needs."""
    count, _, height, width = images.shape
    device, branches, learn = images.device, len(sizes), chance is None
    layout = _layout(sizes, device)
    packed = torch.cat([numbers, _zero(device)]).index_select(0, layout.order)
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
    weights, keep = (_ones(branches + 1, device), images) if chance is None else (chance.weights, chance.keep)
    _decode_kernel[(count, triton.cdiv(height * width, PIXELS_AT_ONCE))](
        images, inputs, hidden, packed, keep, weights, blend.mean, blend.std, result, outputs, units,
        blend.share, SMALLEST_WEIGHT_SUM, COLOUR_DROPOUT,
        HEIGHT=height, WIDTH=width, MARGIN=margin, LEARN=learn, DROP=chance is not None,
        BRANCHES=branches, SIZES=sizes, TAPS=layout.decoders_turned, BIASES=layout.decoder_biases,
        TERMS=triton.next_power_of_2(branches + 1), PIXELS=PIXELS_AT_ONCE,
    )  # fmt: skip
    return result, (packed, normal, deviations, outputs, units)


def _extents(sizes: tuple[int, ...], height: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Pixels of each hidden image as a power of two; where its scales begin in a row of all; the row's length."""
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
        blend: Blend,
        level: Tensor,
        *styles: Tensor,
    ) -> Tensor:
        row = torch.cat([style.reshape(-1) for style in styles])
        inputs = torch.addcmul(images, level, noise, value=unit)
        result, kept = _forward(images, inputs, numbers, sizes, row, None, blend)
        ctx.save_for_backward(row, noise, blend.std, *kept)
        ctx.sizes, ctx.unit, ctx.share = sizes, unit, blend.share
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
    images: Tensor,
    noise: Tensor,
    unit: float,
    numbers: Tensor,
    sizes: tuple[int, ...],
    blend: Blend,
    level: Tensor,
    scales: Sequence[Tensor],
    shifts: Sequence[Tensor],
) -> Tensor:
    """Images in the mean style of all branches, with gradients of the noise's level, scales and shifts.

    Args:
        images: Normalised, float32, shape (n, 3, height, width).
        noise: Of the same shape.
        unit: Of the noise's level.
        numbers: All numbers of the convolutions.
        sizes: Kernel size of each autoencoder.
        blend: How the style is put on the images.
        level: Of the noise.
        scales: γ, one a branch.
        shifts: β, one a branch.
    """
    return _Estimate.apply(  # type: ignore[no-any-return]
        images.contiguous(), noise, unit, numbers, sizes, blend, level, *scales, *shifts
    )


@cache
def _zero(device: torch.device) -> Tensor:
    return torch.zeros(1).to(device)


@cache
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count).to(device)
