"""A domain of image files as one tensor that is decoded once and then mapped from the cache.

Opening it a second time reads a list of the files and no image. Images that cannot be decoded stop the opening
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
from typing import Literal, get_args

import torch
from torch import Tensor

from ratp.data.cache import cache_folder
from ratp.data.decoded_cache import Slot
from ratp.data.image_file import close_gaps, flushed_meanwhile, free_memory, map_images, memory_file
from ratp.data.listing import Unreadable, UnreadableFolder, escaped
from ratp.data.manifest import (
    Manifest,
    describe_left_out,
    describe_refused,
    describe_useless,
    make_manifest,
    renewed,
)
from ratp.data.parallel import Progress, decode_all
from ratp.data.tree import ImageTree, identity, open_tree, remarks_on
from ratp.environment import package_version
from ratp.errors import ConfigError, RatpError, RunDirectoryError, unknown

OnBad = Literal["stop", "skip"]

RECIPE = 2  # one more for every change that changes a pixel
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True, eq=False)
class DecodedDomain:
    """A domain whose images have all been decoded.

    Attributes:
        name: Name of the folder or archive.
        images: uint8 tensor of shape (N, 3, height, width), mapped from the cache: memory is needed for what is
            used, and what is written to it stays in this process.
        class_names: Names of the classes, sorted; None if the domain is flat.
        class_index: int64 tensor of shape (N,), indices into ``class_names``; None if the domain is flat.
        manifest: All its files, usable or not.
        skipped: Files left out, each with the reason.
        notes: What the user should know.
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
    """The images of a folder or archive, decoded and resized, from the cache if they are there.

    Args:
        path: Folder or ``.zip`` of the domain.
        size: Side, or height and width, of the images.
        cache: Cache folder; :func:`~ratp.data.cache.cache_folder` if None. If it cannot be written, the images
            are kept in memory, and a note says so.
        on_bad: What to do if there are files that cannot be decoded: ``"stop"`` or ``"skip"`` them.
        labelled: Whether folders are classes; if not, the domain is flat, however deep its images lie.
        sure: Whether it is known to be one domain, even if its classes look like domains.
        workers: Processes to decode in; by default as many as there are cores.
        progress: Called with the number of files decoded and that of all; not called if the images are cached.

    Raises:
        RatpError: If the domain cannot be read in full, has bad files and ``on_bad`` is ``"stop"``, has no usable
            image, or fits neither into the cache nor into memory.
    """
    if on_bad not in get_args(OnBad):
        raise ConfigError(unknown("way to deal with bad images", on_bad, get_args(OnBad)))
    height, width = _checked(size)
    tree = open_tree(path, labelled=labelled, sure=sure)
    _refuse_closed_folders(tree)
    job = _Job(tree, height, width, on_bad, partial(open_tree, path, labelled=labelled, sure=sure), workers, progress)
    notes: tuple[str, ...] = ()
    try:
        slot = Slot.of(_folder(cache), job.key(), height, width)
        images, manifest = job.accepted(slot.load()) or job.decode_into(slot)
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
    """Stops at folders that cannot be read, bad images or not: a whole class may lie in one."""
    closed = [item for item in tree.unreadable if isinstance(item, UnreadableFolder)]
    if closed:
        which = "\n".join(f"  {escaped(name)} {reason}" for name, reason in closed)
        raise RatpError(
            f"{tree.path} cannot be read in full:\n{which}\n"
            "A whole class may be missing: make what is named readable, or move it out of the domain."
        )


def _domain(tree: ImageTree, images: Tensor, manifest: Manifest, notes: tuple[str, ...]) -> DecodedDomain:
    labels = None
    if tree.classes is not None:
        index = {name: k for k, name in enumerate(tree.classes)}
        labels = torch.tensor([index[file.class_name or ""] for file in manifest.usable])
    left_out = [describe_left_out(manifest.bad)] if manifest.bad else []
    notes = (*notes, *(f"{tree.name}: {told}" for told in (*left_out, *remarks_on(tree))))
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
    """A domain to be decoded, and how."""

    tree: ImageTree
    height: int
    width: int
    on_bad: OnBad
    open_again: Callable[[], ImageTree]
    workers: int | None
    progress: Progress | None

    def key(self) -> str:
        """A name for the pixels. A folder's place is part of it: sizes and times of files may agree by chance."""
        place = None if self.tree.is_archive else str(self.tree.path.resolve())
        parts = [RECIPE, package_version("pillow"), identity(self.tree), place, self.height, self.width]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def accepted(self, found: tuple[Tensor, Manifest] | None) -> tuple[Tensor, Manifest] | None:
        """What was found in the cache, if it has the files of the domain; else None.

        Raises:
            RatpError: If it has bad files, and they are to stop the opening.
        """
        if found is None:
            return None
        images, manifest = found[0], renewed(found[1], self.tree)
        if manifest is None:
            return None
        self._check(manifest)
        return images, manifest

    def decode_into(self, slot: Slot) -> tuple[Tensor, Manifest]:
        """Decodes all images into the cache, unless another process has just done that.

        Raises:
            _NoCacheError: If the cache cannot be written.
        """
        try:
            with slot.writing():
                if found := self.accepted(slot.load()):
                    return found
                slot.make_room(self._bytes())
                with slot.part() as part:
                    with flushed_meanwhile(part.handle):
                        images, manifest = self._decode(part.handle)
                    if self._is_lasting(manifest):
                        slot.publish(part, manifest)
                return images, manifest
        except (OSError, RunDirectoryError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise _NoCacheError(f"the cache folder {slot.folder} cannot be used ({reason})") from error

    def decode_into_memory(self, why: _NoCacheError) -> tuple[Tensor, Manifest]:
        """Decodes all images into memory.

        Raises:
            RatpError: If there is too little.
        """
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

    def _is_lasting(self, manifest: Manifest) -> bool:
        """Whether the outcome will be the same next time: a file that cannot be read today may be tomorrow."""
        return all(file.sha256 is not None for file in manifest.files)

    def _bytes(self) -> int:
        return len(self.tree.files) * 3 * self.height * self.width

    def _decode(self, handle: int) -> tuple[Tensor, Manifest]:
        """Decodes all images into an open file."""
        size = self.height, self.width
        outcomes = decode_all(self.tree, size, workers=self.workers, progress=self.progress, target=handle)
        if identity(self.open_again()) != identity(self.tree):
            raise RatpError(f"{self.tree.path} has changed while it was read. Let that finish, and start again.")
        manifest = make_manifest(self.tree, outcomes)
        self._check(manifest)
        close_gaps(handle, [k for k, outcome in enumerate(outcomes) if outcome.error is None], 3 * size[0] * size[1])
        return map_images(handle, len(manifest.usable), *size), manifest

    def _check(self, manifest: Manifest) -> None:
        path, bad = self.tree.path, manifest.bad
        if bad and self.on_bad == "stop":
            raise RatpError(f"{path} has {describe_refused(bad, len(manifest.files))}")
        if not manifest.usable:
            raise RatpError(f"{path} has {describe_useless(bad, len(manifest.files))}")
