"""Draws house numbers: figures on a wall or a plate, in daylight, as a cheap camera sees them from the street.

The conventions are those of :mod:`ratp.data.demo.drawing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator

from ratp.data.demo.drawing import LUMA, SIZE, TALL, Bytes, Face, Floats, Row, View, figure_row, halved, mixed, to_bytes

if TYPE_CHECKING:
    from PIL import Image, ImageFilter

_WARM, _GREEN = np.array([1.0, 0.1, -1.0]), np.array([-0.6, 1.0, -0.6])


def street_image(rng: Generator, typefaces: Sequence[Face], digit: int) -> Bytes:
    """Draws a house number on a wall or a plate, photographed from the street with a cheap camera."""
    row = figure_row(rng, typefaces[int(rng.integers(len(typefaces)))], digit, neighbours=0.7, gaps=(0.05, 0.22))
    view = View(
        height=rng.uniform(17, 25),
        turn=rng.normal(0, 0.09),
        slant=rng.normal(0, 0.12),
        stretch=rng.uniform(0.75, 1.1),
        shift=(rng.uniform(-2, 2), rng.uniform(-2, 2)),
        vanish=(rng.uniform(-0.22, 0.22), rng.uniform(-0.15, 0.15)),
    )
    tone, scene = _wall(rng)
    if rng.random() < 0.45:
        tone, scene = _plate(rng, tone, scene, row, view)
    return _camera(rng, _lit(rng, _painted(rng, tone, scene, view.project(row.image, row.middle))))


def _paint(rng: Generator, luma: float, saturation: float = 1.0) -> Floats:
    """Returns a colour of that brightness: usually muted, from warm to cool, sometimes strong."""
    strength = saturation * (3.0 if rng.random() < 0.25 else 1.0)
    tint = strength * (rng.normal(5, 15) * _WARM + rng.normal(0, 5) * _GREEN)
    return np.asarray(np.clip(luma + tint - LUMA @ tint, 0, 255))


def _away(rng: Generator, luma: float, least: float, most: float) -> float:
    """Returns a brightness that differs from ``luma`` by ``least`` to ``most``, in either direction if possible."""
    step = rng.uniform(least, most)
    up = rng.random() < 0.5 if step <= luma <= 255 - step else luma < 128
    return float(np.clip(luma + step if up else luma - step, 0, 255))


def _roughness(rng: Generator) -> Floats:
    """Returns noise of about unit strength with coarse, medium and fine grain."""
    coarse, middling = (
        spread @ rng.normal(0, 0.7, size=(spread.shape[1],) * 2) @ spread.T for spread in (_spread(4), _spread(9))
    )
    return np.asarray(coarse + middling + rng.normal(0, 0.6, size=(SIZE, SIZE)))[:, :, None]


@cache
def _spread(cells: int) -> Floats:
    """Returns the matrix that interpolates linearly from ``cells`` points to the pixels of a line."""
    distance = np.linspace(0, cells - 1, SIZE)[:, None] - np.arange(cells)
    return np.asarray(np.clip(1 - np.abs(distance), 0, 1))


@cache
def _grid() -> Floats:
    """Returns row and column of every pixel."""
    return np.indices((SIZE, SIZE), dtype=np.float64)


def _bricks(rng: Generator, tone: Floats) -> Floats:
    high = rng.uniform(5, 9)
    wide = high * rng.uniform(1.8, 2.6)
    y, x = _grid() + rng.uniform(0, 40, size=2)[:, None, None]
    course = np.floor(y / high)
    x = x + course % 2 * wide / 2
    joint = (y % high < 1.1) | (x % wide < 1.1)
    shades = rng.normal(0, 9, size=97)[((course * 31 + np.floor(x / wide) * 7) % 97).astype(int)]
    mortar = _paint(rng, _away(rng, float(LUMA @ tone), 20, 50), 0.3)
    return np.where(joint[:, :, None], mortar, tone + shades[:, :, None])


def _boards(rng: Generator, tone: Floats) -> Floats:
    wide = rng.uniform(6, 14)
    place = np.arange(SIZE) + rng.uniform(0, wide)
    shades = rng.normal(0, 7, size=SIZE)[np.floor(place / wide).astype(int)]
    profile = shades - 28 * (place % wide < 1.2)
    stripes = profile[:, None, None] if rng.random() < 0.5 else profile[None, :, None]
    return np.asarray(tone + np.broadcast_to(stripes, (SIZE, SIZE, 1)))


def _plaster(rng: Generator, tone: Floats) -> Floats:
    return tone + rng.uniform(6, 14) * _roughness(rng)


_WALLS: tuple[Callable[[Generator, Floats], Floats], ...] = (_bricks, _boards, _plaster)


def _wall(rng: Generator) -> tuple[Floats, Floats]:
    """Draws a wall; returns its main colour and the wall itself."""
    tone = _paint(rng, rng.uniform(40, 210))
    return tone, _WALLS[rng.integers(len(_WALLS))](rng, tone) + rng.uniform(2, 7) * _roughness(rng)


def _plate(rng: Generator, tone: Floats, scene: Floats, row: Row, view: View) -> tuple[Floats, Floats]:
    """Draws a plate on the wall, as wide as the row or as the middle figure."""
    from PIL import Image, ImageDraw

    x, y = row.middle
    half_wide = row.width / 2 + (rng.uniform(14, 26) if rng.random() < 0.3 else 2 * TALL)
    half_high = TALL / 2 + rng.uniform(8, 22)
    box = [x - half_wide, y - half_high, x + half_wide, y + half_high]
    rim = Image.new("L", row.image.size)
    ImageDraw.Draw(rim).rounded_rectangle(box, radius=rng.uniform(0, 14), fill=255)
    inner = Image.new("L", row.image.size)
    inset = rng.uniform(3, 7)
    ImageDraw.Draw(inner).rounded_rectangle(
        [box[0] + inset, box[1] + inset, box[2] - inset, box[3] - inset], radius=rng.uniform(0, 10), fill=255
    )
    plate = _paint(rng, _away(rng, float(LUMA @ tone), 35, 110))
    edge = _paint(rng, _away(rng, float(LUMA @ plate), 20, 70), 0.3)
    scene = mixed(scene, edge, halved(view.project(rim, row.middle)))
    return plate, mixed(scene, plate, halved(view.project(inner, row.middle)))


def _painted(rng: Generator, tone: Floats, scene: Floats, figures: Image.Image) -> Floats:
    """Draws the figures, some with an outline, some with a shadow."""
    from PIL import Image, ImageFilter

    ink = _paint(rng, _away(rng, float(LUMA @ tone), 55, 135))
    if rng.random() < 0.4:
        right, down = rng.integers(2, 6, size=2).tolist()
        cast = figures.transform(figures.size, Image.Transform.AFFINE, (1, 0, -right, 0, 1, -down))
        scene = scene * (1 - rng.uniform(0.25, 0.5) * halved(cast.filter(ImageFilter.GaussianBlur(1.5))))
    if rng.random() < 0.25:
        outline = _paint(rng, _away(rng, float(LUMA @ ink), 40, 100), 0.3)
        scene = mixed(scene, outline, halved(figures.filter(ImageFilter.MaxFilter(5))))
    worn = ink + rng.uniform(1, 6) * _roughness(rng)
    return mixed(scene, worn, halved(figures))


def _lit(rng: Generator, scene: Floats) -> Floats:
    """Adds daylight from one side, sometimes with a shadow across the scene."""
    y, x = (_grid() + 0.5) / SIZE - 0.5
    angle, shade = rng.uniform(0, 2 * math.pi, size=2)
    light = rng.uniform(0.85, 1.1) + rng.uniform(0, 0.6) * (x * math.cos(angle) + y * math.sin(angle))
    if rng.random() < 0.3:
        depth = x * math.cos(shade) + y * math.sin(shade) - rng.uniform(-0.2, 0.2)
        light = light * (1 - rng.uniform(0.2, 0.45) * np.clip(depth / 0.12 + 0.5, 0, 1))
    return np.asarray(scene * light[:, :, None])


def _camera(rng: Generator, scene: Floats) -> Bytes:
    """Simulates a small lens, a shaking hand and a noisy sensor."""
    from PIL import Image, ImageFilter

    image = Image.fromarray(to_bytes(scene)).filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.9)))
    if rng.random() < 0.5:
        image = image.filter(_shake(rng.uniform(0, math.pi), rng.uniform(0.8, 2.0)))
    grain, speckle = rng.normal(0, 1, size=(SIZE, SIZE, 1)), rng.normal(0, 0.6, size=(SIZE, SIZE, 3))
    return to_bytes(np.asarray(image) + rng.uniform(2, 9) * (grain + speckle))


def _shake(angle: float, reach: float) -> ImageFilter.Kernel:
    """Returns a blur along a line of that angle, ``reach`` pixels to either side."""
    from PIL import ImageFilter

    y, x = np.mgrid[-2:3, -2:3]
    along = np.abs(x * math.cos(angle) + y * math.sin(angle))
    across = np.abs(x * math.sin(angle) - y * math.cos(angle))
    kernel = np.clip(reach + 0.5 - along, 0, 1) * np.clip(1 - across, 0, 1)
    return ImageFilter.Kernel((5, 5), kernel.ravel().tolist(), scale=float(kernel.sum()))
