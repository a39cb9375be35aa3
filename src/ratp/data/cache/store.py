"""The cache of decoded images: complete entries of three files each, of which the least recently used go first.

``KEY.images`` contains only pixels, so that it can be mapped. ``KEY.manifest.json`` describes them, and ``KEY.json``,
written last, has the hashes of both and makes the entry valid. The key changes with whatever changes the pixels, so
two processes that write the same entry write the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ratp._core.files import DECODED, new_file, read_json, write_json
from ratp._core.locks import acquire, is_locked, try_acquire
from ratp.data.cache.manifest import Manifest, manifest_to_json, read_manifest
from ratp.data.decode.pixel_file import hash_of_pixels, map_images
from ratp.errors import RatpError, RunDirectoryError

if TYPE_CHECKING:
    from torch import Tensor

_FOLDER = "decoded"


@dataclass(frozen=True)
class CacheEntry:
    """A decoded domain in the cache: ``bytes`` is the size of its files, ``used`` when it was last opened."""

    key: str
    name: str
    images: int
    height: int
    width: int
    bytes: int
    used: float


@dataclass(frozen=True)
class Slot:
    """The files of one entry, which may not exist yet."""

    folder: Path
    key: str
    height: int
    width: int

    @classmethod
    def of(cls, cache: Path, key: str, height: int, width: int) -> Slot:
        """Returns the slot of an entry in a cache folder."""
        return cls(cache / _FOLDER, key, height, width)

    @property
    def lock(self) -> Path:
        """The file whose lock a writer holds."""
        return self._path("lock")

    def _path(self, ending: str) -> Path:
        return self.folder / f"{self.key}.{ending}"

    def load(self, *, count_as_use: bool = True, pixels: bool = True) -> tuple[Tensor, Manifest] | None:
        """Maps the entry; None if it is missing, damaged or not ours. Without ``pixels``, their hash is not checked."""
        try:
            found = self._checked(pixels)
        except (_DamagedError, OSError):
            return None
        if count_as_use:
            with suppress(OSError):
                os.utime(self._path("json"))
        return found

    def problem(self) -> tuple[Path, str] | None:
        """Reads every byte of the entry and returns what is wrong; None if all is well or there is no entry."""
        try:
            if self._path("json").exists():
                self._checked(pixels=True)
        except _DamagedError as error:
            return error.path, str(error)
        except OSError as error:
            return Path(error.filename or self._path("images")), f"cannot be read ({error.strerror or error})"
        return None

    def _checked(self, pixels: bool) -> tuple[Tensor, Manifest]:
        index_path, manifest, path = (self._path(ending) for ending in ("json", "manifest.json", "images"))
        try:
            index = DECODED.read(read_json(index_path), index_path)
        except (RatpError, TypeError, ValueError) as error:
            raise _DamagedError(index_path, "cannot be read by this version of ratp") from error
        if any(index.get(name) != value for name, value in self._claims().items()):
            raise _DamagedError(index_path, "describes another entry")
        if index.get("manifest_sha256") != hashlib.sha256(manifest.read_bytes()).hexdigest():
            raise _DamagedError(manifest, "has changed since it was written")
        try:
            about = read_manifest(manifest)
        except RatpError as error:
            raise _DamagedError(manifest, "cannot be read by this version of ratp") from error
        if "pixels_sha256" not in index:
            raise _DamagedError(index_path, "has no hash of the pixels: an earlier version of ratp wrote it")
        handle = os.open(path, os.O_RDONLY)
        try:
            count = len(about.usable)
            length = os.fstat(handle).st_size
            if not count or length != count * 3 * self.height * self.width:
                raise _DamagedError(path, "has the wrong size")
            if pixels and index["pixels_sha256"] != hash_of_pixels(handle, length):
                raise _DamagedError(path, "has changed since it was written")
            return map_images(handle, count, self.height, self.width), about
        finally:
            os.close(handle)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes other writers of the entry wait, and removes leftovers of a killed writer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with acquire(self.lock):  # without locks, writers repeat the work, with the same result
            for path in _files(self.folder, self.key):
                if path.name.startswith((".", f"{self.key}.part-")):
                    path.unlink(missing_ok=True)
            yield

    def make_room(self, needed: int) -> None:
        """Evicts the least recently used entries if the disk is too full."""
        missing = needed - shutil.disk_usage(self.folder).free
        if missing > 0:
            held = sum(entry.bytes for entry in _groups(self.folder))
            evict(self.folder.parent, max(0, held - missing))
            if shutil.disk_usage(self.folder).free < needed:
                raise OSError(ENOSPC, os.strerror(ENOSPC))

    @contextmanager
    def part(self) -> Iterator[Part]:
        """Opens a temporary file that is removed at the end of the block unless published."""
        handle, path = new_file(self.folder, f"{self.key}.part-")
        try:
            yield Part(handle, path)
        finally:
            path.unlink(missing_ok=True)
            os.close(handle)

    def publish(self, part: Part, manifest: Manifest) -> None:
        """Makes a flushed file of images the valid entry."""
        try:
            pixels = hash_of_pixels(part.handle, os.fstat(part.handle).st_size)
            part.path.replace(self._path("images"))
            write_json(self._path("manifest.json"), manifest_to_json(manifest))
            sha256 = hashlib.sha256(self._path("manifest.json").read_bytes()).hexdigest()
            hashes = {"manifest_sha256": sha256, "pixels_sha256": pixels}
            about = {"name": manifest.name, "images": len(manifest.usable), **hashes}
            write_json(self._path("json"), DECODED.marked({**self._claims(), **about}))
        except BaseException:
            _remove(self.folder, self.key)
            raise

    def _claims(self) -> dict[str, object]:
        return {"key": self.key, "height": self.height, "width": self.width}


class _DamagedError(Exception):
    """An entry cannot be used; the message says what is wrong with the file."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(problem)
        self.path = path


