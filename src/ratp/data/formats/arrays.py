"""Arrays of images and labels into pictures, and two kinds of files of them: numpy's npz, and USPS as libsvm text."""

from __future__ import annotations

import bz2
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratp.data.formats.pictures import Pictures, array_png
from ratp.errors import RatpError

Array = NDArray[Any]

MOST_BYTES = 1 << 32
USPS_SIDE = 16
_LONGEST_LINE = 1 << 16
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
    """Makes pictures from arrays of images, (N, height, width) or (N, height, width, 1 or 3), and labels (N,)."""
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)) or 0 in images.shape:
        raise RatpError(f"{origin}: expected N images of height × width (× 3), found an array of shape {images.shape}.")
    if labels.shape != (len(images),):
        raise RatpError(f"{origin}: expected {len(images):,} labels for {len(images):,} images, found {labels.shape}.")
    pixels, numbers = as_bytes(images, origin), whole_numbers(labels, origin)
    if numbers.min() < 0:
        raise RatpError(f"{origin}: labels must not be negative, found {numbers.min()}.")
    return Pictures([str(number) for number in numbers.tolist()], lambda k: array_png(np.ascontiguousarray(pixels[k])))


def as_bytes(values: Array, origin: str) -> NDArray[np.uint8]:
    """Converts pixels to bytes: whole numbers in 0..255 as they are, fractions in 0..1 scaled."""
    if values.dtype == np.uint8:
        return values
    low, high = _range(values, origin)
    if low >= 0 and high <= 1 and values.dtype.kind == "f":
        return np.rint(255 * values.astype(np.float64)).astype(np.uint8)
    if low >= 0 and high <= 255 and (values == np.rint(values)).all():
        return values.astype(np.uint8)
    raise RatpError(f"{origin}: expected pixels in 0..255 or fractions in 0..1, found values from {low:g} to {high:g}.")


def whole_numbers(values: Array, origin: str) -> NDArray[np.int64]:
    """Converts labels to integers below 1000."""
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
    """Pairs the names of images and labels that a container holds.

    Images that lie there in several sizes, with the same labels, are taken once: as they were before they were resized.
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
    """Reads images and labels from a file written by ``numpy.savez``."""
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


def read_libsvm(path: Path) -> list[tuple[Array, Array]]:
    """USPS as libsvm text, packed with bzip2 or not: digits (N, 16, 16) in bytes, labels 1..10 as 0..9."""
    rows, labels = [], []
    try:
        for number, line in enumerate(_lines(path), start=1):
            label, row = _libsvm_row(line, f"{path}, line {number}")
            labels.append(label)
            rows.append(row)
    except (EOFError, UnicodeDecodeError) as error:
        raise RatpError(f"{path} is damaged or truncated: {error}. Download it again.") from error
    except OSError as error:
        raise RatpError(f"cannot read {path}: {error.strerror or error}. Download it again.") from error
    if not rows:
        raise RatpError(f"{path} is empty.")
    scaled = np.rint((np.stack(rows) + 1) * 127.5).astype(np.uint8)
    return [(scaled.reshape(-1, USPS_SIDE, USPS_SIDE), np.array(labels, dtype=np.int64) - 1)]


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as raw:
        packed = raw.read(3) == b"BZh"
    with bz2.open(path) if packed else path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                raise RatpError(f"{path} is not libsvm text: it has a line of more than {_LONGEST_LINE:,} bytes.")
            if line.strip():
                yield line.decode("ascii")


def _libsvm_row(line: str, place: str) -> tuple[int, NDArray[np.float64]]:
    row = np.zeros(USPS_SIDE**2)
    label, *entries = line.split()
    try:
        digit = int(float(label))
        values = np.array(" ".join(entries).replace(":", " ").split(), dtype=np.float64).reshape(-1, 2)
    except (ValueError, OverflowError) as error:
        raise RatpError(f"{place}: expected 'label index:value …', found {line[:60]!r}.") from error
    if float(label) != digit or not 1 <= digit <= 10:
        raise RatpError(f"{place}: expected a label in 1..10, found {label}.")
    places = values[:, 0]
    if len(values) and not (places.min() >= 1 and places.max() <= row.size and (places == np.rint(places)).all()):
        raise RatpError(f"{place}: expected positions in 1..{row.size}, found {places.min():g} to {places.max():g}.")
    if not (np.abs(values[:, 1]) <= 1).all():
        raise RatpError(f"{place}: expected values in -1..1, found others.")
    row[places.astype(np.int64) - 1] = values[:, 1]
    return digit, row
