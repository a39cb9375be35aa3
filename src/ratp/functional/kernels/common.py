"""What the kernels share: the device they launch on, and convolutions between the three channels of images.

Channels are a dimension of their own, padded with zeros to four, because Triton's sizes are powers of two. A kernel
reads the weights of a convolution as *taps*, shape (k, k, 3, 4): row, column, output channel, input channels. The four
weights of a tap and an output channel are contiguous; the fourth is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

PIXELS_AT_ONCE = 256


class DeviceKernel:
    """A Triton kernel that runs on the device of its first tensor; a decorator above ``triton.jit``.

    Triton itself launches on the current device of the thread, which is the first GPU unless somebody changed it.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        launch = self._kernel[grid]

        def launched(*values: Any, **settings: Any) -> None:
            device = next(value.device for value in values if isinstance(value, Tensor))
            if device.type != "cuda":  # Triton's interpreter
                launch(*values, **settings)
                return
            with torch.cuda.device(device):
                launch(*values, **settings)

        return launched


def pack(weight: Tensor, fill: int = 0) -> Tensor:
    """Arranges weights (3, 3, k, k) as taps."""
    return F.pad(weight.permute(2, 3, 0, 1), (0, 1), value=fill).contiguous()


class Packing:
    """Collects the indices that bring random numbers into the order in which a kernel reads them."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._length = 0

    def add(self, indices: Tensor) -> int:
        """Appends indices; returns where they begin."""
        self._parts.append(indices.reshape(-1))
        self._length += indices.numel()
        return self._length - indices.numel()

    def on(self, device: torch.device) -> Tensor:
        """Returns all indices, copied synchronously so that any stream may read them."""
        return torch.cat(self._parts).to(device)


@cache
def zero(device: torch.device) -> Tensor:
    """A zero on the device, shape (1,)."""
    return torch.zeros(1).to(device)


@triton.jit
def tanh(x):
    """Computes the hyperbolic tangent."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def normalise(value, inside, AREA: tl.constexpr, EPS: tl.constexpr):
    """Normalises one channel of one image; returns its deviation too."""
    mean = tl.sum(tl.where(inside, value, 0.0), 0) / AREA
    value = tl.where(inside, value - mean, 0.0)
    deviation = tl.sqrt(tl.sum(value * value, 0) / AREA + EPS)
    return value / deviation, deviation


@triton.jit
def correlate(
    corner, taps, there, STRIDE: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr, STEP: tl.constexpr = 1
):  # fmt: skip
    """Computes three channels of a convolution at some pixels, all of whose neighbours are in memory.

    ``corner`` are pointers to each pixel's first neighbour, for all channels and pixels, (4, PIXELS), and ``there`` is
    their mask. STRIDE is the distance between rows of pixels, SIZE is k. A STEP of −1 visits the neighbours backwards,
    from the last one, as a transposed convolution does.
    """
    tap = taps + tl.arange(0, 4)
    red = tl.zeros([4, PIXELS], tl.float32)
    green = tl.zeros([4, PIXELS], tl.float32)
    blue = tl.zeros([4, PIXELS], tl.float32)
    for _ in range(SIZE):
        for column in tl.static_range(SIZE):
            value = tl.load(corner + STEP * column, mask=there, other=0.0)
            red += value * tl.load(tap + 12 * column)[:, None]
            green += value * tl.load(tap + (12 * column + 4))[:, None]
            blue += value * tl.load(tap + (12 * column + 8))[:, None]
        corner += STEP * STRIDE
        tap += 12 * SIZE
    return tl.sum(red, 0), tl.sum(green, 0), tl.sum(blue, 0)


@triton.jit
def correlate_inside(
    planes, taps, p, inside,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Computes a convolution without padding of ``planes``, at pixels p of the smaller result."""
    c = tl.arange(0, 4)
    WIDE: tl.constexpr = WIDTH - SIZE + 1
    corner = planes + c[:, None] * (HEIGHT * WIDTH) + (p // WIDE * WIDTH + p % WIDE)[None, :]
    return correlate(corner, taps, (c < 3)[:, None] & inside[None, :], WIDTH, SIZE, PIXELS)


@triton.jit
def place_in_frame(p, WIDTH: tl.constexpr, MARGIN: tl.constexpr, SIZE: tl.constexpr):
    """Returns the offsets of pixels p of that smaller result in a plane with a frame of zeros around it."""
    WIDE: tl.constexpr = WIDTH - SIZE + 1
    return (p // WIDE + SIZE - 1) * (WIDTH + MARGIN) + p % WIDE + SIZE - 1


@triton.jit
def correlate_framed(
    planes, taps, p, inside,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Computes a convolution of that plane including its frame, at pixels p of an image of the original size."""
    c = tl.arange(0, 4)
    STRIDE: tl.constexpr = WIDTH + MARGIN
    corner = planes + c[:, None] * ((HEIGHT + MARGIN) * STRIDE) + (p // WIDTH * STRIDE + p % WIDTH)[None, :]
    return correlate(corner, taps, (c < 3)[:, None] & inside[None, :], STRIDE, SIZE, PIXELS)
