"""MATLAB's files of SVHN, SYN, MNIST-M and the collection Digits-Five, and the HDF5 file of USPS.

Old MATLAB files are read by scipy, new ones are HDF5 and need h5py. From either, only arrays of numbers are
taken, and only those whose names say what they are.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ratp.data.formats.arrays import MOST_BYTES, USPS_SIDE, Array, paired, whole_numbers
from ratp.errors import RatpError

HDF5 = b"\x89HDF\r\n\x1a\n"
_NUMBERS = {
    **dict.fromkeys(("uint8", "int8", "logical"), 1),
    **dict.fromkeys(("uint16", "int16"), 2),
    **dict.fromkeys(("uint32", "int32", "single"), 4),
    **dict.fromkeys(("uint64", "int64", "double"), 8),
}  # MATLAB's names of number types, and the bytes of each
CELLS = "dataset"  # what the file of USPS in Digits-Five calls its cells
_HEAD_BYTES, _COMPRESSED, _CHUNK = 128, 15, 1 << 20


def read_mat(path: Path) -> list[tuple[Array, Array]]:
    """Images (N, height, width, 3) and digits (N,) from a MATLAB file of version 5."""
    from scipy.io import whosmat

    try:
        listed = {name: (shape, kind) for name, shape, kind in whosmat(path)}
    except Exception as error:  # damaged files make the reader raise whatever it happens to stumble over
        raise RatpError(f"{path} is not a readable MATLAB file: {error or type(error).__name__}.") from error
    if listed.get(CELLS) == ((2, 2), "cell"):
        return _usps_cells(path)
    wanted = [name for pair in paired(listed, str(path)) for name in pair]
    for name in wanted:
        shape, kind = listed[name]
        if kind not in _NUMBERS:
            raise RatpError(f"{path}: expected {name} to be an array of numbers, found a {kind}.")
        if math.prod(shape) * _NUMBERS[kind] > MOST_BYTES:
            raise RatpError(f"{path}: {name} of shape {shape} is larger than the {MOST_BYTES:,} bytes allowed.")
    arrays = _loaded(path, wanted)
    return [_digits(arrays[a], arrays[b], f"{path}, {a} and {b}") for a, b in paired(listed, str(path))]


def _loaded(path: Path, names: Sequence[str]) -> dict[str, Array]:
    from scipy.io import loadmat

    try:
        arrays: dict[str, Array] = loadmat(path, variable_names=names, verify_compressed_data_integrity=True)
    except Exception as error:  # damaged files make the reader raise whatever it happens to stumble over
        raise RatpError(f"{path} is damaged: {error or type(error).__name__}. Download it again.") from error
    return arrays


def _usps_cells(path: Path) -> list[tuple[Array, Array]]:
    """USPS as Digits-Five has it: four cells, a row each for training and test, with images and digits."""
    _check_unpacked_size(path)
    found = []
    for number, row in enumerate(_loaded(path, [CELLS])[CELLS], start=1):
        images, digits = map(np.asarray, row)
        origin = f"{path}, row {number} of {CELLS}"
        if images.dtype.kind not in "uif" or digits.dtype.kind not in "uif" or images.ndim != 4 or images.shape[1] != 1:
            raise RatpError(f"{origin}: expected N × 1 × height × width numbers, found {images.shape}, {images.dtype}.")
        found.append(_digits(images[:, 0], digits, origin))
    return found


def _check_unpacked_size(path: Path) -> None:
    """Raises an error if what a MATLAB file holds is larger than allowed: of cells, a listing does not say it."""
    left = MOST_BYTES
    with path.open("rb") as file, suppress(zlib.error):  # what is damaged, its reader tells
        order = "<" if file.read(_HEAD_BYTES).endswith(b"IM") else ">"
        while len(tag := file.read(8)) == 8:
            kind, length = struct.unpack(f"{order}II", tag)
            packed = zlib.decompressobj() if kind == _COMPRESSED else None
            while length and (data := file.read(min(length, _CHUNK))):
                length -= len(data)
                while data:
                    left -= len(packed.decompress(data, _CHUNK)) if packed else len(data)
                    data = packed.unconsumed_tail if packed else b""
                    if left < 0:
                        raise RatpError(f"{path} holds more than the {MOST_BYTES:,} bytes allowed.")


def read_hdf5(path: Path) -> list[tuple[Array, Array]]:
    """Images and digits from a MATLAB file of version 7.3, or from ``train`` and ``test`` of USPS."""
    h5py = _h5py(path)
    try:
        with h5py.File(path, "r") as file:
            if parts := [part for part in ("train", "test") if isinstance(file.get(part), h5py.Group)]:
                return [_usps(file[part], f"{path}, {part}", h5py) for part in parts]
            return [
                # MATLAB counts the axes from the other end.
                _digits(_numbers(file, a, path, h5py).T, _numbers(file, b, path, h5py).T, f"{path}, {a} and {b}")
                for a, b in paired(dict.fromkeys(file), str(path))
            ]
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise RatpError(f"{path} is not a readable HDF5 file: {error}.") from error


def _h5py(path: Path) -> Any:
    try:
        return import_module("h5py")
    except ImportError as error:
        raise RatpError(f"{path} is an HDF5 file, and reading it needs h5py: pip install h5py") from error


def _numbers(group: Any, name: str, origin: object, h5py: Any) -> Array:
    link = group.get(name, getlink=True)
    data = group.get(name) if isinstance(link, h5py.HardLink) else None
    if not isinstance(data, h5py.Dataset) or data.dtype.kind not in "uif" or data.external or data.is_virtual:
        raise RatpError(f"{origin}: expected {name} to be an array of numbers within the file, found something else.")
    if data.size * data.dtype.itemsize > MOST_BYTES:
        raise RatpError(f"{origin}: {name} of shape {data.shape} is larger than the {MOST_BYTES:,} bytes allowed.")
    return np.asarray(data[()])


def _usps(group: Any, origin: str, h5py: Any) -> tuple[Array, Array]:
    images, digits = _numbers(group, "data", origin, h5py), _numbers(group, "target", origin, h5py)
    if images.ndim != 2 or images.shape[1] != USPS_SIDE**2:
        raise RatpError(f"{origin}: expected images of {USPS_SIDE**2} pixels, found an array of shape {images.shape}.")
    return images.reshape(-1, USPS_SIDE, USPS_SIDE), digits.ravel()


def _digits(images: Array, labels: Array, origin: str) -> tuple[Array, Array]:
    """Images with the picture's axis first, and digits from labels: 10 is SVHN's way to write 0."""
    if labels.ndim == 2 and 10 in labels.shape and 1 not in labels.shape:
        labels = (labels if labels.shape[1] == 10 else labels.T).argmax(axis=1)  # one column per class
    numbers = whole_numbers(labels.ravel(), origin)
    if numbers.min() < 0 or numbers.max() > 10 or {0, 10} <= set(np.unique(numbers).tolist()):
        found = f"{numbers.min()} to {numbers.max()}"
        raise RatpError(f"{origin}: expected the digits 0..9 as labels, or 1..10 with 10 for 0, found {found}.")
    count = len(numbers)
    if images.ndim == 4 and images.shape[3] == count and images.shape[2] in (1, 3):
        images = images.transpose(3, 0, 1, 2)
    elif images.ndim == 3 and images.shape[2] == count and images.shape[0] != count:
        images = images.transpose(2, 0, 1)
    if len(images) != count:
        raise RatpError(f"{origin}: expected as many images as labels, found {count:,} labels and {images.shape}.")
    return images, numbers % 10
