"""Arrays of images and labels into pictures, and numpy's own files of them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratp.data.formats.encoding import array_png
from ratp.data.formats.pictures import Pictures
from ratp.errors import RatpError

Array = NDArray[Any]

MOST_BYTES = 1 << 32
PAIRS = (
    ("X", "y"),
    ("x_train", "y_train"),
    ("x_test", "y_test"),
    ("train_data", "train_label"),
    ("test_data", "test_label"),
    ("train", "label_train"),
    ("test", "label_test"),
    ("train_28", "label_train"),
    ("test_28", "label_test"),
    ("train_32", "label_train"),
    ("test_32", "label_test"),
    ("images", "labels"),
)  # names under which images and their labels are known to be published together


def array_pictures(images: Array, labels: Array, origin: str) -> Pictures:
    """Pictures from an array of images, (N, height, width) or (N, height, width, 1 or 3), and one of labels (N,).

    Raises:
        RatpError: If the arrays are of other kinds or lengths.
    """
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)) or 0 in images.shape:
        raise RatpError(f"{origin}: expected N images of height × width (× 3), found an array of shape {images.shape}.")
    if labels.shape != (len(images),):
        raise RatpError(f"{origin}: expected {len(images):,} labels for {len(images):,} images, found {labels.shape}.")
    pixels, numbers = as_bytes(images, origin), whole_numbers(labels, origin)
    if numbers.min() < 0:
        raise RatpError(f"{origin}: labels must not be negative, found {numbers.min()}.")
    return Pictures([str(number) for number in numbers.tolist()], lambda k: array_png(np.ascontiguousarray(pixels[k])))


def as_bytes(values: Array, origin: str) -> NDArray[np.uint8]:
    """Pixels as bytes: whole numbers in 0..255 as they are, fractions in 0..1 scaled.

    Raises:
        RatpError: If they are neither.
    """
    if values.dtype == np.uint8:
        return values
    low, high = _range(values, origin)
    if low >= 0 and high <= 1 and values.dtype.kind == "f":
        return np.rint(255 * values.astype(np.float64)).astype(np.uint8)
    if low >= 0 and high <= 255 and (values == np.rint(values)).all():
        return values.astype(np.uint8)
    raise RatpError(f"{origin}: expected pixels in 0..255 or fractions in 0..1, found values from {low:g} to {high:g}.")


def whole_numbers(values: Array, origin: str) -> NDArray[np.int64]:
    """Labels as integers below 1000.

    Raises:
        RatpError: If they are none.
    """
    low, high = _range(values, origin)
    if (values != np.rint(values)).any() or abs(low) > 1000 or high > 1000:
        raise RatpError(f"{origin}: expected whole numbers as labels, found values from {low:g} to {high:g}.")
    return values.astype(np.int64)


def _range(values: Array, origin: str) -> tuple[float, float]:
    if values.dtype.kind not in "uif":
        raise RatpError(f"{origin}: expected an array of numbers, found one of {values.dtype}.")
    if not values.size or not np.isfinite(values).all():
        raise RatpError(f"{origin}: expected finite numbers, found none, or values that are not finite.")
    return float(values.min()), float(values.max())


def paired(variables: Mapping[str, Any], origin: str) -> list[tuple[str, str]]:
    """The names of images and labels that belong together, among those a container holds.

    Images that lie there in several sizes, with the same labels, are taken once: as they were before they were resized.

    Raises:
        RatpError: If there is no pair that is known.
    """
    found: dict[str, tuple[str, str]] = {}
    for pair in PAIRS:
        if pair[0] in variables and pair[1] in variables:
            found.setdefault(pair[1], pair)
    if not found:
        raise RatpError(
            f"{origin}: expected images and labels under X and y (or {', '.join(f'{a} and {b}' for a, b in PAIRS[1:])})"
            f", found {', '.join(sorted(variables)) or 'nothing'}."
        )
    return list(found.values())


def read_npz(path: Path) -> list[tuple[Array, Array]]:
    """Images and labels from a file written by ``numpy.savez``.

    Raises:
        RatpError: If it holds no known names, is damaged, or holds objects.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            large = [info.filename for info in archive.infolist() if info.file_size > MOST_BYTES]
        if large:
            raise RatpError(f"{path}: {large[0]} is larger than the {MOST_BYTES:,} bytes allowed.")
        with np.load(path, allow_pickle=False) as file:
            return [(file[a], file[b]) for a, b in paired(dict.fromkeys(file.files), str(path))]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, MemoryError) as error:
        raise RatpError(
            f"{path} cannot be read: {error}. Only arrays of plain numbers are, never pickled objects."
        ) from error
