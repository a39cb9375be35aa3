"""Decides which folders and zips below a folder are domains and which are classes.

It decides by names alone. The domains of a stream share classes, so if most folders contain two or more folders that
other folders contain too, all are domains, unless each of these also contains images directly. All other folders are
classes, and folders within a class belong to it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ratp.data.catalogue.locate import DOWNLOADS
from ratp.data.read.folder import list_folder
from ratp.data.read.listing import UnreadableFolder, ending_of, is_clutter, is_image_name
from ratp.errors import RatpError

Parts = tuple[str, ...]  # the path of a folder below another, part by part

_ZIP = ".zip"
LEVELS = 2  # of folders above a domain: FOLDER/DATASET/DOMAIN
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})  # are not classes
_IN_COMMON = 2  # classes: fewer than two are nothing to tell apart, and many classes keep theirs in a folder "images"


def places_of(names: Iterable[str]) -> frozenset[Parts]:
    """Returns the folders that contain files of these names."""
    return frozenset(tuple(folder.split("/")) if folder else () for folder in {n.rpartition("/")[0] for n in names})


def inside(places: Collection[Parts]) -> dict[str, frozenset[Parts]]:
    """Groups places by the folder they begin with."""
    found: dict[str, set[Parts]] = {}
    for place in places:
        if place:
            found.setdefault(place[0], set()).add(place[1:])
    return {name: frozenset(found[name]) for name in sorted(found)}


def domains_among(places: Collection[Parts], levels: int = LEVELS) -> list[Parts]:
    """Finds the folders that are domains; none if the folders are classes."""
    below = inside(places)
    held = {name: [n for n in inside(within) if n.lower() not in _SPLITS] for name, within in below.items()}
    shared = Counter(folder for folders in held.values() for folder in folders)
    alike = [name for name, folders in held.items() if sum(shared[folder] > 1 for folder in folders) >= _IN_COMMON]
    if 2 * len(alike) > len(below) and any(() not in below[name] for name in alike):
        return [(name,) for name in below]
    if levels == 1:
        return []
    deeper = {name: domains_among(within, levels - 1) for name, within in below.items()}
    return [(name, *domain) for name, found in deeper.items() for domain in found] if all(deeper.values()) else []


def find_domains(path: Path) -> tuple[Path, ...]:
    """Returns the path itself if it is a domain, else the domains at most two folders below it.

    A zip is a domain, and so is a folder with images directly in it. A folder of folders contains domains if it or they
    contain zips, if it contains only one folder or a folder ``downloads``, or if :func:`domains_among` finds some;
    otherwise it is one domain with classes. An unreadable folder counts as a domain, so that opening it reports the
    error. Folders without images and downloads are skipped.
    """
    if not path.exists():
        raise RatpError(f"{path} does not exist. Give the folder or the .zip of a domain, or a folder of domains.")
    if not path.is_dir():
        return (path,)
    listing = list_folder(path)
    images = places_of(file.name for file in listing.files)
    zips = places_of(f"{name}/" for name in listing.ignored if ending_of(name) == _ZIP)  # as if they contained files
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
    """The contents of a folder at any depth, by paths relative to it; the empty path is the folder itself."""

    images: frozenset[Parts]
    zips: frozenset[Parts]
    closed: frozenset[Parts]

    @property
    def is_flat(self) -> bool:
        """Whether it contains images directly."""
        return () in self.images

    @property
    def own_zips(self) -> frozenset[Parts]:
        """The zips directly in it."""
        return frozenset(parts for parts in self.zips if len(parts) == 1)

    @property
    def folders(self) -> dict[str, _Folder]:
        """The folders in it, by name."""
        parts = [inside(found) for found in (self.images, self.zips - self.own_zips, self.closed)]
        names = sorted({name for part in parts for name in part})
        return {name: _Folder(*(part.get(name, frozenset()) for part in parts)) for name in names}

    @property
    def holds_domains(self) -> bool:
        """Whether the folders in it are domains or folders of domains, not classes."""
        filled = {name: folder for name, folder in self.folders.items() if folder.images or folder.zips}
        if any((folder.own_zips or name == DOWNLOADS) and not folder.is_flat for name, folder in filled.items()):
            return True
        is_one = len(filled) > 1 or any(folder.is_flat for folder in filled.values())
        return not is_one or bool(domains_among(self.images))


def _domains(folder: _Folder, levels: int) -> list[Parts]:
    """Returns the paths of the domains in a folder, or its own path if it is a domain."""
    is_one = () in folder.closed or (folder.is_flat and not folder.own_zips)
    if is_one or not levels or not (folder.own_zips or folder.holds_domains):
        return [()] if folder.images or folder.closed else []
    below = {name: _domains(sub, levels - 1) for name, sub in folder.folders.items() if name != DOWNLOADS}
    return [*folder.own_zips, *((name, *parts) for name, found in below.items() for parts in found)]


def classes_in(folder: Path) -> tuple[str, ...]:
    """Returns the class folders if a folder is certainly one domain, else nothing; reads only as much as it needs.

    Class folders hold images and no folders of images.
    """
    content = _content(folder)
    if content.has_images or content.zips:
        return ()
    labels = {label.name: _content(label) for label in content.folders}
    if any(label.zips or any(map(_has_images_below, label.folders)) for label in labels.values()):
        return ()
    return tuple(name for name, label in labels.items() if label.has_images)


class _Content(NamedTuple):
    """The direct contents of a folder."""

    has_images: bool
    zips: tuple[str, ...]
    folders: tuple[Path, ...]


def _content(folder: Path) -> _Content:
    try:
        with os.scandir(folder) as entries:
            listed = sorted((entry for entry in entries if not is_clutter(entry.name)), key=lambda entry: entry.name)
    except OSError:  # opening it reports the error
        return _Content(False, (), ())
    files = [entry.name for entry in listed if not entry.is_dir()]
    return _Content(
        any(map(is_image_name, files)),
        tuple(name for name in files if ending_of(name) == _ZIP),
        tuple(folder / entry.name for entry in listed if entry.is_dir()),
    )


def _has_images_below(folder: Path) -> bool:
    if folder.is_symlink():
        return False  # it may lead back to a parent
    return any(is_image_name(name) for _, _, names in os.walk(folder) for name in names if not is_clutter(name))
