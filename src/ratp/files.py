"""Files that are either whole or absent: JSON and tensors written beside, flushed, then renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ratp.errors import RunDirectoryError

_TEMPORARY = ".part-"
_HASH = "sha256"
_MOST_TEXT, _MOST_NESTED = 1 << 30, 64
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LostFileError(RunDirectoryError):
    """What a file held is lost: it is missing, or not as it was written."""


class UnreadableFileError(RunDirectoryError):
    """A file is there and may be whole, but the system does not let it be read."""


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data`` in one step: a crash leaves the old file or the new one.

    Raises:
        RunDirectoryError: If the folder cannot be written, with the reason.
    """
    with writing(path):
        if path.exists() and not path.is_symlink() and not path.is_file():  # a device would become a file
            raise OSError(errno.EINVAL, "it is there and no file")
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}{_TEMPORARY}")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within the block, a disk that is full or cannot be written is the user's to put right.

    Raises:
        RunDirectoryError: If it is, with the path, the reason and what to do.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in _NO_ROOM
        advice = "Make room, and the same command goes on." if full else "Choose a folder you may write to."
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}. {advice}") from error


def is_leftover(path: Path) -> bool:
    """Whether a file is what a writer that was killed left half-written."""
    return path.name.startswith(".") and _TEMPORARY in path.name


def remove_leftovers(folder: Path) -> None:
    """Removes all leftovers in a folder that no other writer uses."""
    for item in folder.iterdir():
        if is_leftover(item):
            with writing(item):
                item.unlink(missing_ok=True)


def keep_as(path: Path, other: Path) -> None:
    """Gives a file a second name, in one step; where the disk knows no links, the second name is its only one then.

    Raises:
        RunDirectoryError: If the folder cannot be written, with the reason.
    """
    spare = other.with_name(f".{other.name}{_TEMPORARY}link")
    with writing(other):
        try:
            spare.hardlink_to(path)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            path.replace(other)
        else:
            spare.replace(other)
            spare.unlink(missing_ok=True)  # if both were names of the same file, there was nothing to replace
        _sync_folder(other.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replaces a text file in one step; bytes of a path that are no Unicode are written as escapes."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replaces a JSON file in one step."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    # Bytes of a path that are no Unicode come as lone surrogates, whose escape is valid JSON.
    write_bytes(path, text.encode(errors="backslashreplace"))


def read_bytes(path: Path) -> bytes:
    """Reads a file of text or JSON, if it is one that can be: no pipe, no device, nothing larger than any of ours.

    Raises:
        LostFileError: If it is missing.
        UnreadableFileError: If it may not be read.
        RunDirectoryError: If it is none that can be.
    """
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
            raise RunDirectoryError(f"cannot read {path}: it is a pipe or a device, not a file.")
        if about.st_size > _MOST_TEXT:
            raise RunDirectoryError(f"cannot read {path}: it has {about.st_size:,} bytes, more than ratp ever writes.")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise LostFileError(f"{path} is missing.") from error
    except OSError as error:
        raise UnreadableFileError(f"cannot read {path}: {error.strerror or error}.") from error


def parse_json(text: bytes | str) -> Any:
    """Reads JSON as it is written here: finite numbers, and nothing that is nested without end.

    Raises:
        ValueError: If it is anything else.
    """
    try:
        data = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    layer = [data]
    for _ in range(_MOST_NESTED):
        layer = [part for item in layer if isinstance(item, dict | list) for part in _parts(item)]
        if not layer:
            return data
    raise ValueError("it is nested too deeply")


def _parts(item: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return item.values() if isinstance(item, dict) else item


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no number it can hold")
    return number


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        RunDirectoryError: If the file is missing, unreadable or holds no JSON object.
    """
    try:
        data = parse_json(read_bytes(path))
    except ValueError as error:
        raise RunDirectoryError(f"{path} is damaged: it holds no valid JSON ({error}).") from error
    if not isinstance(data, dict):
        raise RunDirectoryError(f"{path} is damaged: expected a JSON object, found {type(data).__name__}.")
    return data


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> None:
    """Replaces a safetensors file in one step; ``metadata`` is kept as JSON, with a hash of it and all tensors.

    Raises:
        RunDirectoryError: If the file cannot be written, with the reason.
        ValueError: If the metadata holds numbers that JSON has none for.
    """
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}  # none share memory
    about = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    about[_HASH] = _hash_of_file(plain, about)
    write_bytes(path, save(plain, metadata={"about": json.dumps(about)}))  # one key has one order


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads a safetensors file: its tensors, as copies in memory, and its metadata.

    Raises:
        LostFileError: If the file is missing, truncated, foreign, or not as :func:`write_tensors` wrote it. Files of
            others have no hash to tell by.
        UnreadableFileError: If it may not be read.
    """
    try:
        path.stat()
        if not os.access(path, os.R_OK):  # safetensors would call it missing
            raise UnreadableFileError(f"cannot read {path}: {os.strerror(errno.EACCES)}.")
    except FileNotFoundError as error:
        raise LostFileError(f"{path} is missing.") from error
    except OSError as error:
        raise UnreadableFileError(f"cannot read {path}: {error.strerror or error}.") from error
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            about = json.loads((file.metadata() or {}).get("about", "{}"))
        about = about if isinstance(about, dict) else {}
        expected = about.pop(_HASH, None)
        is_whole = expected is None or expected == _hash_of_file(tensors, about)
    except FileNotFoundError as error:
        raise LostFileError(f"{path} is missing.") from error
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise LostFileError(f"{path} is damaged or no safetensors file: {error}.") from error
    if not is_whole:
        raise LostFileError(f"{path} is damaged: its contents are not what was written.")
    return tensors, about


def is_whole(path: Path) -> bool:
    """Whether a file of tensors is there, as it was written."""
    try:
        read_tensors(path)
    except RunDirectoryError:
        return False
    return True


def _hash_of_file(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    text = json.dumps([hash_of(tensors), about], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of names, types, shapes and contents."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def safe_name(name: str) -> str:
    """A name that can be that of a file anywhere: letters, digits, ``-``, ``_`` and dots, not too long."""
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).lstrip(".")
    return plain.encode()[:80].decode(errors="ignore") or "_"
