"""Images in any files, folders and zips that the user names, decoded in parts and not cached."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ratp.data.decode.parallel import Progress, decode_all
from ratp.data.decode.pixel_file import close_gaps, map_images
from ratp.data.read.folder import list_folder
from ratp.data.read.listing import Unreadable, quoted
from ratp.data.read.tree import ImageFile, ImageTree, list_path
from ratp.errors import ConfigError, Note, RatpError

if TYPE_CHECKING:
    from torch import Tensor


class DecodedPart(NamedTuple):
    """A part of the images, decoded."""

    images: Tensor  # uint8 tensor of shape (n, 3, height, width): those that can be used, in their order
    names: tuple[str, ...]  # the names of their files
    bad: tuple[Unreadable, ...]  # the unusable files, each with the reason


def list_images(paths: Sequence[Path]) -> ImageTree:
    """Lists images in files, folders and zips, in the order of the paths and by name, without reading any.

    A folder stands for all images below it, a ``.zip`` for all in it, any other file for itself, whatever its ending.
    File names begin with the path that was given.
    """
    files: list[ImageFile] = []
    unsupported: list[str] = []
    unreadable: list[Unreadable] = []
    readers: dict[str, tuple[Callable[[str], bytes], str]] = {}
    problems: list[str] = [] if paths else ["no images are given: name files, folders or zips."]
    places: set[tuple[str, str]] = set()
    again: list[str] = []
    for path in paths:
        try:
            listing = list_path(path, "Name files, folders or zips of images.")
        except RatpError as error:
            problems.append(str(error))
            continue
        for name, size, stamp in listing.files:
            full = str(path / name)
            place = (os.path.realpath(path), name) if path.is_file() else (os.path.realpath(full), "")
            if place in places:
                again.append(full)
                continue
            places.add(place)
            files.append(ImageFile(full, None, size, stamp, full))
            readers[full] = listing.read, name
        unsupported += [str(path / name) for name in listing.unsupported]
        unreadable += [Unreadable(str(path / name), reason) for name, reason in listing.unreadable]
    if problems:
        raise ConfigError(problems)
    if again:
        warnings.warn(f"named more than once, read once: {quoted(again)}", Note, stacklevel=3)

    def read(place: str) -> bytes:
        reader, name = readers[place]
        return reader(name)

    return ImageTree(paths[0], paths[0].name, None, tuple(files), (), tuple(unsupported), tuple(unreadable), _read=read)


def is_given(path: Path, paths: Iterable[Path]) -> bool:
    """Whether a file is one of ``paths`` or an image in one that is a folder."""
    if not path.is_file():
        return False
    about = path.stat()
    for given in paths:
        for place in (given / file.name for file in list_folder(given).files) if given.is_dir() else (given,):
            with suppress(OSError):
                if os.path.samestat(place.stat(), about):
                    return True
    return False


def decode_part(
    tree: ImageTree, start: int, stop: int, size: tuple[int, int], progress: Progress | None = None
) -> DecodedPart:
    """Decodes some of the images into a temporary file that exists as long as they are used."""
    import torch

    files = tree.files[start:stop]
    report = None if progress is None else lambda done, _: progress(start + done, len(tree.files))
    try:
        with tempfile.TemporaryFile() as file:
            outcomes = decode_all(replace(tree, files=files), size, progress=report, target=file.fileno())
            good = [row for row, outcome in enumerate(outcomes) if outcome.error is None]
            close_gaps(file.fileno(), good, 3 * size[0] * size[1])
            images = map_images(file.fileno(), len(good), *size) if good else torch.empty((0, 3, *size)).byte()
    except OSError as error:
        raise RatpError(
            f"cannot keep {len(files):,} decoded images in {tempfile.gettempdir()}: {error.strerror or error}. "
            "Set TMPDIR to a folder with more room, or name fewer images."
        ) from error
    pairs = zip(files, outcomes, strict=True)
    bad = tuple(Unreadable(file.name, outcome.error) for file, outcome in pairs if outcome.error is not None)
    return DecodedPart(images, tuple(files[row].name for row in good), bad)
