"""Reads and writes files atomically, and defines their formats and the versions of their schemas.

Every file is written under a temporary name, flushed and renamed. It names the version of its schema; without one, it
has version 1. Before a change that old readers would misunderstand, add a step to the schema that converts data of the
previous version, and keep a run directory of it in ``tests/fixtures/runs``. Files of a later version are refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ratp import __version__
from ratp._core.locks import check_claim
from ratp.errors import RunDirectoryError

if TYPE_CHECKING:
    from io import BufferedReader

    from torch import Tensor

_TEMPORARY = ".part-"
_HASH = "sha256"
_MOST_TEXT, _MOST_NESTED = 1 << 30, 64
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LostFileError(RunDirectoryError):
    """A file is missing, or its contents have changed since it was written."""


class UnreadableFileError(RunDirectoryError):
    """The operating system refuses to read a file, which may be intact."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError within the block into advice: the disk is full or the folder not writable."""
    try:
        check_claim(path)
        yield
    except OSError as error:
        check_claim(path)
        advice = "Make room and repeat the command." if error.errno in _NO_ROOM else "Choose a folder you may write to."
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}. {advice}") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns an OSError within the block into a LostFileError or an UnreadableFileError."""
    try:
        yield
    except FileNotFoundError as error:
        raise LostFileError(f"{path} is missing.") from error
    except OSError as error:
        raise UnreadableFileError(f"cannot read {path}: {error.strerror or error}.") from error


def open_file(path: Path) -> BufferedReader:
    """Opens a file for reading; raises OSError at a folder, and at a pipe or device, which could make it wait."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")


def new_file(folder: Path, start: str) -> tuple[int, Path]:
    """Creates a file with a new name that begins with ``start``, with the permissions that the umask leaves."""
    while True:
        path = folder / f"{start}{os.urandom(6).hex()}"
        with suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), path


def make_folder(folder: Path) -> None:
    """Creates a folder and those above it, if needed, so that they last if the power fails."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        with suppress(OSError):  # a folder that may be written to, but not read
            _sync_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces ``path`` in one step at the end of the block, unless the block fails."""
    if path.exists() and not path.is_symlink() and not path.is_file():  # a device would become a file
        raise OSError(errno.EINVAL, "it exists and is not a file")
    handle, temporary = new_file(path.parent, f".{path.name}{_TEMPORARY}")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check_claim(path)  # again, because writing may have taken long
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces ``path`` by ``data`` in one step: a crash leaves the old file or the new one."""
    with writing(path), replacing(path) as file:
        file.write(data)


def is_leftover(path: Path) -> bool:
    """Whether a file was left half-written by a killed writer."""
    return path.name.startswith(".") and _TEMPORARY in path.name


def remove_leftovers(folder: Path) -> None:
    """Removes all leftovers in a folder that has no other writer."""
    for item in filter(is_leftover, folder.iterdir()):
        with writing(item):
            item.unlink(missing_ok=True)


