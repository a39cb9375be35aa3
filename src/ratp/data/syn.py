"""Printed numbers after the recipe of SYN digits: fonts, positions, orientations, colours, blur.

The conventions are those of :mod:`ratp.data.drawing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.random import Generator

from ratp.data.drawing import LUMA, SIZE, Bytes, Face, Floats, View, figure_row, halved, load_face, mixed, to_bytes
from ratp.errors import RatpError

_FONT_ENDINGS = frozenset({".ttf", ".otf", ".ttc"})
_FIGURES = "0123456789"


def syn_image(rng: Generator, typefaces: Sequence[Face], digit: int) -> Bytes:
    """A number of one to three figures in flat colours, the digit in its middle."""
    from PIL import ImageFilter

    row = figure_row(rng, typefaces[int(rng.integers(len(typefaces)))], digit, neighbours=0.55, gaps=(0.02, 0.24))
    height = rng.uniform(16, 30)
    room = (SIZE - height) / 2
    view = View(
        height=height,
        turn=rng.normal(0, 0.12),
        slant=rng.normal(0, 0.12),
        stretch=rng.uniform(0.8, 1.25),
        shift=(float(np.clip(rng.normal(0, 2), -4, 4)), rng.uniform(-0.6, 0.6) * room),
    )
    mask = view.project(row.image, row.middle).filter(ImageFilter.GaussianBlur(rng.uniform(0, 3.6)))
    paper, ink = _colours(rng)
    return to_bytes(mixed(paper, ink, halved(mask)))


def _colours(rng: Generator) -> tuple[Floats, Floats]:
    """Paper and ink: of well separated brightness, mostly muted, at times a strong colour."""
    contrast = float(np.clip(rng.normal(188, 48), 70, 240))
    end = min(rng.exponential(16), 255 - contrast)  # ink is nearly black or nearly white
    lumas = (end + contrast, end) if rng.random() < 0.56 else (255 - end - contrast, 255 - end)
    paper, ink = (_tinted(rng, luma) for luma in lumas)
    return paper, ink


def _tinted(rng: Generator, luma: float) -> Floats:
    tint = rng.exponential(15) * rng.normal(0, 1, size=3)
    return np.asarray(np.clip(luma + tint - LUMA @ tint, 0, 255))


def further_faces(folder: Path) -> tuple[list[Face], tuple[str, ...]]:
    """The fonts in a folder that write all ten figures, and notes on those that do not.

    Raises:
        RatpError: If none does.
    """
    found, notes = [], []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _FONT_ENDINGS:
            if writes_figures(path):
                found.append(load_face(path))
            else:
                notes.append(f"Font left out: {path} does not write the ten figures.")
    if not found:
        raise RatpError(f"no font that writes the ten figures in {folder}: expected .ttf, .otf or .ttc files.")
    return found, tuple(notes)


def writes_figures(path: Path) -> bool:
    """Whether the font has a glyph of its own for every figure."""
    from matplotlib.ft2font import FT2Font
    from PIL import ImageFont

    try:
        mapped = FT2Font(str(path))
        font = ImageFont.truetype(path, 32, layout_engine=ImageFont.Layout.BASIC)
        glyphs = {bytes(font.getmask(figure)) for figure in _FIGURES}
        return all(mapped.get_char_index(ord(figure)) for figure in _FIGURES) and len(glyphs - {b""}) == len(_FIGURES)
    except Exception:  # a font is a program written by others; one that fails is no font for us
        return False
