"""The domains in a folder: which of the folders and zips below it are one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ratp.data.folder import list_folder
from ratp.data.layout import LEVELS, Parts, domains_among, inside, places_of
from ratp.data.listing import UnreadableFolder, ending_of, is_clutter, is_image_name
from ratp.data.place import DOWNLOADS
from ratp.errors import RatpError

_ZIP = ".zip"


def find_domains(path: Path) -> tuple[Path, ...]:
    """The path itself if it is a domain, else the domains in it, up to two levels of folders below it.

    A zip is a domain, and so is a folder with images in it. A folder of folders is one of domains if there are zips in
    it or in those, if it holds nothing but one more folder, or the folder ``downloads``, or if :mod:`ratp.data.layout`
    takes its folders for domains; else it is a domain of classes. A folder that cannot be read and might be a domain
    counts as one, for whoever opens it to say so. What has no images below it is passed over, and so are downloads.

    Raises:
        RatpError: If the path does not exist or cannot be read, or nothing in it is a domain.
    """
    if not path.exists():
        raise RatpError(f"{path} does not exist. Give the folder or the .zip of a domain, or a folder of domains.")
    if not path.is_dir():
        return (path,)
    listing = list_folder(path)
    images = places_of(file.name for file in listing.files)
    zips = places_of(f"{name}/" for name in listing.ignored if ending_of(name) == _ZIP)  # as if files lay in them
    closed = places_of(f"{item.name}/" for item in listing.unreadable if isinstance(item, UnreadableFolder))
    found = _domains(_Folder(images, zips, closed), LEVELS)
    if not found:
        raise RatpError(
            f"{path} holds no domains: expected zips, or folders with class/image below them, at most "
            f"{LEVELS} folders deep."
        )
    return tuple(sorted(path.joinpath(*parts) for parts in found))


@dataclass(frozen=True)
class _Folder:
    """What lies below a folder, by paths of which the empty one is its own.

    Attributes:
        images: The folders with images right in them.
        zips: The zips.
        closed: The folders that cannot be read.
    """

    images: frozenset[Parts]
    zips: frozenset[Parts]
    closed: frozenset[Parts]

    @property
    def is_flat(self) -> bool:
        """Whether images lie right in it."""
        return () in self.images

    @property
    def own_zips(self) -> frozenset[Parts]:
        """The zips right in it."""
        return frozenset(parts for parts in self.zips if len(parts) == 1)

    @property
    def folders(self) -> dict[str, _Folder]:
        """The folders in it, by name."""
        parts = [inside(found) for found in (self.images, self.zips - self.own_zips, self.closed)]
        names = sorted({name for part in parts for name in part})
        return {name: _Folder(*(part.get(name, frozenset()) for part in parts)) for name in names}

    @property
    def holds_domains(self) -> bool:
        """Whether the folders in it are domains or folders of domains, and no classes."""
        filled = {name: folder for name, folder in self.folders.items() if folder.images or folder.zips}
        if any((folder.own_zips or name == DOWNLOADS) and not folder.is_flat for name, folder in filled.items()):
            return True
        is_one = len(filled) > 1 or any(folder.is_flat for folder in filled.values())
        return not is_one or bool(domains_among(self.images))


def _domains(folder: _Folder, levels: int) -> list[Parts]:
    """The paths of the domains in a folder, or its own if it is one."""
    is_one = () in folder.closed or (folder.is_flat and not folder.own_zips)
    if is_one or not levels or not (folder.own_zips or folder.holds_domains):
        return [()] if folder.images or folder.closed else []
    below = {name: _domains(sub, levels - 1) for name, sub in folder.folders.items() if name != DOWNLOADS}
    return [*folder.own_zips, *((name, *parts) for name, found in below.items() for parts in found)]


def classes_in(folder: Path) -> tuple[str, ...]:
    """Names of the folders of images that make a folder surely one domain, not one of domains; none if they do not.

    They hold images and no folders of images. No more is read than it takes to see that.
    """
    content = _content(folder)
    if content.has_images or content.zips:
        return ()
    labels = {label.name: _content(label) for label in content.folders}
    if any(label.zips or any(map(_has_images_below, label.folders)) for label in labels.values()):
        return ()
    return tuple(name for name, label in labels.items() if label.has_images)


class _Content(NamedTuple):
    """What lies in a folder itself."""

    has_images: bool
    zips: tuple[str, ...]
    folders: tuple[Path, ...]


def _content(folder: Path) -> _Content:
    try:
        with os.scandir(folder) as entries:
            listed = sorted((entry for entry in entries if not is_clutter(entry.name)), key=lambda entry: entry.name)
    except OSError:  # whoever opens it says so
        return _Content(False, (), ())
    files = [entry.name for entry in listed if not entry.is_dir()]
    return _Content(
        any(map(is_image_name, files)),
        tuple(name for name in files if ending_of(name) == _ZIP),
        tuple(folder / entry.name for entry in listed if entry.is_dir()),
    )


def _has_images_below(folder: Path) -> bool:
    if folder.is_symlink():
        return False  # it may lead back to where we come from
    return any(is_image_name(name) for _, _, names in os.walk(folder) for name in names if not is_clutter(name))
