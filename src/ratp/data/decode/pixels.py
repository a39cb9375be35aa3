"""Converts pixels of any kind to 8-bit RGB.

============== ===================================================================================================
16-bit         16 bits per channel; the whole range 0…65,535 becomes 0…255
32-bit         grey values as 32-bit integers or floats: kept if all are in 0…255 (floats in 0…1 times 255,
               integers up to 65,535 as 16-bit), else the image's own range becomes 0…255
palette        colours looked up
alpha          blended onto white
cmyk           and other colour models (``ycbcr``, …): converted to RGB
greyscale      the same value in all three channels
1-bit          black and white
============== ===================================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratp.errors import RatpError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL import Image

_STRIP_PIXELS = 2**20


class BadImage(RatpError):  # noqa: N818
    """A file is not a usable image. The message is only the reason, to be put after the file's name."""


def has_16_bits(image: Image.Image) -> bool:
    """Whether the file has 16 bits per channel, which the mode shows for grey images only."""
    for codec, _, _, arguments in getattr(image, "tile", ()):
        raw, *more = arguments if isinstance(arguments, tuple) and arguments else (arguments,)
        if codec in ("ppm", "ppm_plain"):
            return int(more[0]) > 255
        if ";16" in str(raw) and raw != "BGR;16":  # that format has 16 bits per pixel
            return True
    return image.mode.startswith("I;16")


def to_rgb(image: Image.Image, deep: bool, conversions: list[str]) -> Image.Image:
    """Converts the image to RGB."""
    mode = image.mode
    if deep:
        conversions.append("16-bit")
    elif mode in ("I", "F"):
        conversions.append("32-bit")
    if mode in ("I", "F") or mode.startswith("I;16"):
        conversions += ["alpha", "greyscale"] if "transparency" in image.info else ["greyscale"]
        return _to_8_bits(image, deep).convert("RGB")
    if mode in ("P", "PA"):
        conversions.append("palette")
    alpha = mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info
    if alpha:
        conversions.append("alpha")
    if mode in ("1", "L", "LA", "La"):
        conversions += ["greyscale", "1-bit"] if mode == "1" else ["greyscale"]
    elif mode == "LAB":
        raise BadImage("in the colour model LAB, which is not supported: convert it to RGB")
    elif mode not in ("RGB", "RGBX", "RGBA", "RGBa", "P", "PA"):
        conversions.append(mode.lower())
    if alpha:
        return _over_white(image)
    return image if mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    rgb = Image.new("RGB", image.size)
    for top, strip in _strips(image):
        rgba = strip.convert("RGBA")
        rgb.paste(Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB"), (0, top))
    return rgb


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yields an image in strips with the row each begins at: what is made of a strip takes little memory."""
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _to_8_bits(image: Image.Image, deep: bool) -> Image.Image:
    import numpy as np
    from PIL import Image

    low, high = _extremes(image)
    transparent = image.info.get("transparency")
    grey = Image.new("L", image.size)
    for top, strip in _strips(image):
        values = np.nan_to_num(np.asarray(strip).astype(np.float64), nan=low, posinf=high, neginf=low)
        if deep or (image.mode == "I" and low >= 0 and 255 < high <= 65535):
            scaled = values / 257
        elif image.mode == "F" and low >= 0 and high <= 1:
            scaled = values * 255
        elif low >= 0 and high <= 255:
            scaled = values
        else:
            scaled = (values - low) * (255 / ((high - low) or 1))
        if transparent is not None:
            scaled[values == transparent] = 255
        grey.paste(Image.fromarray(np.rint(scaled).clip(0, 255).astype(np.uint8)), (0, top))
    return grey


def _extremes(image: Image.Image) -> tuple[float, float]:
    """Returns the smallest and the largest finite value."""
    import numpy as np

    found: list[float] = []
    for _, strip in _strips(image):
        values = np.asarray(strip)
        finite = values[np.isfinite(values)]
        if finite.size:
            found += float(finite.min()), float(finite.max())
    if not found:
        raise BadImage("without any finite value")
    return min(found), max(found)
