"""A domain on disk: a folder or a zip with ``class/image`` below it, or images without classes.

The files are sorted by the Unicode code points of their relative names, independent of the file system.
"""

from __future__ import annotations

import hashlib
import stat
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ratp.data.decode.pixels import BadImage
from ratp.data.read.archive import ArchiveLimits, list_archive
from ratp.data.read.folder import list_folder, read_file
from ratp.data.read.layout import domains_among, inside, places_of
from ratp.data.read.listing import IMAGE_ENDINGS, FoundFile, Listing, Unreadable, describe_unsupported, quoted
from ratp.errors import RatpError

_ANY_FOLDERS = "A domain without labels may have any folders if it is called so: --unlabelled."


class ImageFile(NamedTuple):
    """An image of a domain: ``name`` is relative to the domain, ``place`` to the folder or archive that was opened.

    ``class_name`` is None in a flat domain; ``stamp`` as in :class:`~ratp.data.read.listing.FoundFile`.
    """

    name: str
    class_name: str | None
    size: int
    stamp: int
    place: str


@dataclass(frozen=True, eq=False)
class ImageTree:
    """The image files of a domain."""

    path: Path
    name: str
    classes: tuple[str, ...] | None  # names of the classes that have images, sorted; None if the domain is flat
    files: tuple[ImageFile, ...]
    ignored: tuple[str, ...]  # names of files without an image ending, sorted
    unsupported: tuple[str, ...]  # those among the ignored files that may be images
    unreadable: tuple[Unreadable, ...]  # folders and links that could not be followed, each with the reason
    _read: Callable[[str], bytes] = field(repr=False)

    @property
    def is_archive(self) -> bool:
        """Whether the images are in a zip."""
        return self.path.suffix.lower() == ".zip" and not self.path.is_dir()

    def read(self, file: ImageFile) -> bytes:
        """Reads an image; fails if its size has changed since it was listed."""
        data = self._read(file.place)
        if len(data) != file.size:
            raise BadImage(f"has changed since it was listed: {file.size:,} bytes then, {len(data):,} now")
        return data


def open_tree(
    path: Path, limits: ArchiveLimits | None = None, *, labelled: bool = True, sure: bool = False
) -> ImageTree:
    """Lists the images of a domain, a folder or a ``.zip``, without reading any.

    Accepts ``class/image`` and, for a domain without labels, images only. Everything may lie in one more folder, as in
    an archive of a folder; a single folder of images counts as that if it has the domain's name, else as a class.
    Folders within a class belong to the class, unless :mod:`ratp.data.read.layout` takes it for a domain and the caller
    is not ``sure`` that it is one. If not ``labelled``, folders are not classes.
    """
    listing = list_path(path, "Give the folder or the .zip of a domain: class/image below it.", limits)
    if not listing.files[0].name:
        raise RatpError(f"{path} is neither a folder nor a .zip. Give the folder of a domain, or zip it.")
    name = path.resolve().name if path.is_dir() else path.stem
    files = _laid_out(path, name, listing.files, labelled=labelled)
    if labelled and not sure:
        _refuse_domains(path, files)
    classes = sorted({file.class_name for file in files if file.class_name is not None})
    about = (listing.ignored, listing.unsupported, listing.unreadable)
    return ImageTree(path, name, tuple(classes) or None, files, *about, _read=listing.read)


def _laid_out(path: Path, domain: str, found: tuple[FoundFile, ...], *, labelled: bool) -> tuple[ImageFile, ...]:
    strip = _wrapper(domain, found)
    files = []
    for file in found:
        name = file.name[strip:]
        folder, slash, _ = name.partition("/")
        class_name = unicodedata.normalize("NFC", folder) if slash and labelled else None
        files.append(ImageFile(name, class_name, file.size, file.stamp, file.name))
    beside = [file.name for file in files if file.class_name is None]
    if beside and len(beside) < len(files):
        classes = sorted({file.class_name for file in files if file.class_name is not None})
        raise RatpError(
            f"{path} has images both beside and in class folders: {quoted(beside)}, and folders {quoted(classes)}. "
            f"Put every image into the folder of its class. {_ANY_FOLDERS}"
        )
    return tuple(files)


