"""The cache of decoded images: complete entries of three files each, of which the least recently used go first.

``KEY.images`` contains only pixels, so that it can be mapped. ``KEY.manifest.json`` describes
them, and ``KEY.json``, written last, makes the entry valid. The key changes with whatever changes the pixels, so
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
from typing import TYPE_CHECKING, NamedTuple

from ratp._core.files import DECODED, read_json, write_json
from ratp._core.locks import acquire, is_locked, try_acquire
from ratp.data.cache.manifest import Manifest, manifest_to_json, read_manifest
from ratp.data.decode.pixel_file import map_images
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

    def load(self, *, count_as_use: bool = True) -> tuple[Tensor, Manifest] | None:
        """Maps the entry without reading an image; None if it is missing, damaged or not ours."""
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
        if count_as_use:
            with suppress(OSError):
                os.utime(self._path("json"))
        return images, about

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
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=f"{self.key}.part-")
        try:
            yield Part(handle, Path(name))
        finally:
            Path(name).unlink(missing_ok=True)
            os.close(handle)

    def publish(self, part: Part, manifest: Manifest) -> None:
        """Makes a flushed file of images the valid entry."""
        try:
            os.fchmod(part.handle, 0o644)
            part.path.replace(self._path("images"))
            write_json(self._path("manifest.json"), manifest_to_json(manifest))
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


def damaged_entries(cache: Path) -> list[CacheEntry]:
    """Lists the useless entries of a cache folder: damaged ones and leftovers of killed writers."""
    found = []
    for entry in _groups(cache / _FOLDER):
        slot = Slot.of(cache, entry.key, entry.height, entry.width)
        if slot.load(count_as_use=False) is None and not is_locked(slot.lock):
            found.append(entry)
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