def keep_as(path: Path, other: Path) -> None:
    """Links a file to a second name in one step; renames it where the disk has no links."""
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
            spare.unlink(missing_ok=True)  # replace() does nothing if both already are the same file
        _sync_folder(other.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replaces a text file in one step; bytes of a path that are not Unicode become escapes."""
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replaces a JSON file in one step."""
    # Bytes of a path that are not Unicode arrive as lone surrogates, whose escapes are valid JSON.
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_bytes(path: Path) -> bytes:
    """Reads a text or JSON file; refuses pipes, devices and files larger than any that ratp writes."""
    with _reading(path), open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_TEXT:
            raise RunDirectoryError(f"cannot read {path}: it has {size:,} bytes, more than ratp ever writes.")
        return file.read()


def parse_json(text: bytes | str) -> Any:
    """Parses JSON with finite numbers and limited nesting."""
    try:
        data = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    layer = [data]
    for _ in range(_MOST_NESTED):
        nested = (item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, dict | list))
        layer = [part for parts in nested for part in parts]
        if not layer:
            return data
    raise ValueError("it is nested too deeply")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        data = parse_json(read_bytes(path))
    except ValueError as error:
        raise RunDirectoryError(f"{path} is damaged: it holds no valid JSON ({error}).") from error
    if not isinstance(data, dict):
        raise RunDirectoryError(f"{path} is damaged: expected a JSON object, found {type(data).__name__}.")
    return data


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> None:
    """Replaces a safetensors file in one step; stores ``metadata`` as JSON, with a hash of it and all tensors."""
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}  # none share memory
    about = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    about[_HASH] = _hash_of_file(plain, about)
    write_bytes(path, save(plain, metadata={"about": json.dumps(about)}))  # one key has one order


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads a safetensors file: its tensors, as copies in memory, and its metadata.

    Refuses a file that :func:`write_tensors` wrote if it has changed since; files from elsewhere have no hash to check.
    """
    from safetensors import SafetensorError, safe_open

    with _reading(path), open_file(path):
        pass  # safetensors would wait for a pipe, and call a file missing that cannot be read
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            about = json.loads((file.metadata() or {}).get("about", "{}"))
        about = about if isinstance(about, dict) else {}
        expected = about.pop(_HASH, None)
        if expected is not None and expected != _hash_of_file(tensors, about):
            raise LostFileError(f"{path} is damaged: its contents are not what was written.")
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise LostFileError(f"{path} is damaged or not a safetensors file: {error}.") from error
    return tensors, about


def read_about(path: Path) -> dict[str, Any]:
    """Reads the metadata of a safetensors file, without its tensors or torch; empty if there is none that is valid."""
    with _reading(path), open_file(path) as file:
        header = file.read(min(int.from_bytes(file.read(8), "little"), _MOST_TEXT))
    with suppress(ValueError, KeyError, TypeError):
        about = parse_json(parse_json(header)["__metadata__"]["about"])
        return about if isinstance(about, dict) else {}
    return {}


def is_whole(path: Path) -> bool:
    """Whether a tensor file exists and is intact."""
    with suppress(RunDirectoryError):
        read_tensors(path)
        return True
    return False


def _hash_of_file(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([hash_of(tensors), about], sort_keys=True).encode()).hexdigest()


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """Computes the sha256 of names, types, shapes and contents."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    """Computes the sha256 of a file, in hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def safe_name(name: str) -> str:
    """Makes a short file name that is valid on any system: letters, digits, ``-``, ``_`` and dots."""
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).lstrip(".")
    return plain.encode()[:80].decode(errors="ignore") or "_"


class NewerFileError(RunDirectoryError):
    """A later version of this package wrote the file."""


class OutdatedFileError(RunDirectoryError):
    """An earlier version of this package wrote the file, in a form that is no longer read."""


@dataclass(frozen=True)
class Schema:
    """The versions of one kind of file, which stores its version under ``key``.

    For every version but the last, ``steps`` has the function that turns its data into the next version's.
    """

    steps: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = ()
    key: str = "schema"

    @property
    def version(self) -> int:
        """The current version."""
        return 1 + len(self.steps)

    @property
    def mark(self) -> dict[str, int]:
        """The entry that stores the current version."""
        return {self.key: self.version}

    def marked(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the current version to data before it is written."""
        return {**self.mark, **data, **self.mark}

    def read(self, data: Mapping[str, Any], place: Path | str) -> dict[str, Any]:
        """Converts data of any known version to the current one, and drops the version."""
        version = data.get(self.key, 1)
        if type(version) is not int or version < 1:
            raise RunDirectoryError(f"{place} is damaged: {self.key} {reprlib.repr(version)} is not a valid version.")
        if version > self.version:
            raise NewerFileError(
                f"{place} has {self.key} {version}, and ratp {__version__} reads {self.key} {self.version}: a later "
                "version wrote it. Update ratp: pip install --upgrade ratp-cdsl"
            )
        found = {name: value for name, value in data.items() if name != self.key}
        for step in self.steps[version - 1 :]:
            found = step(found)
        return found


def _outdated(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Refuses checkpoints of versions 1 and 2, which hold private attributes that have changed since."""
    raise OutdatedFileError("an earlier version of ratp wrote it")


# Of run directories, runs as one file (their config has a version of its own), studies, the cache and the data.
CONFIG = Schema()
ENVIRONMENT = Schema()
MATRIX = Schema()
JOURNAL = Schema()  # each line
STATE = Schema()  # includes the matrix and the lines of the journal
CHECKPOINT = Schema((_outdated, _outdated))
WEIGHTS = Schema()
CHECKSUMS = Schema()
SAMPLES = Schema()
FEATURES = Schema()
DETAILS = Schema()
EXAMPLES = Schema()
RESULT = Schema()
STUDY = Schema()
FAILURE = Schema()
MANIFEST = Schema(key="format")
DECODED = Schema(key="format")
SOURCE_MODEL = Schema()
DRAWN_DOMAIN = Schema()
DEPLOYMENT = Schema()
ADOPTED = Schema()
