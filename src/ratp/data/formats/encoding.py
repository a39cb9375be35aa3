"""Pictures as image files: arrays become PNG, files stay as they are."""

from __future__ import annotations

import io
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from ratp.data.decode import decode_picture, image_kind
from ratp.data.formats.pictures import ImageBytes
from ratp.data.listing import BadImage

_ENDINGS = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm"),
}


def array_png(pixels: NDArray[np.uint8]) -> ImageBytes:
    """The PNG of an array of shape (height, width), (height, width, 1) or (height, width, 3)."""
    from PIL import Image

    file = io.BytesIO()
    image = Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    image.save(file, "PNG", compress_level=3)  # half the time of the default, the same size
    return ImageBytes(file.getvalue(), ".png")


def whole_file(data: bytes, origin: str) -> ImageBytes:
    """An image file as it is, once it has been seen to decode.

    Args:
        data: Content of the file.
        origin: Its name, also for a message. Its ending is kept if it fits the content.

    Raises:
        BadImage: If it is empty, damaged, too large or no image.
    """
    try:
        decode_picture(data, None)
        endings = _ENDINGS[image_kind(data)]
    except BadImage as problem:
        raise BadImage(f"{origin}: {problem}") from problem
    ending = PurePath(origin).suffix.lower()
    return ImageBytes(data, ending if ending in endings else endings[0])
