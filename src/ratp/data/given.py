"""Images named by paths, whatever lies where: files, folders and zips, decoded some at a time and not kept."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ratp.data.archive import list_archive
from ratp.data.folder import list_folder, read_file
from ratp.data.image_file import close_gaps, map_images
from ratp.data.listing import IMAGE_ENDINGS, FoundFile, Listing, Unreadable, quoted
from ratp.data.parallel import Progress, decode_all
from ratp.data.tree import ImageFile, ImageTree
from ratp.errors import ConfigError, RatpError


class DecodedPart(NamedTuple):
    """Some of the images, decoded.

    Attributes:
        images: uint8 tensor of shape (n, 3, height, width): those that can be used, in their order.
        names: The names of their files.
        bad: The others, each with the reason.
    """

    images: Tensor
    names: tuple[str, ...]
    bad: tuple[Unreadable, ...]


def given_images(paths: Sequence[Path]) -> ImageTree:
    """The images that paths lead to, without reading any: in the order of the paths, those of each by their names.

    A folder stands for all images below it, a ``.zip`` for all in it, any other file for itself, whatever its ending.
    The names of files begin with the path that was given.

    Raises:
        ConfigError: With every path that leads to no image.
    """
    files: list[ImageFile] = []
    passed_over: list[str] = []
    unreadable: list[Unreadable] = []
    readers: dict[str, tuple[Callable[[str], bytes], str]] = {}
    problems: list[str] = [] if paths else ["no images are given: name files, folders or zips."]
    for path in paths:
        try:
            listing = _listing(path)
        except RatpError as error:
            problems.append(str(error))
            continue
        for name, size, stamp in listing.files:
            full = str(path / name)
            files.append(ImageFile(full, None, size, stamp, full))
            readers[full] = listing.read, name
        passed_over += [str(path / name) for name in listing.passed_over]
        unreadable += [Unreadable(str(path / name), reason) for name, reason in listing.unreadable]
    if problems:
        raise ConfigError(problems)

    def read(place: str) -> bytes:
        reader, name = readers[place]
        return reader(name)

    return ImageTree(paths[0], paths[0].name, None, tuple(files), (), tuple(passed_over), tuple(unreadable), _read=read)


def is_given(path: Path, paths: Iterable[Path]) -> bool:
    """Whether a file is one of those that paths lead to: one of them, or an image in one that is a folder."""
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
    """Decodes some of the images; the pixels lie in a file of the system's temporary folder as long as they are used.

    Args:
        tree: All images.
        start: The first of them.
        stop: The first one after them.
        size: Height and width to resize to.
        progress: Called with the number of files decoded, those before ``start`` included, and that of all.

    Raises:
        RatpError: If there is no room for the pixels, or a decoding process ends unexpectedly.
    """
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


def _listing(path: Path) -> Listing:
    """What lies where a path leads; a file alone has an empty name below itself.

    Raises:
        RatpError: If it is no image and has none.
    """
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RatpError(f"{path} does not exist. Name files, folders or zips of images.") from error
    except OSError as error:
        raise RatpError(f"cannot read {path}: {error.strerror or error}.") from error
    is_folder = stat.S_ISDIR(about.st_mode)
    if not is_folder and not stat.S_ISREG(about.st_mode):
        raise RatpError(f"{path} is a pipe or a device, not a file. Name files, folders or zips of images.")
    if not is_folder and path.suffix.lower() != ".zip":
        alone = FoundFile("", about.st_size, about.st_mtime_ns)
        return Listing((alone,), (), (), (), lambda name: read_file(path / name))
    listing = list_folder(path) if is_folder else list_archive(path)
    if not listing.files:
        told = [f"{path} has no images: none with one of the endings {' '.join(sorted(IMAGE_ENDINGS))}."]
        told += [f"{name or path.name} {reason}." for name, reason in listing.unreadable[:5]]
        if listing.ignored:
            told.append(f"It has {len(listing.ignored):,} other file(s): {quoted(listing.ignored)}.")
        raise RatpError(" ".join(told))
    return listing
