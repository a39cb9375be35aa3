"""Copies the digits of a data folder with another frame: MNIST-M without its margin, USPS with one.

    python tools/reframe.py DATA OUT && ratp run digits --data OUT

How large a digit stands in its picture is a property of a collection, not of the domain: in the original release of
MNIST-M it lies unscaled in the middle of 32×32 pixels, in Digits-Five it fills 28×28 as MNIST does; the 16×16 pixels of
USPS are filled to the edge, and collections of 28×28 may or may not have put something around them.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from ratp.data.catalogue.locate import find_all
from ratp.data.formats.canonical import write_domain
from ratp.data.formats.layouts import Place, by_folder
from ratp.data.formats.pictures import ImageBytes, Pictures, array_png

SIZE, INNER = 32, 28
EDGE = (SIZE - INNER) // 2

Frame = Callable[[Image.Image], Image.Image]


def without_margin(picture: Image.Image) -> Image.Image:
    """The middle of a picture."""
    return picture.crop((EDGE, EDGE, EDGE + INNER, EDGE + INNER))


def with_margin(picture: Image.Image) -> Image.Image:
    """A picture within a black margin."""
    framed = Image.new(picture.mode, (SIZE, SIZE))
    framed.paste(picture.resize((INNER, INNER), Image.Resampling.BICUBIC), (EDGE, EDGE))
    return framed


# The recipe's name is part of what results say of their images.
FRAMES: dict[str, tuple[str, Frame]] = {
    "mnist_m": ("mnist_m without margin 1", without_margin),
    "usps": ("usps with margin 1", with_margin),
}
AS_THEY_ARE = ("mnist", "svhn", "syn")


def reframed(pictures: Pictures, frame: Frame) -> Pictures:
    """Pictures with another frame."""

    def read(position: int) -> ImageBytes:
        with Image.open(io.BytesIO(pictures.read(position).data)) as picture:
            return array_png(np.asarray(frame(picture)))

    return Pictures(pictures.classes, read)


def reframe(data: Path, out: Path) -> None:
    """Writes all domains of digits to another data folder: some reframed, links to the others."""
    found = find_all(data, "digits", [*FRAMES, *AS_THEY_ARE])
    for name, (recipe, frame) in FRAMES.items():
        pictures = reframed(by_folder(name, Place.at(found[name])), frame)
        provenance = {"rebuilt": True, "recipe": recipe, "seed": 0}
        print(write_domain(name, pictures, out / "digits", provenance=provenance).path)
    for name in AS_THEY_ARE:
        (out / "digits" / found[name].name).symlink_to(found[name].resolve())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the data folder")
    parser.add_argument("out", type=Path, help="the folder to make")
    asked = parser.parse_args()
    reframe(asked.data, asked.out)
