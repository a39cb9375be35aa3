"""Where decoded images are kept: entries of three files each, whole or absent, removed when least recently used.

``KEY.images`` holds the pixels and nothing else, so that it can be mapped. ``KEY.manifest.json`` tells what they
are, and ``KEY.json``, written last, makes the entry valid. The key changes with whatever changes the pixels, so
two processes that write the same entry write the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ratp.data.image_file import map_images
from ratp.data.manifest import Manifest
from ratp.data.manifest_file import read_manifest, write_manifest
from ratp.errors import RatpError, RunDirectoryError
from ratp.file_lock import hold, hold_if_free
from ratp.files import read_json, write_json
from ratp.lock import is_locked
from ratp.schema import DECODED

_FOLDER = "decoded"


@dataclass(frozen=True)
class CacheEntry:
    """A decoded domain in the cache.

    Attributes:
        key: Name of its files.
        name: Name of the domain.
        images: Number of images.
        height: Height of the images.
        width: Width of the images.
        bytes: What its files take.
        used: When it was last opened, in seconds since 1970.
    """

    key: str
    name: str
    images: int
    height: int
    width: int
    bytes: int
    used: float


@dataclass(frozen=True)
class Slot:
    """The place of one entry.

    Attributes:
        folder: Folder of all entries.
        key: Name of its files.
        height: Height of the images.
        width: Width of the images.
    """

    folder: Path
    key: str
    height: int
    width: int

    @classmethod
    def of(cls, cache: Path, key: str, height: int, width: int) -> Slot:
        """The place of an entry in a cache folder."""
        return cls(cache / _FOLDER, key, height, width)

    @property
    def lock(self) -> Path:
        """The file whose lock a writer holds."""
        return self._path("lock")

    def _path(self, ending: str) -> Path:
        return self.folder / f"{self.key}.{ending}"

    def load(self) -> tuple[Tensor, Manifest] | None:
        """The entry, or None if it is missing, damaged or not ours. No image is read; it counts as used."""
        found = self.look()
        if found is not None:
            with suppress(OSError):
                os.utime(self._path("json"))
        return found

    def look(self) -> tuple[Tensor, Manifest] | None:
        """As :meth:`load`, without counting as a use."""
        try:
            index = DECODED.read(read_json(self._path("json")), self._path("json"))
            manifest = self._path("manifest.json")
            if any(index.get(name) != value for name, value in self._claims().items()):
                return None
            if index["manifest_sha256"] != hashlib.sha256(manifest.read_bytes()).hexdigest():
                return None
            about = read_manifest(manifest)
            handle = os.open(self._path("images"), os.O_RDONLY)
            try:
                count = len(about.usable)
                if os.fstat(handle).st_size != count * 3 * self.height * self.width:
                    return None
                images = map_images(handle, count, self.height, self.width)
            finally:
                os.close(handle)
        except (RatpError, OSError, KeyError, TypeError, ValueError):
            return None
        return images, about

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps other writers of the entry waiting; clears away what a killed one left behind.

        Raises:
            OSError: If the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with hold(self.lock):  # without locks, writers do double work, with the same result
            for path in _files(self.folder, self.key):
                if path.name.startswith((".", f"{self.key}.part-")):
                    path.unlink(missing_ok=True)
            yield

    def make_room(self, needed: int) -> None:
        """Drops the least recently used entries if the disk has too little room left.

        Raises:
            OSError, RunDirectoryError: If that does not make enough.
        """
        missing = needed - shutil.disk_usage(self.folder).free
        if missing > 0:
            held = sum(entry.bytes for entry in _groups(self.folder))
            evict(self.folder.parent, max(0, held - missing))
            if shutil.disk_usage(self.folder).free < needed:
                raise OSError(ENOSPC, os.strerror(ENOSPC))

    @contextmanager
    def part(self) -> Iterator[Part]:
        """A new file beside the entry, which goes at the end of the block unless it is published.

        Raises:
            OSError: If the file cannot be written.
        """
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=f"{self.key}.part-")
        try:
            yield Part(handle, Path(name))
        finally:
            Path(name).unlink(missing_ok=True)
            os.close(handle)

    def publish(self, part: Part, manifest: Manifest) -> None:
        """Makes a file of images, flushed to the disk, the valid entry.

        Raises:
            OSError, RunDirectoryError: If that cannot be done; then there is no entry.
        """
        try:
            os.fchmod(part.handle, 0o644)
            part.path.replace(self._path("images"))
            write_manifest(self._path("manifest.json"), manifest)
            sha256 = hashlib.sha256(self._path("manifest.json").read_bytes()).hexdigest()
            about = {"name": manifest.name, "images": len(manifest.usable), "manifest_sha256": sha256}
            write_json(self._path("json"), DECODED.marked({**self._claims(), **about}))
        except BaseException:
            _remove(self.folder, self.key)
            raise

    def _claims(self) -> dict[str, object]:
        return {"key": self.key, "height": self.height, "width": self.width}


class Part(NamedTuple):
    """A file that is being written."""

    handle: int
    path: Path


def _key(path: Path) -> str:
    return path.name.lstrip(".").partition(".")[0]


def _files(folder: Path, key: str) -> list[Path]:
    """All files of an entry but its lock, the one that makes it valid first."""
    files = [path for path in folder.iterdir() if _key(path) == key and path.suffix != ".lock"]
    return sorted(files, key=lambda path: path.name != f"{key}.json")


def _remove(folder: Path, key: str) -> None:
    for path in _files(folder, key):
        path.unlink(missing_ok=True)


def _groups(folder: Path) -> list[CacheEntry]:
    """What there is by key, valid or not."""
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
    """The decoded domains in a cache folder, the least recently used first."""
    return sorted((entry for entry in _groups(cache / _FOLDER) if entry.images), key=lambda e: (e.used, e.key))


def damaged_entries(cache: Path) -> list[CacheEntry]:
    """What in a cache folder is of no use: entries that are damaged, and what was left behind half-written."""
    found = []
    for entry in _groups(cache / _FOLDER):
        slot = Slot.of(cache, entry.key, entry.height, entry.width)
        if slot.look() is None and not is_locked(slot.lock):
            found.append(entry)
    return found


def evict(cache: Path, keep_bytes: int) -> list[CacheEntry]:
    """Removes least recently used entries until the rest takes no more than ``keep_bytes``.

    An entry that is being written stays. A process that has an entry open keeps its images. What was left
    behind half-written goes first.

    Args:
        cache: The cache folder.
        keep_bytes: What may stay.

    Returns:
        What was removed.

    Raises:
        RunDirectoryError: If the folder cannot be written.
    """
    folder = cache / _FOLDER
    entries = sorted(_groups(folder), key=lambda entry: (entry.images > 0, entry.used, entry.key))
    held, removed = sum(entry.bytes for entry in entries), []
    for entry in entries:
        if held <= keep_bytes and entry.images:
            break
        try:
            lock = hold_if_free(folder / f"{entry.key}.lock")
            if lock is not None:
                with lock:
                    _remove(folder, entry.key)
                    held -= entry.bytes
                    removed.append(entry)
        except OSError as error:
            raise RunDirectoryError(f"cannot remove files from {folder}: {error.strerror or error}.") from error
    return removed