def _refuse_domains(path: Path, files: tuple[ImageFile, ...]) -> None:
    domains = _like_domains(files)
    if domains:
        place = next(file.place.removesuffix(file.name) for file in files) + domains[0]
        one = f"one of them, e.g. {path / place}" if path.is_dir() else "one of them in a zip or a folder of its own"
        raise RatpError(
            f"{path} looks like several domains, not like one: {quoted(domains)}; folders of the same names lie in "
            f"more than one of them. If they are classes, put the images of each into its folder, without folders "
            f"between; if they are domains, give {one}. {_ANY_FOLDERS}"
        )


def _like_domains(files: tuple[ImageFile, ...]) -> list[str]:
    """Returns the class folders of a domain that look like domains themselves."""
    return ["/".join(parts) for parts in domains_among(places_of(file.name for file in files if file.class_name))]


def remarks_on(tree: ImageTree) -> list[str]:
    """Describes what may be misread: unsupported files, and classes that look like domains.

    Such classes contain only folders of images while other classes contain images, or they share folder names.
    """
    remarks = [describe_unsupported(tree.unsupported)] if tree.unsupported else []
    held = inside(places_of(file.name for file in tree.files if file.class_name is not None))
    nested = {name: inside(within) for name, within in held.items() if () not in within}
    if nested and (len(nested) < len(held) or _like_domains(tree.files)):
        folders = quoted([f"{name}/{folder}" for name, below in nested.items() for folder in below])
        remarks.append(
            f"folders within a class belong to it: {folders}. If {next(iter(nested))!r} is not a class but a domain, "
            "name each domain separately."
        )
    return remarks


def _wrapper(domain: str, found: tuple[FoundFile, ...]) -> int:
    """Returns the length of the prefix that all names share because one extra folder contains everything."""
    top, _, _ = found[0].name.partition("/")
    inside = f"{top}/"
    if not all(file.name.startswith(inside) for file in found):
        return 0
    has_folders = any("/" in file.name[len(inside) :] for file in found)
    return len(inside) if has_folders or top == domain else 0


def list_path(path: Path, advice: str, limits: ArchiveLimits | None = None) -> Listing:
    """Lists the images of a folder or ``.zip``; any other file is listed alone, with an empty name below itself."""
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RatpError(f"{path} does not exist. {advice}") from error
    except OSError as error:
        raise RatpError(f"cannot read {path}: {error.strerror or error}.") from error
    is_folder = stat.S_ISDIR(about.st_mode)
    if not is_folder and not stat.S_ISREG(about.st_mode):
        raise RatpError(f"{path} is a pipe or a device, not a file. {advice}")
    if not is_folder and path.suffix.lower() != ".zip":
        alone = FoundFile("", about.st_size, about.st_mtime_ns)
        return Listing((alone,), (), (), (), lambda name: read_file(path / name))
    listing = list_folder(path) if is_folder else list_archive(path, limits)
    if listing.files:
        return listing
    endings = " ".join(sorted(IMAGE_ENDINGS))
    lines = [f"{path} has no images: expected class/image with one of the endings {endings}."]
    lines += [f"{name or path.name} {reason}." for name, reason in listing.unreadable[:5]]
    if listing.ignored:
        lines.append(f"It has {len(listing.ignored):,} other file(s): {quoted(listing.ignored)}.")
    raise RatpError(" ".join(lines))


def identity(tree: ImageTree) -> str:
    """Hashes the listing: names, classes, sizes and times or checksums. Reads no image."""
    digest = hashlib.sha256()
    for file in tree.files:
        digest.update(repr((file.name, file.class_name, file.size, file.stamp)).encode())
    for unreadable in tree.unreadable:
        digest.update(repr(tuple(unreadable)).encode())
    return digest.hexdigest()