class Part(NamedTuple):
    """A file that is being written."""

    handle: int
    path: Path


def _key(path: Path) -> str:
    return path.name.lstrip(".").partition(".")[0]


def _files(folder: Path, key: str) -> list[Path]:
    """All files of an entry except its lock; the index, without which the entry is invalid, comes first."""
    files = [path for path in folder.iterdir() if _key(path) == key and path.suffix != ".lock"]
    return sorted(files, key=lambda path: path.name != f"{key}.json")


def _remove(folder: Path, key: str) -> None:
    for path in _files(folder, key):
        path.unlink(missing_ok=True)


def _groups(folder: Path) -> list[CacheEntry]:
    """All entries, valid or not."""
    found: dict[str, list[os.stat_result]] = {}
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                found.setdefault(_key(path), []).append(path.stat())
    return [_entry(folder, key, files) for key, files in found.items()]


def _entry(folder: Path, key: str, files: list[os.stat_result]) -> CacheEntry:
    size = sum(file.st_size for file in files)
    index = folder / f"{key}.json"
    try:
        about = DECODED.read(read_json(index), index)
        numbers = int(about["images"]), int(about["height"]), int(about["width"])
        return CacheEntry(key, str(about["name"]), *numbers, size, index.stat().st_mtime)
    except (RatpError, OSError, KeyError, TypeError, ValueError):
        return CacheEntry(key, "", 0, 0, 0, size, max(file.st_mtime for file in files))


def cache_entries(cache: Path) -> list[CacheEntry]:
    """Lists the decoded domains in a cache folder, the least recently used first."""
    return sorted((entry for entry in _groups(cache / _FOLDER) if entry.images), key=lambda e: (e.used, e.key))


def damaged_entries(cache: Path, *, pixels: bool = False) -> list[CacheEntry]:
    """Lists the useless entries of a cache folder: damaged ones and leftovers of killed writers.

    With ``pixels``, it also reads all pixels and checks their hash.
    """
    found = []
    for entry in _groups(cache / _FOLDER):
        slot = Slot.of(cache, entry.key, entry.height, entry.width)
        if slot.load(count_as_use=False, pixels=pixels) is None and not is_locked(slot.lock):
            found.append(entry)
    return found


def check_cache(folder: Path) -> list[tuple[Path, str]]:
    """Reads every stored byte of a cache folder, and returns the damaged files with what is wrong."""
    found = []
    for entry in sorted(_groups(folder / _FOLDER), key=lambda entry: entry.key):
        slot = Slot.of(folder, entry.key, entry.height, entry.width)
        if not is_locked(slot.lock):
            index = slot.folder / f"{entry.key}.json"
            problem = slot.problem() if index.exists() else (index, "is missing: writing the entry was interrupted")
            if problem is not None:
                found.append(problem)
    return found


def evict(cache: Path, keep_bytes: int) -> list[CacheEntry]:
    """Removes the least recently used entries until the rest takes at most ``keep_bytes``; returns what it removed.

    It removes leftovers of killed writers first and keeps entries that are being written. A process that has opened an
    entry keeps its images.
    """
    folder = cache / _FOLDER
    entries = sorted(_groups(folder), key=lambda entry: (entry.images > 0, entry.used, entry.key))
    held, removed = sum(entry.bytes for entry in entries), []
    for entry in entries:
        if held <= keep_bytes and entry.images:
            break
        try:
            lock = try_acquire(folder / f"{entry.key}.lock")
            if lock is not None:
                with lock:
                    _remove(folder, entry.key)
                    held -= entry.bytes
                    removed.append(entry)
        except OSError as error:
            raise RunDirectoryError(f"cannot remove files from {folder}: {error.strerror or error}.") from error
    return removed
