"""The domains in a folder: which of the folders and zips below it are one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ratp.data.listing import is_clutter, is_image_name
from ratp.data.place import DOWNLOADS
from ratp.errors import RatpError

_LEVELS = 2  # of folders that are looked into: FOLDER/DATASET/DOMAIN


class _Content(NamedTuple):
    """What lies in a folder itself."""

    has_images: bool
    zips: tuple[Path, ...]
    folders: tuple[Path, ...]


def find_domains(path: Path) -> tuple[Path, ...]:
    """The path itself if it is a domain, else the domains in it, up to two levels of folders below it.

    A zip is a domain. A folder with images in it is a flat domain, one whose folders hold images and nothing but
    images is a domain of classes. Any other folder is one of domains: because it has zips, or because what its
    folders hold are again folders of images. What has no images below it is passed over, and so is the folder
    ``downloads``.

    Raises:
        RatpError: If the path does not exist or cannot be read, or nothing in it is a domain.
    """
    if not path.exists():
        raise RatpError(f"{path} does not exist. Give the folder or the .zip of a domain, or a folder of domains.")
    if not path.is_dir():
        return (path,)
    try:
        found = _domains(path, _LEVELS)
    except OSError as error:
        raise RatpError(f"cannot read {error.filename or path}: {error.strerror or error}.") from error
    if not found:
        raise RatpError(
            f"{path} holds no domains: expected zips, or folders with class/image below them, at most "
            f"{_LEVELS} folders deep."
        )
    return tuple(found)


def classes_in(folder: Path) -> tuple[str, ...]:
    """Names of the folders of images that make a folder one domain, not one of domains; none if they do not.

    Raises:
        OSError: If it cannot be read.
    """
    content = _content(folder)
    is_one = not content.has_images and _is_domain(content)
    return tuple(label.name for label in content.folders if _content(label).has_images) if is_one else ()


def _domains(folder: Path, levels: int) -> list[Path]:
    content = _content(folder)
    if _is_domain(content):
        return [folder]
    if not levels:
        return [folder] if _has_images_below(folder.resolve()) else []
    below = [found for sub in content.folders if sub.name != DOWNLOADS for found in _domains(sub, levels - 1)]
    return sorted([*content.zips, *below])


def _content(folder: Path) -> _Content:
    with os.scandir(folder) as entries:
        listed = sorted((entry for entry in entries if not is_clutter(entry.name)), key=lambda entry: entry.name)
    folders = [entry for entry in listed if entry.is_dir()]
    files = [entry.name for entry in listed if not entry.is_dir()]
    return _Content(
        any(map(is_image_name, files)),
        tuple(folder / name for name in files if name.lower().endswith(".zip")),
        tuple(folder / entry.name for entry in folders),
    )


def _is_domain(content: _Content) -> bool:
    if content.zips:
        return False
    if content.has_images:
        return True
    classes = [_content(sub) for sub in content.folders]
    deeper = any(label.zips or any(map(_has_images_below, label.folders)) for label in classes)
    return not deeper and any(label.has_images for label in classes)


def _has_images_below(folder: Path) -> bool:
    if folder.is_symlink():
        return False  # it may lead back to where we come from
    return any(is_image_name(name) for _, _, names in os.walk(folder) for name in names if not is_clutter(name))
