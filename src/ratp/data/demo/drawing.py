"""Draws printed digits: typefaces, rows of digits, their projection at an angle, flat colours.

Every random function takes its generator as its first argument. Images are arrays of shape
(32, 32, 3) in 0..255, masks of shape (32, 32, 1) in 0..1. Arithmetic is in double precision, so that
rounding to bytes gives the same image on processors that differ in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ratp.errors import RatpError

if TYPE_CHECKING:
    from PIL import Image

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]

SIZE = 32
TALL = 64  # height of a typeface's zero, in the pixels of a row
LUMA = np.array([0.299, 0.587, 0.114])  # how bright red, green and blue look
_FINE = 2 * SIZE  # masks are drawn at twice the size, then halved
_MARGIN = 40  # room around a row for plates, outlines and shadows
_GLYPHS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Face:
    """A typeface: the figures 0 to 9 as grey masks, cut to their ink, and the mean thickness of its strokes."""

    name: str
    glyphs: tuple[Image.Image, ...]
    weight: float


def faces() -> list[Face]:
    """Loads the fonts of matplotlib that contain the digits."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    found = [load_face(path) for path in sorted(folder.glob("*.ttf")) if has_figures(path)]
    if not found:
        raise RatpError(f"no font with digits in {folder}: reinstall matplotlib, or use another stream than the demo.")
    return found


def heavy(candidates: Sequence[Face]) -> list[Face]:
    """Returns the heavier half of the typefaces."""
    return sorted(candidates, key=lambda face: (-face.weight, face.name))[: (len(candidates) + 1) // 2]


def has_figures(path: Path) -> bool:
    """Whether a font contains real digits: symbol fonts have brackets and arrows in their positions."""
    from matplotlib.ft2font import FT2Font

    font = FT2Font(str(path))
    indices = [font.get_char_index(ord(digit)) for digit in "0123456789"]
    return all(indices) and tuple(font.get_glyph_name(index) for index in indices) == _GLYPHS


def load_face(path: Path) -> Face:
    """Loads the typeface of a font file."""
    from PIL import Image, ImageDraw, ImageFont

    def cut(digit: str, size: int) -> Image.Image:
        font = ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
        canvas = Image.new("L", (4 * TALL, 4 * TALL))
        ImageDraw.Draw(canvas).text((TALL, 2 * TALL), digit, fill=255, font=font, anchor="lm")
        return canvas.crop(canvas.getbbox())

    size = round(TALL * TALL / cut("0", TALL).height)
    glyphs = tuple(cut(digit, size) for digit in "0123456789")
    return Face(path.name, glyphs, float(np.mean([_stroke(glyph) for glyph in glyphs])))


def _stroke(glyph: Image.Image) -> float:
    """Estimates stroke width: ink divided by half the number of edges that horizontal lines cross."""
    ink = np.pad(np.asarray(glyph, dtype=np.float64), 1)
    return float(2 * ink.sum() / np.abs(np.diff(ink, axis=1)).sum())


@dataclass(frozen=True)
class View:
    """The position and orientation of a row of figures in the image."""

    height: float  # of a figure, in pixels
    turn: float  # rotation, in radians
    slant: float  # horizontal shear
    stretch: float  # width of a figure relative to its own
    shift: tuple[float, float]  # of the middle figure from the centre, in pixels, to the right and down
    # perspective: how much nearer the right and the lower edge are than the centre
    vanish: tuple[float, float] = (0.0, 0.0)

    def project(self, row: Image.Image, middle: tuple[float, float]) -> Image.Image:
        """Projects the row, at twice the size, with its point ``middle`` at the centre plus ``shift``."""
        from PIL import Image

        cos, sin = math.cos(self.turn), math.sin(self.turn)
        onto = np.array([[cos, -sin], [sin, cos]]) @ np.array([[self.stretch, self.slant], [0.0, 1.0]])
        back = np.eye(3)
        back[:2, :2] = np.linalg.inv(onto * (self.height * _FINE / SIZE / TALL))
        back[2, :2] = np.array(self.vanish) / (_FINE / 2)
        centre = np.array(self.shift) * (_FINE / SIZE) + _FINE / 2
        matrix = _translation(*middle) @ back @ _translation(-centre[0], -centre[1])
        return row.transform(
            (_FINE, _FINE),
            Image.Transform.PERSPECTIVE,
            tuple((matrix / matrix[2, 2]).ravel()[:8].tolist()),
            Image.Resampling.BILINEAR,
        )


def _translation(x: float, y: float) -> Floats:
    matrix = np.eye(3)
    matrix[:2, 2] = x, y
    return matrix


@dataclass(frozen=True)
class Row:
    """A row of figures, flat on the page: a grey mask, and the centre and width of the middle figure."""

    image: Image.Image
    middle: tuple[float, float]
    width: int


def figure_row(rng: Generator, face: Face, digit: int, neighbours: float, gaps: tuple[float, float]) -> Row:
    """Draws the figure, and on either side, with probability ``neighbours``, another one that the edge cuts off."""
    from PIL import Image

    glyph = face.glyphs[digit]
    sides = [face.glyphs[k] if rng.random() < neighbours else None for k in rng.integers(10, size=2)]
    left_gap, right_gap = rng.uniform(*gaps, size=2) * TALL
    reach = 2 * TALL + _MARGIN
    image = Image.new("L", (glyph.width + 2 * reach, TALL + 2 * _MARGIN))

    def put(part: Image.Image, x: float) -> None:
        image.paste(part, (round(x), (image.height - part.height) // 2))

    put(glyph, reach)
    if sides[0] is not None:
        put(sides[0], reach - left_gap - sides[0].width)
    if sides[1] is not None:
        put(sides[1], reach + glyph.width + right_gap)
    return Row(image, (image.width / 2, image.height / 2), glyph.width)


def halved(mask: Image.Image) -> Floats:
    """Returns the mask at the image's size, in 0..1, with an axis for the channels."""
    return np.asarray(mask.reduce(_FINE // SIZE), dtype=np.float64)[:, :, None] / 255


def to_bytes(image: Floats) -> Bytes:
    """Rounds the image to bytes and clips values outside 0..255."""
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def mixed(under: Floats, over: Floats, share: Floats) -> Floats:
    """Blends ``over``, which covers ``share`` of every pixel, onto ``under``."""
    return under + share * (over - under)


def font_image(rng: Generator, typefaces: Sequence[Face], digit: int) -> Bytes:
    """Draws a figure in flat colours among its neighbours, turned, shifted and blurred."""
    from PIL import ImageFilter

    row = figure_row(rng, typefaces[int(rng.integers(len(typefaces)))], digit, neighbours=0.75, gaps=(0.04, 0.3))
    view = View(
        height=rng.uniform(18, 28),
        turn=rng.normal(0, 0.14),
        slant=rng.normal(0, 0.1),
        stretch=rng.uniform(0.85, 1.2),
        shift=(rng.uniform(-2.5, 2.5), rng.uniform(-2.5, 2.5)),
    )
    mask = view.project(row.image, row.middle).filter(ImageFilter.GaussianBlur(rng.uniform(0, 2.2)))
    paper, ink = rng.uniform(0, 255, size=(2, 3))
    while abs(LUMA @ (paper - ink)) < 50:
        paper, ink = rng.uniform(0, 255, size=(2, 3))
    return to_bytes(mixed(paper, ink, halved(mask)) + rng.normal(0, 3, size=(SIZE, SIZE, 3)))
