"""What kernels on images of three channels have in common.

Channels are a dimension of their own, with room for a fourth that is always zero, because sizes are powers of two.
A kernel reads the weights of a convolution as *taps*, shape (k, k, 3, 4): row, column, channel to, channels from. The
four weights of a tap and an output channel then lie side by side, the fourth zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """The hyperbolic tangent."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def correlate(corner, taps, there, STRIDE: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr):
    """Three channels of a convolution at some pixels, all of whose neighbours lie in memory.

    Args:
        corner: Where a pixel's first neighbour lies, for all channels and pixels, (4, PIXELS).
        taps: The weights.
        there: Which of them there are, (4, PIXELS).
        STRIDE: From a row of pixels to the next.
        SIZE: k.
        PIXELS: How many.
    """
    tap = taps + tl.arange(0, 4)
    red = tl.zeros([4, PIXELS], tl.float32)
    green = tl.zeros([4, PIXELS], tl.float32)
    blue = tl.zeros([4, PIXELS], tl.float32)
    for _ in range(SIZE):
        for column in tl.static_range(SIZE):
            value = tl.load(corner + column, mask=there, other=0.0)
            red += value * tl.load(tap + 12 * column)[:, None]
            green += value * tl.load(tap + (12 * column + 4))[:, None]
            blue += value * tl.load(tap + (12 * column + 8))[:, None]
        corner += STRIDE
        tap += 12 * SIZE
    return tl.sum(red, 0), tl.sum(green, 0), tl.sum(blue, 0)


@triton.jit
def correlate_inside(
    planes, taps, p, inside,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Three channels of a convolution without padding, at pixels p of the smaller image that it makes of ``planes``."""
    c = tl.arange(0, 4)
    WIDE: tl.constexpr = WIDTH - SIZE + 1
    corner = planes + c[:, None] * (HEIGHT * WIDTH) + (p // WIDE * WIDTH + p % WIDE)[None, :]
    return correlate(corner, taps, (c < 3)[:, None] & inside[None, :], WIDTH, SIZE, PIXELS)


@triton.jit
def place_in_frame(p, WIDTH: tl.constexpr, MARGIN: tl.constexpr, SIZE: tl.constexpr):
    """Where pixels p of that smaller image lie in a plane with room for a frame of zeros around it."""
    WIDE: tl.constexpr = WIDTH - SIZE + 1
    return (p // WIDE + SIZE - 1) * (WIDTH + MARGIN) + p % WIDE + SIZE - 1


@triton.jit
def correlate_framed(
    planes, taps, p, inside,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MARGIN: tl.constexpr, SIZE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Three channels of a convolution of it with all of its frame, at pixels p of an image of the first size."""
    c = tl.arange(0, 4)
    STRIDE: tl.constexpr = WIDTH + MARGIN
    corner = planes + c[:, None] * ((HEIGHT + MARGIN) * STRIDE) + (p // WIDTH * STRIDE + p % WIDTH)[None, :]
    return correlate(corner, taps, (c < 3)[:, None] & inside[None, :], STRIDE, SIZE, PIXELS)
