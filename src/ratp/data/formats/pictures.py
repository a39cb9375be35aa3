"""Labelled pictures on their way into a domain, read one at a time: arrays become PNG, image files stay as they are."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratp.data.decode.decode import decode_picture, image_kind
from ratp.data.decode.pixels import BadImage
from ratp.errors import RatpError, unknown

_ENDINGS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm"),
}


class ImageBytes(NamedTuple):
    """An image file in memory; the ending has a dot."""

    data: bytes
    ending: str


def array_png(pixels: NDArray[np.uint8]) -> ImageBytes:
    """The PNG of an array of shape (height, width), (height, width, 1) or (height, width, 3)."""
    from PIL import Image

    file = io.BytesIO()
    image = Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    image.save(file, "PNG", compress_level=3)  # half the time of the default, the same size
    return ImageBytes(file.getvalue(), ".png")


def whole_file(data: bytes, origin: str) -> ImageBytes:
    """Returns an image file unchanged, after checking that it decodes; an ending that does not fit is replaced."""
    try:
        decode_picture(data, None)
        endings = _ENDINGS[image_kind(data)]
    except BadImage as problem:
        raise BadImage(f"{origin}: {problem}") from problem
    ending = PurePath(origin).suffix.lower()
    return ImageBytes(data, ending if ending in endings else endings[0])


@dataclass(frozen=True)
class Pictures:
    """Labelled pictures, read one at a time: ``read(k)`` returns picture k or raises ``BadImage`` with its name.

    ``unreadable`` names what could not even be listed, each with the reason.
    """

    classes: Sequence[str]
    read: Callable[[int], ImageBytes]
    notes: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.classes)


def joined(parts: Sequence[Pictures]) -> Pictures:
    """All pictures of ``parts``, one after the other."""
    places = [(part, k) for part in parts for k in range(len(part))]
    return Pictures(
        [part.classes[k] for part, k in places],
        lambda position: places[position][0].read(places[position][1]),
        tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        tuple(dict.fromkeys(problem for part in parts for problem in part.unreadable)),
    )


def distinct(parts: Sequence[Pictures], names: Sequence[str]) -> list[Pictures]:
    """Leaves out, from every part, the pictures that an earlier part has as well; notes say how many.

    Of a single part nothing is read and nothing left out.
    """
    seen: set[bytes] = set()
    found = []
    for part, name in zip(parts, names, strict=True):
        digests = [_digest(part, k) for k in range(len(part))] if len(parts) > 1 else []
        places = [k for k, digest in enumerate(digests) if digest is None or digest not in seen]
        left_out = len(digests) - len(places)
        note = f"{left_out:,} of the {len(part):,} images of {name} are in a file before it, too, and were left out."
        found.append(_at(places, part, note) if left_out else part)
        seen.update(digest for digest in digests if digest)
    return found


def _digest(pictures: Pictures, position: int) -> bytes | None:
    """Hashes a picture's bytes; None if it cannot be read, which writing it will report."""
    try:
        return hashlib.sha256(pictures.read(position).data).digest()
    except BadImage:
        return None


def selected(pictures: Pictures, classes: Collection[str]) -> Pictures:
    """Selects the pictures of some classes."""
    found = set(pictures.classes)
    for label in classes:
        if label not in found:
            raise RatpError(unknown("class", label, found))
    places = [k for k, label in enumerate(pictures.classes) if label in classes]
    left_out = len(found) - len(set(classes))
    note = f"{len(pictures) - len(places):,} images of {left_out:,} other classes were left out."
    return _at(places, pictures, note if left_out else None)


def thinned(pictures: Pictures, most: int) -> Pictures:
    """No more than so many of the pictures, chosen by chance, always the same ones, in their order."""
    if len(pictures) <= most:
        return pictures
    places = np.sort(np.random.default_rng(0).permutation(len(pictures))[:most]).tolist()
    return _at(places, pictures, f"{most:,} of {len(pictures):,} images were chosen by chance.")


def _at(places: Sequence[int], pictures: Pictures, note: str | None) -> Pictures:
    return Pictures(
        [pictures.classes[k] for k in places],
        lambda position: pictures.read(places[position]),
        (*pictures.notes, *([note] if note else [])),
        pictures.unreadable,
    )
