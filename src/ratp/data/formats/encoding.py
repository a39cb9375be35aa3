"""Pictures into PNG: from arrays, and from files of any common image format."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ratp.data.decode import MAX_PIXELS
from ratp.data.listing import BadImage

if TYPE_CHECKING:
    from PIL import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_AS_THEY_ARE = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_TO_COLOUR = frozenset({"CMYK", "YCbCr", "LAB", "HSV", "RGBX"})


def array_png(pixels: NDArray[np.uint8]) -> bytes:
    """The PNG of an array of shape (height, width), (height, width, 1) or (height, width, 3)."""
    from PIL import Image

    return _png(Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels))


def file_png(data: bytes, origin: str) -> bytes:
    """The PNG of an image file: the same pixels, turned upright if the camera noted how, nothing else kept.

    Args:
        data: Content of the file.
        origin: What to call it in a message.

    Raises:
        BadImage: If it is empty, damaged, too large or no image.
    """
    return _png(_upright(decoded(data, origin), origin))


def decoded(data: bytes, origin: str) -> Image.Image:
    """The image in an image file, in memory.

    Raises:
        BadImage: If it is empty, damaged, too large or no image.
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise BadImage(f"{origin}: the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise BadImage(
                    f"{origin}: {image.width}×{image.height} pixels are more than the {MAX_PIXELS:,} allowed"
                )
            image.load()
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        raise BadImage(f"{origin}: it is no image in a known format ({_beginning(data)})") from error
    except Exception as error:  # damaged files make decoders raise whatever they happen to stumble over
        raise BadImage(f"{origin}: it is damaged ({error or type(error).__name__})") from error
    return image


def _beginning(data: bytes) -> str:
    return f"{len(data):,} bytes beginning with {data[:12]!r}"


def _upright(image: Image.Image, origin: str) -> Image.Image:
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(image)
    except Exception as error:  # the note on orientation is as untrusted as the rest
        raise BadImage(f"{origin}: its EXIF data are damaged ({error})") from error
    if image.mode in _TO_COLOUR:
        return image.convert("RGB")
    if image.mode not in _AS_THEY_ARE:
        raise BadImage(f"{origin}: pixels of kind {image.mode!r} cannot be kept without loss")
    return image


def _png(image: Image.Image) -> bytes:
    transparency = image.info.get("transparency")
    image.info = {} if transparency is None else {"transparency": transparency}
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=3)  # half the time of the default, the same size
    return file.getvalue()
