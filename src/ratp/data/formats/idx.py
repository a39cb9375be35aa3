"""The idx files of MNIST and its kin."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ratp.data.formats.arrays import MOST_BYTES, Array
from ratp.errors import RatpError

IDX_IMAGES, IDX_LABELS = b"\0\0\x08\x03", b"\0\0\x08\x01"


def read_idx(path: Path) -> Array:
    """An idx file of bytes, plain or packed with gzip: labels (N,) or images (N, height, width)."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            return _idx(file, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RatpError(f"{path} is damaged or truncated: {error}. Download it again.") from error
    except OSError as error:
        raise RatpError(f"cannot read {path}: {error.strerror or error}.") from error


def _idx(file: BinaryIO | gzip.GzipFile, path: Path) -> Array:
    magic = file.read(4)
    if magic not in (IDX_IMAGES, IDX_LABELS):
        raise RatpError(
            f"{path} is not an idx file of bytes: expected it to begin with {IDX_IMAGES.hex()} or {IDX_LABELS.hex()}, "
            f"found {magic.hex() or 'nothing'}."
        )
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise RatpError(f"{path} is truncated: it ends within its header.")
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    count = math.prod(shape)
    if count > MOST_BYTES:
        raise RatpError(f"{path} claims {count:,} bytes, more than the {MOST_BYTES:,} allowed.")
    data = file.read(count + 1)
    if len(data) != count:
        found = f"{len(data):,}" if len(data) < count else "more"
        raise RatpError(
            f"{path} is damaged: its header says {' × '.join(map(str, shape))}, {count:,} bytes, found {found}."
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def idx_pairs(paths: Sequence[Path]) -> list[tuple[Path, Array, Array]]:
    """Images with their labels: by the names of the files if they say, else in the order given."""
    arrays = [(path, read_idx(path)) for path in paths]
    images = [(path, array) for path, array in arrays if array.ndim == 3]
    labels = [(path, array) for path, array in arrays if array.ndim == 1]
    if len(images) != len(labels):
        raise RatpError(
            f"expected idx files of images and of labels in pairs, found {len(images)} of images "
            f"({_names(images)}) and {len(labels)} of labels ({_names(labels)})."
        )
    if {_common(path) for path, _ in images} == {_common(path) for path, _ in labels}:
        order = {_common(path): k for k, (path, _) in enumerate(images)}
        labels.sort(key=lambda entry: order[_common(entry[0])])
    pairs = []
    for (path, pixels), (label_path, numbers) in zip(images, labels, strict=True):
        if len(pixels) != len(numbers):
            raise RatpError(f"{path} has {len(pixels):,} images, and {label_path} has {len(numbers):,} labels.")
        pairs.append((path, pixels, numbers))
    return pairs


def _names(files: Sequence[tuple[Path, Array]]) -> str:
    return ", ".join(path.name for path, _ in files) or "none"


def _common(path: Path) -> str:
    """What the names of images and of their labels have in common."""
    return re.sub(r"images|labels|idx[13]", "*", path.name.removesuffix(".gz"))
