"""What a file or folder is, by its content."""

from __future__ import annotations

import gzip
import re
import zipfile
import zlib
from pathlib import Path
from typing import Literal

from ratp.data.formats.idx import IDX_IMAGES, IDX_LABELS
from ratp.data.formats.layouts import LabelList, parse_list
from ratp.data.formats.matlab import HDF5
from ratp.data.read.listing import is_image_name
from ratp.errors import RatpError

Kind = Literal["idx", "mat", "hdf5", "npz", "libsvm", "zip", "list", "folder"]

_DATA_ENDINGS = frozenset({".mat", ".h5", ".hdf5", ".bz2", ".gz", ".npz"})


def recognised(path: Path) -> list[tuple[Kind, Path]]:
    """Recognises a path by its content: itself with its kind, or for a folder of data files those files."""
    if not path.is_dir():
        return [(_kind(path), path)]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    if any(entry.is_dir() for entry in entries):
        return [("folder", path)]
    found = [(_kind(entry), entry) for entry in entries if _may_hold_arrays(entry)]
    names = {entry.name for _, entry in found}
    # Where a file lies packed and unpacked side by side, one of the two is enough.
    once = [(kind, entry) for kind, entry in found if entry.suffix != ".gz" or entry.stem not in names]
    return once or [("folder", path)]


def _may_hold_arrays(entry: Path) -> bool:
    return entry.suffix in _DATA_ENDINGS or "idx" in entry.name


def _kind(path: Path) -> Kind:
    """What a file is, by its content."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise RatpError(f"cannot read {path}: {error.strerror or error}.") from error
    if head.startswith(b"\x1f\x8b"):
        head = _unpacked_head(path)
        if not head.startswith((IDX_IMAGES, IDX_LABELS)):
            hint = f"Unpack it first (tar -xf {path.name}) and give the folder." if head[257:262] == b"ustar" else ""
            raise RatpError(f"{path} is packed with gzip and holds no idx file of bytes. {hint}".strip())
    if head.startswith((IDX_IMAGES, IDX_LABELS)):
        return "idx"
    if head.startswith(HDF5) or head[512:520] == HDF5:
        return "hdf5"
    if head.startswith(b"MATLAB 5.0 MAT-file"):
        return "mat"
    if head.startswith(b"PK\x03\x04") or zipfile.is_zipfile(path):
        return _kind_of_zip(path)
    if head.startswith(b"BZh") or re.match(rb"\s*[+-]?[\d.]+(\s+\d+:\S+)+", head):
        return "libsvm"
    if _is_list(path, head):
        return "list"
    raise RatpError(f"{path} cannot be imported: {_what_else(head)}.")


def _unpacked_head(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            return file.read(512)
    except (OSError, EOFError, zlib.error) as error:
        raise RatpError(f"{path} is damaged or truncated: {error}. Download it again.") from error


def _kind_of_zip(path: Path) -> Kind:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [Path(name) for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise RatpError(f"{path} is not a readable zip file: {error}. Download it again.") from error
    if any(name.suffix in {".pkl", ".pickle"} for name in names):
        raise RatpError(f"{path} holds pickled objects, which can run anything when read; they are never read.")
    if names and all(name.suffix == ".npy" for name in names):
        return "npz"
    arrays = [name for name in names if name.suffix in _DATA_ENDINGS]
    if arrays and not any(is_image_name(name.name) for name in names):
        raise RatpError(f"{path} holds {arrays[0]}: unpack it first and give that file.")
    return "zip"


def _what_else(head: bytes) -> str:
    if not head:
        return "the file is empty"
    if re.match(rb"\s*<(!doctype|html|head|\?xml)", head, re.IGNORECASE):
        return "it is a web page, as servers send instead of a file that needs a browser; download it with one"
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        return "it is a pickle, which can run anything when read; it is never read"
    if head.startswith(b"\x93NUMPY"):
        return "it is a single array; images and labels are needed together (numpy.savez with X and y)"
    if head[257:262] == b"ustar":
        return "it is a tar archive; unpack it first and give the folder"
    return (
        "expected an idx, MATLAB, HDF5, npz or libsvm file, a zip or folder of images or a list of labels, "
        f"found a file beginning with {head[:8]!r}"
    )


def _is_list(path: Path, head: bytes) -> bool:
    return b"\0" not in head and parse_list(_content(path), str(path)) is not None


def read_list(path: Path) -> LabelList:
    """A list of labels."""
    labels = parse_list(_content(path), str(path))
    if labels is None:
        raise RatpError(f"{path} is not a list of labels: expected an image's name and its label on every line.")
    return labels


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RatpError(f"cannot read {path}: {error.strerror or error}.") from error
