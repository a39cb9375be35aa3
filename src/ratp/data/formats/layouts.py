"""Finds the class of each file in a folder or zip: by its folder, or by a list of labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ratp.data.decode.pixels import BadImage
from ratp.data.formats.pictures import ImageBytes, Pictures, whole_file
from ratp.data.read.archive import list_archive
from ratp.data.read.folder import list_folder
from ratp.data.read.listing import Listing, is_image_name
from ratp.errors import RatpError, unknown

_LABELLED = re.compile(r"(.+?)[\s,]+([^\s,]+)")
_PARTS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation"})


@dataclass(frozen=True, eq=False)
class Place:
    """The images in a folder or zip."""

    root: Path
    listing: Listing
    files: tuple[PurePosixPath, ...]

    @staticmethod
    def at(root: Path) -> Place:
        """Lists a folder or zip."""
        listing = list_folder(root) if root.is_dir() else list_archive(root)
        return Place(root, listing, tuple(PurePosixPath(file.name) for file in listing.files))

    def pictures(self, labelled: Iterable[tuple[str, PurePosixPath]], notes: tuple[str, ...] = ()) -> Pictures:
        """Some of its images, with their classes, sorted by class and name."""
        ordered = sorted(labelled)
        unreadable = tuple(f"{self.root / name}: {reason}" for name, reason in self.listing.unreadable)
        return Pictures([label for label, _ in ordered], lambda k: self._read(ordered[k][1]), notes, unreadable)

    def _read(self, path: PurePosixPath) -> ImageBytes:
        try:
            data = self.listing.read(str(path))
        except BadImage as problem:
            raise BadImage(f"{self.root / path}: {problem}") from problem
        return whole_file(data, str(self.root / path))


def by_folder(name: str, place: Place) -> Pictures:
    """Finds the pictures of a domain in a place with one folder per class.

    The class folders may lie at the root, in a folder with the domain's name, or in the only folder; ``train`` and
    ``test`` folders above them are merged.
    """
    inside = [path for path in place.files if len(path.parts) >= 2]
    named = [path for path in inside if len(_steps(path)) >= 3 and plain(_steps(path)[-3]) == plain(name)]
    at_root = [path for path in inside if len(_steps(path)) == 2]
    chosen = named or at_root or _only_domain(name, place, inside)
    total = len(place.files) + len(place.listing.ignored)
    left_out = total - len(chosen)
    note = f"{place.root}: {left_out:,} of {total:,} files are not images in a class folder of {name}."
    return place.pictures(((path.parts[-2], path) for path in chosen), (note,) if left_out else ())


def _steps(path: PurePosixPath) -> tuple[str, ...]:
    """The parts of a path without train and test folders, except for a class with such a name."""
    return (*(part for part in path.parts[:-2] if part.lower() not in _PARTS), *path.parts[-2:])


def plain(name: str) -> str:
    """Normalizes the spelling of a name: ``Art Painting`` becomes ``art_painting``."""
    return name.lower().replace("-", "_").replace(" ", "_")


def domain_folders(place: Place) -> frozenset[str]:
    """The plain names of the folders that hold class folders; empty if the classes lie at the root."""
    return frozenset(plain(steps[-3]) for steps in map(_steps, place.files) if len(steps) >= 3)


def _only_domain(name: str, place: Place, inside: Sequence[PurePosixPath]) -> Sequence[PurePosixPath]:
    if len({_steps(path)[:-2] for path in inside}) > 1:
        folders = sorted({_steps(path)[-3] for path in inside})
        raise RatpError(f"{place.root} holds several domains. {unknown('domain', name, folders)}")
    if not place.files:
        raise RatpError(
            f"{place.root} holds no images: expected class/image, found {len(place.listing.ignored)} other files."
        )
    if not inside:
        raise RatpError(
            f"{place.root} holds no class folders: expected class/image, found {len(place.files):,} images without a "
            "folder. Also give the list of their labels, one line per image: name label."
        )
    return inside


@dataclass(frozen=True)
class LabelList:
    """A text file with the name and label of one picture per line; ``origin`` is what messages call it."""

    origin: str
    stem: str
    entries: tuple[tuple[PurePosixPath, str], ...]

    @property
    def is_flat(self) -> bool:
        """Whether the names are names only, with no folders before them."""
        return all(len(name.parts) == 1 for name, _ in self.entries)


def parse_list(data: bytes, origin: str) -> LabelList | None:
    """Reads a list of labels; None if the file is not one."""
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        return None
    entries: list[tuple[PurePosixPath, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        match = _LABELLED.fullmatch(line.strip())
        if not match or not is_image_name(match[1]):
            if not entries:
                return None
            raise RatpError(f"{origin}, line {number}: expected an image's name and its label, found {line[:60]!r}.")
        path = PurePosixPath(match[1])
        if path.is_absolute() or ".." in path.parts:
            raise RatpError(f"{origin}, line {number}: {match[1]!r} leads out of the folder.")
        entries.append((path, match[2]))
    return LabelList(origin, PurePosixPath(origin).stem, tuple(entries)) if entries else None


def lists_in(place: Place) -> list[LabelList]:
    """Reads the lists of plain file names that lie in a folder beside the images."""
    found = []
    for name in place.listing.ignored if place.root.is_dir() else ():
        if name.lower().endswith((".txt", ".csv")):
            labels = parse_list(place.listing.read(name), str(place.root / name))
            found += [labels] if labels is not None and labels.is_flat else []
    return found


def by_list(labels: LabelList, places: Sequence[Place]) -> Pictures:
    """Finds the pictures that a list names.

    The class is the label or, where the names have the form ``domain/class/image``, the folder.
    """
    place, base = _start(labels, places)
    there = frozenset(place.files)
    missing = [name for name, _ in labels.entries if base / name not in there]
    if missing:
        raise RatpError(
            f"{labels.origin} names {len(labels.entries):,} images, and {len(missing):,} of them are not in "
            f"{place.root / base}, the first is '{missing[0]}'."
        )
    twice = len(labels.entries) - len({name for name, _ in labels.entries})
    if twice:
        raise RatpError(f"{labels.origin} names {twice:,} images more than once.")
    return place.pictures(
        (name.parts[-2] if len(name.parts) > 2 else label, base / name) for name, label in labels.entries
    )


def _start(labels: LabelList, places: Sequence[Place]) -> tuple[Place, PurePosixPath]:
    """Finds the place and the folder in it that the names of the list are relative to."""
    first, _ = labels.entries[0]
    steps = len(first.parts)
    starts = [
        (place, PurePosixPath(*path.parts[:-steps]))
        for place in places
        for path in place.files
        if path.parts[-steps:] == first.parts
    ]
    stem = labels.stem.removesuffix("_labels").removesuffix("_label")
    named = [(place, base) for place, base in starts if (base.name or place.root.name) == stem]
    found = named or starts
    if len(found) != 1:
        where = ", ".join(str(place.root / base) for place, base in found[:3]) or "nowhere"
        raise RatpError(
            f"{labels.origin} names '{first}', which should be in one folder and was found in {len(found)}: {where}. "
            "Give the list together with the folder of its images."
        )
    return found[0]
