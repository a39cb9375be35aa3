"""Opens a domain of image files as one tensor, decoded once and then mapped from the cache.

Opening it again reads the list of files but no image. Images that cannot be decoded stop the opening
or are left out by name; none is ever replaced by another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from ratp._core.environment import package_version
from ratp.data.cache.folder import cache_folder
from ratp.data.cache.manifest import (
    Manifest,
    describe_all_bad,
    describe_refused,
    describe_skipped,
    make_manifest,
    updated_manifest,
)
from ratp.data.cache.store import Slot
from ratp.data.decode.parallel import Progress, decode_all
from ratp.data.decode.pixel_file import close_gaps, flushed_meanwhile, free_memory, map_images, memory_file
from ratp.data.read.listing import Unreadable, UnreadableFolder, escaped
from ratp.data.read.tree import ImageTree, identity, open_tree, remarks_on
from ratp.errors import ConfigError, RatpError, RunDirectoryError, unknown

if TYPE_CHECKING:
    from torch import Tensor

OnBad = Literal["stop", "skip"]

RECIPE = 2  # increase it with every change that affects a pixel
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True, eq=False)
class DecodedDomain:
    """A domain whose images have all been decoded.

    Attributes:
        images: uint8 tensor of shape (N, 3, height, width), mapped from the cache: only used parts take memory, and
            changes stay in this process.
        class_names: Names of the classes, sorted; None if the domain is flat.
        class_index: int64 tensor of shape (N,), indices into ``class_names``; None if the domain is flat.
        skipped: Files left out, each with the reason.
    """

    name: str
    images: Tensor
    class_names: tuple[str, ...] | None
    class_index: Tensor | None
    manifest: Manifest
    skipped: tuple[Unreadable, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)


def open_decoded(
    path: Path,
    size: int | tuple[int, int],
    *,
    cache: Path | None = None,
    on_bad: OnBad = "stop",
    labelled: bool = True,
    sure: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> DecodedDomain:
    """Opens the images of a folder or archive, decoded and resized, from the cache if possible.

    Args:
        path: Folder or ``.zip`` of the domain.
        size: Side, or height and width, of the images.
        cache: Cache folder; :func:`~ratp.data.cache.folder.cache_folder` if None. If it cannot be written, the images
            are kept in memory, and a note says so.
        on_bad: What to do if there are files that cannot be decoded: ``"stop"`` or ``"skip"`` them.
        labelled: Whether folders are classes; if not, the domain is flat, at whatever depth its images are.
        sure: Whether it is known to be one domain, even if its classes look like domains.
        workers: Processes to decode in; by default as many as there are cores.
        progress: Called with the number of files decoded and that of all; not called if the images are cached.
    """
    if on_bad not in get_args(OnBad):
        raise ConfigError(unknown("way to handle bad images", on_bad, get_args(OnBad)))
    height, width = _checked(size)
    tree = open_tree(path, labelled=labelled, sure=sure)
    _refuse_closed_folders(tree)
    job = _Job(tree, height, width, on_bad, partial(open_tree, path, labelled=labelled, sure=sure), workers, progress)
    try:
        slot = Slot.of(_folder(cache), job.key(), height, width)
        found = job.accepted(slot.load())
        images, manifest, notes = (*found, ()) if found else job.decode_into(slot)
    except _NoCacheError as error:
        images, manifest = job.decode_into_memory(error)
        notes = (f"{error}: the images of {job.tree.name} are kept in memory, and decoded again the next time.",)
    return _domain(job.tree, images, manifest, notes)


def _checked(size: int | tuple[int, int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1:
        raise ConfigError(f"images need at least one pixel: the size must be 1 or more, got {size}.")
    return height, width


def _refuse_closed_folders(tree: ImageTree) -> None:
    """Refuses unreadable folders even if bad images are skipped, because a whole class may be missing."""
    closed = [item for item in tree.unreadable if isinstance(item, UnreadableFolder)]
    if closed:
        which = "\n".join(f"  {escaped(name)} {reason}" for name, reason in closed)
        raise RatpError(
            f"{tree.path} cannot be read in full:\n{which}\n"
            "A whole class may be missing: make these folders readable, or move them out of the domain."
        )


def _domain(tree: ImageTree, images: Tensor, manifest: Manifest, notes: tuple[str, ...]) -> DecodedDomain:
    import torch

    labels = None
    if tree.classes is not None:
        index = {name: k for k, name in enumerate(tree.classes)}
        labels = torch.tensor([index[file.class_name or ""] for file in manifest.usable])
    left_out = [describe_skipped(manifest.bad)] if manifest.bad else []
    notes = (*notes, *(f"{tree.name}: {remark}" for remark in (*left_out, *remarks_on(tree))))
    return DecodedDomain(tree.name, images, tree.classes, labels, manifest, manifest.bad, notes)


class _NoCacheError(Exception):
    """The cache cannot be used; the message says why."""


def _folder(cache: Path | None) -> Path:
    try:
        return cache_folder() if cache is None else cache
    except RatpError as error:
        raise _NoCacheError(str(error).removesuffix(".")) from error


@dataclass(frozen=True)
class _Job:
    """A domain to decode, with all options."""

    tree: ImageTree
    height: int
    width: int
    on_bad: OnBad
    open_again: Callable[[], ImageTree]
    workers: int | None
    progress: Progress | None

    def key(self) -> str:
        """Computes the cache key. It includes a folder's path: sizes and times of other files may agree by chance."""
        place = None if self.tree.is_archive else str(self.tree.path.resolve())
        parts = [RECIPE, package_version("pillow"), identity(self.tree), place, self.height, self.width]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def accepted(self, found: tuple[Tensor, Manifest] | None) -> tuple[Tensor, Manifest] | None:
        """Checks what was found in the cache; None if the files of the domain have changed."""
        if found is None:
            return None
        images, manifest = found[0], updated_manifest(found[1], self.tree)
        if manifest is None:
            return None
        self._check(manifest)
        return images, manifest

    def decode_into(self, slot: Slot) -> tuple[Tensor, Manifest, tuple[str, ...]]:
        """Decodes all images into the cache, unless another process has just done that; notes what was damaged."""
        try:
            with slot.writing():
                if found := self.accepted(slot.load()):
                    return *found, ()
                damage = slot.problem()
                slot.make_room(self._bytes())
                with slot.part() as part:
                    with flushed_meanwhile(part.handle):
                        images, manifest = self._decode(part.handle)
                    # A file that cannot be read today may be readable tomorrow.
                    if all(file.sha256 is not None for file in manifest.files):
                        slot.publish(part, manifest)
                return images, manifest, () if damage is None else (self._decoded_anew(*damage),)
        except (OSError, RunDirectoryError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise _NoCacheError(f"the cache folder {slot.folder} cannot be used ({reason})") from error

    def _decoded_anew(self, file: Path, problem: str) -> str:
        return f"{self.tree.name}: its images were decoded again, as the cached file {file.name} {problem}."

    def decode_into_memory(self, why: _NoCacheError) -> tuple[Tensor, Manifest]:
        """Decodes all images into memory."""
        needed, free = self._bytes(), free_memory()
        if needed > _SHARE_OF_MEMORY * free:
            raise RatpError(
                f"{why}, and memory is too small for the images of {self.tree.path}: they take "
                f"{needed / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB are free. Set RATP_CACHE to a folder you may "
                "write to, with room left."
            )
        handle = memory_file()
        try:
            return self._decode(handle)
        except OSError as error:
            raise RatpError(f"{why}, and memory cannot take them either ({error.strerror or error}).") from error
        finally:
            os.close(handle)

    def _bytes(self) -> int:
        return len(self.tree.files) * 3 * self.height * self.width

    def _decode(self, handle: int) -> tuple[Tensor, Manifest]:
        """Decodes all images into an open file."""
        size = self.height, self.width
        outcomes = decode_all(self.tree, size, workers=self.workers, progress=self.progress, target=handle)
        if identity(self.open_again()) != identity(self.tree):
            raise RatpError(
                f"{self.tree.path} changed while it was being read. Wait until nothing writes to it, and start again."
            )
        manifest = make_manifest(self.tree, outcomes)
        self._check(manifest)
        close_gaps(handle, [k for k, outcome in enumerate(outcomes) if outcome.error is None], 3 * size[0] * size[1])
        return map_images(handle, len(manifest.usable), *size), manifest

    def _check(self, manifest: Manifest) -> None:
        path, bad = self.tree.path, manifest.bad
        if bad and self.on_bad == "stop":
            raise RatpError(f"{path} has {describe_refused(bad, len(manifest.files))}")
        if not manifest.usable:
            raise RatpError(f"{path} has {describe_all_bad(bad, len(manifest.files))}")
