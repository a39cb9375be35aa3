"""Decodes the bytes of an image file to 8-bit RGB and names every conversion.

Every other change to the pixels is returned by name; the names are those in :mod:`ratp.data.decode.pixels` and these:

============== ===========================================================
exif-rotated   turned or mirrored as the file's orientation says
animated       first frame taken
multi-page     first page taken
============== ===========================================================
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ratp._core.environment import SharedContext, quietly
from ratp.data.decode.pixels import BadImage, has_16_bits, to_rgb

if TYPE_CHECKING:  # a process that only decodes needs no numpy and starts sooner without it
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image
    from PIL.ImageFile import ImageFile

__all__ = ["MAX_PIXELS", "Decoded", "Picture", "decode", "decode_picture", "image_kind"]

MAX_PIXELS = 100_000_000
_ORIENTATION = 0x0112
_UPRIGHT = {  # the operation that undoes each orientation
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_BEGINNINGS = {
    b"\x89PNG": "PNG",
    b"\xff\xd8": "JPEG",
    b"RIFF": "WEBP",
    b"BM": "BMP",
    b"GIF8": "GIF",
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "TIFF"),
    **dict.fromkeys((b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"), "PPM"),
}
_PLUGINS = {
    "PNG": ("PngImagePlugin", "PngImageFile"),
    "JPEG": ("JpegImagePlugin", "JpegImageFile"),
    "WEBP": ("WebPImagePlugin", "WebPImageFile"),
    "BMP": ("BmpImagePlugin", "BmpImageFile"),
    "GIF": ("GifImagePlugin", "GifImageFile"),
    "TIFF": ("TiffImagePlugin", "TiffImageFile"),
    "PPM": ("PpmImagePlugin", "PpmImageFile"),
}
_WEB_PAGES = (b"<!doctype html", b"<html", b"<head", b"<body", b"<script", b"<!--")


class Decoded(NamedTuple):
    """A decoded image.

    Attributes:
        image: uint8 array of shape (height, width, 3).
        conversions: What was done to the pixels, by the names of the tables here and in :mod:`ratp.data.decode.pixels`.
        original_size: Height and width before resizing, the right way up.
    """

    image: NDArray[np.uint8]
    conversions: tuple[str, ...]
    original_size: tuple[int, int]


class Picture(NamedTuple):
    """A decoded image as Pillow holds it; the rest is as in :class:`Decoded`."""

    image: Image.Image
    conversions: tuple[str, ...]
    original_size: tuple[int, int]

    def planes(self) -> bytes:
        """The pixels with channels first."""
        return b"".join(channel.tobytes() for channel in self.image.split())


def decode(data: bytes, size: tuple[int, int] | None) -> Decoded:
    """Decodes an image file and resizes it, bilinear with antialiasing and without cropping.

    Meanwhile, Pillow's settings change for all threads.
    """
    import numpy as np

    picture = decode_picture(data, size)
    return Decoded(np.array(picture.image), picture.conversions, picture.original_size)


def decode_picture(data: bytes, size: tuple[int, int] | None, max_pixels: int = MAX_PIXELS) -> Picture:
    """Decodes like :func:`decode`, but returns a Pillow image; raises MemoryError if memory is too small."""
    kind = image_kind(data)
    from PIL.Image import DecompressionBombError

    opener = _opener(kind)
    pixels = MAX_PIXELS if kind == "WEBP" else 0  # that reader takes memory as soon as it opens a file
    try:
        with quietly, _strictly:
            image = opener(io.BytesIO(data))
            pixels = min(image.width * image.height, MAX_PIXELS)
            return _decode(image, size, min(max_pixels, MAX_PIXELS))
    except BadImage:
        raise
    except DecompressionBombError as error:
        raise BadImage(f"too many pixels: more than {MAX_PIXELS / 1e6:,.0f} million") from error
    except Exception as error:  # on damaged data a decoder may raise anything
        if isinstance(error, MemoryError) or "out of memory" in str(error):
            raise MemoryError(f"too little memory for {kind} data") from error
        bytes(4 * pixels)  # some decoders call it damage when they get no memory; this then raises a MemoryError
        raise BadImage(_reason(kind, error)) from error


def image_kind(data: bytes) -> str:
    """Recognises the format by the first bytes."""
    kind = next((kind for start, kind in _BEGINNINGS.items() if data.startswith(start)), None)
    if kind:
        return kind
    if not data:
        raise BadImage("empty (0 bytes)")
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(_WEB_PAGES):
        raise BadImage("a web page, not an image")
    if start.startswith(b"version https://git-lfs"):
        raise BadImage("a Git LFS pointer, not the image itself")
    if not data.strip(b"\0"):
        raise BadImage("nothing but zeros")
    raise BadImage(f"not an image of a known format ({', '.join(dict.fromkeys(_BEGINNINGS.values()))})")


@cache
def _opener(kind: str) -> Callable[[io.BytesIO], ImageFile]:
    """Imports Pillow's class for one format only, so that a file that begins like a PNG is only ever read as a PNG."""
    module, name = _PLUGINS[kind]
    opener: Callable[[io.BytesIO], ImageFile] = getattr(import_module(f"PIL.{module}"), name)
    return opener


def _be_strict(back: ExitStack) -> None:
    """Makes Pillow reject truncated files, regardless of the settings of other code in the process."""
    from PIL import ImageFile

    back.callback(setattr, ImageFile, "LOAD_TRUNCATED_IMAGES", ImageFile.LOAD_TRUNCATED_IMAGES)
    ImageFile.LOAD_TRUNCATED_IMAGES = False


_strictly = SharedContext(_be_strict)


def _reason(kind: str, error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"a damaged or truncated {kind} file"
    if "truncated" in str(error).lower() or isinstance(error, EOFError):
        return f"truncated: the {kind} data ends too early"
    first_line = (str(error).splitlines() or [""])[0][:100]
    detail = "".join(letter if letter.isprintable() else "?" for letter in first_line) or type(error).__name__
    return f"damaged {kind} data ({detail})"


def _decode(image: Image.Image, size: tuple[int, int] | None, max_pixels: int) -> Picture:
    from PIL import Image

    if image.width * image.height > max_pixels:
        raise BadImage(
            f"too many pixels: {image.width:,}×{image.height:,}, at most {max_pixels / 1e6:,.4g} million are decoded"
        )
    deep = has_16_bits(image)
    several = _several_frames(image)
    turned = image.format == "TIFF" and _orientation(image) != 1  # that decoder turns the image itself
    image.load()
    orientation = _orientation(image)
    conversions = ["exif-rotated"] if turned or orientation != 1 else []
    rgb = to_rgb(image, deep, conversions)
    if rgb is not image:
        image.close()  # frees its memory
    if several:
        conversions.append(several)
    if orientation != 1:
        rgb = rgb.transpose(Image.Transpose[_UPRIGHT[orientation]])
    original = rgb.height, rgb.width
    if size is not None and size != original:
        rgb = rgb.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return Picture(rgb, tuple(conversions), original)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
        return int(value) if value in _UPRIGHT else 1
    except Exception:  # damaged metadata does not mean that the pixels are damaged
        return 1


def _several_frames(image: Image.Image) -> str | None:
    if image.format not in ("GIF", "WEBP", "PNG", "TIFF"):
        return None
    try:
        several = bool(getattr(image, "is_animated", False))
    except Exception:  # a later frame is damaged, but only the first is read
        several = True
    return ("multi-page" if image.format == "TIFF" else "animated") if several else None
