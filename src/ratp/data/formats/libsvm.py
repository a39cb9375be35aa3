"""The libsvm text of USPS."""

from __future__ import annotations

import bz2
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ratp.data.formats.arrays import Array
from ratp.errors import RatpError

USPS_SIDE = 16
_LONGEST_LINE = 1 << 16


def read_libsvm(path: Path) -> list[tuple[Array, Array]]:
    """USPS as libsvm text, packed with bzip2 or not: digits (N, 16, 16) in bytes, labels 1..10 as 0..9.

    Raises:
        RatpError: If it is something else.
    """
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
                raise RatpError(f"{path} is no libsvm text: it has a line of more than {_LONGEST_LINE:,} bytes.")
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
