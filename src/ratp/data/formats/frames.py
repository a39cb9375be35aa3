"""Frames: how much of an image its digit fills, which differs between a data set's first release and collections of it.

The paper's images are those of Digits-Five: there MNIST-M has lost its margin, and USPS has gained one.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ratp.data.formats.pictures import ImageBytes, Pictures, array_png

if TYPE_CHECKING:
    from ratp.data.cache.manifest import Manifest

FrameName = Literal["digits-five", "original"]
DIGITS_FIVE: FrameName = "digits-five"


@dataclass(frozen=True)
class Frame:
    """How Digits-Five frames a domain that was first released with another frame."""

    original: int  # side of the images as first released; only images of this side are changed
    margin: int  # black pixels to add on every side; negative: pixels to remove
    side: int  # side to resize the result to

    def is_original(self, file: ImageBytes) -> bool:
        """Returns whether an image has its original frame, by its size."""
        from PIL import Image

        with Image.open(io.BytesIO(file.data)) as image:
            return image.size == (self.original, self.original)

    def apply(self, file: ImageBytes) -> ImageBytes:
        """Returns an image in this frame; one of another size stays as it is."""
        from PIL import Image

        if not self.is_original(file):
            return file
        with Image.open(io.BytesIO(file.data)) as image:
            end = self.original + self.margin
            plain = image if image.mode in ("L", "RGB") else image.convert("RGB")
            framed = plain.crop((-self.margin, -self.margin, end, end))
            if framed.size != (self.side, self.side):
                framed = framed.resize((self.side, self.side), Image.Resampling.BICUBIC)
            return array_png(np.asarray(framed))

    def describe_images(self, provenance: Mapping[str, Any] | None, manifest: Manifest) -> str | None:
        """Says which frame a domain's images have; None if they came as Digits-Five has them."""
        if provenance and provenance.get("frame") == DIGITS_FIVE:
            return self.describe()
        sides = {(file.height, file.width) for file in manifest.usable}
        if sides != {(self.original, self.original)}:
            return None
        return f"original frame of {self.original}×{self.original} pixels; Digits-Five has {self.side}×{self.side}"

    def describe(self) -> str:
        """Says what was done to the original images."""
        how = f"padded by {self.margin}" if self.margin > 0 else f"cropped by {-self.margin}"
        size = f"{self.side}×{self.side}"
        result = f"and resized to {size}" if self.original + 2 * self.margin != self.side else f"to {size}"
        return f"{how} pixels on every side {result}, as in Digits-Five"


def reframed(pictures: Pictures, frame: Frame) -> Pictures:
    """Returns pictures in another frame."""
    return replace(pictures, read=lambda position: frame.apply(pictures.read(position)))
