"""Lists the files of a domain with their hashes, sizes and problems, in memory and as JSON."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from ratp._core.files import MANIFEST, read_json
from ratp.data.decode.parallel import Progress, decode_all
from ratp.data.decode.worker import Outcome
from ratp.data.read.listing import Unreadable, escaped, quoted
from ratp.data.read.tree import ImageTree
from ratp.errors import MOST_NAMES, RatpError, first_lines


class FileRecord(NamedTuple):
    """One file of a domain: without hash if it was not read, with size 0 and an error if it was not decoded."""

    name: str
    class_name: str | None
    sha256: str | None
    height: int
    width: int
    conversions: tuple[str, ...]
    error: str | None


class Spread(NamedTuple):
    """The smallest, median and largest of some values."""

    least: int
    median: int
    most: int


class Duplicate(NamedTuple):
    """The same bytes in several domains: ``places`` names domain and file of every occurrence."""

    sha256: str
    places: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Manifest:
    """The files of a domain and the outcome of decoding each.

    Attributes:
        classes: Names of its classes, sorted; None if it is flat.
        unreadable: Folders and links that could not be followed.
        ignored: The first names of files without an image ending.
        ignored_count: Number of all such files.
    """

    name: str
    classes: tuple[str, ...] | None
    files: tuple[FileRecord, ...]
    unreadable: tuple[Unreadable, ...] = ()
    ignored: tuple[str, ...] = ()
    ignored_count: int = 0

    @cached_property
    def usable(self) -> tuple[FileRecord, ...]:
        """The files that were decoded."""
        return tuple(file for file in self.files if file.error is None)

    @cached_property
    def bad(self) -> tuple[Unreadable, ...]:
        """Unusable images, and folders that could not be read, each with the reason."""
        broken = (Unreadable(file.name, file.error) for file in self.files if file.error is not None)
        return tuple(sorted((*broken, *self.unreadable)))

    @property
    def counts(self) -> dict[str, int]:
        """Usable images of every class; empty for a flat domain."""
        found = Counter(file.class_name for file in self.usable)
        return {name: found[name] for name in self.classes or ()}

    @property
    def heights(self) -> Spread:
        """Heights of the usable images."""
        return _spread([file.height for file in self.usable])

    @property
    def widths(self) -> Spread:
        """Widths of the usable images."""
        return _spread([file.width for file in self.usable])

    @property
    def conversions(self) -> dict[str, int]:
        """How many images went through each conversion, the most frequent first."""
        found = Counter(conversion for file in self.usable for conversion in file.conversions)
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    @cached_property
    def duplicates(self) -> tuple[tuple[FileRecord, ...], ...]:
        """Groups of images with the same bytes."""
        groups: dict[str | None, list[FileRecord]] = {}
        for file in self.usable:
            groups.setdefault(file.sha256, []).append(file)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    @cached_property
    def hash(self) -> str:
        """sha256 of all names, classes and contents: two domains with the same one are the same data."""
        digest = hashlib.sha256()
        for file in sorted(self.files):
            digest.update(json.dumps([file.name, file.class_name, file.sha256]).encode() + b"\n")
        return digest.hexdigest()

    @cached_property
    def content(self) -> str:
        """sha256 of the contents alone, whatever the files are called and in whatever order they are."""
        return hashlib.sha256("".join(sorted(file.sha256 or "" for file in self.files)).encode()).hexdigest()


def _spread(values: list[int]) -> Spread:
    return Spread(min(values), median_low(values), max(values)) if values else Spread(0, 0, 0)


def make_manifest(tree: ImageTree, outcomes: Sequence[Outcome]) -> Manifest:
    """Makes the manifest of a domain from the outcome of decoding each file."""
    files = tuple(
        FileRecord(file.name, file.class_name, *outcome) for file, outcome in zip(tree.files, outcomes, strict=True)
    )
    return Manifest(tree.name, tree.classes, files, tree.unreadable, tree.ignored[:MOST_NAMES], len(tree.ignored))


def updated_manifest(manifest: Manifest, tree: ImageTree) -> Manifest | None:
    """Gives a cached manifest the name and the ignored files of ``tree``; None if the images differ."""
    if len(manifest.files) != len(tree.files) or any(
        record.name != file.name or record.class_name != file.class_name
        for record, file in zip(manifest.files, tree.files, strict=True)
    ):
        return None
    return replace(manifest, name=tree.name, ignored=tree.ignored[:MOST_NAMES], ignored_count=len(tree.ignored))


def check_domain(
    tree: ImageTree,
    size: tuple[int, int] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Decodes every image of a domain without keeping any; with a ``size``, also resizes it, as a run would."""
    return make_manifest(tree, decode_all(tree, size, workers=workers, progress=progress))


def duplicates_between(manifests: Iterable[Manifest]) -> tuple[Duplicate, ...]:
    """Finds images whose bytes occur in several of the domains."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    for k, manifest in enumerate(manifests):
        for file in manifest.usable:
            found.setdefault(file.sha256 or "", []).append((k, manifest.name, file.name))
    return tuple(
        Duplicate(sha256, tuple((domain, name) for _, domain, name in places))
        for sha256, places in found.items()
        if len({k for k, _, _ in places}) > 1
    )


def describe(manifest: Manifest) -> list[str]:
    """Describes a domain in lines: its contents first, then possible problems."""
    count = len(manifest.classes or ())
    classes = f"{count or 'no'} {'class' if count == 1 else 'classes'}"
    lines = [f"{manifest.name}: {len(manifest.usable):,} images, {classes}"]
    if manifest.classes is not None:
        lines.append("images per class: " + ", ".join(f"{name} {count:,}" for name, count in manifest.counts.items()))
    if manifest.usable:
        lines.append(_sizes(manifest))
    if manifest.conversions:
        lines.append("converted: " + ", ".join(f"{name} {count:,}" for name, count in manifest.conversions.items()))
    if manifest.ignored_count:
        lines.append(f"ignored, no image ending: {manifest.ignored_count:,} ({quoted(manifest.ignored)})")
    if manifest.duplicates:
        extra = sum(len(group) - 1 for group in manifest.duplicates)
        lines.append(f"exact duplicates: {extra:,}, e.g. {quoted([file.name for file in manifest.duplicates[0]])}")
        split = [group for group in manifest.duplicates if len({file.class_name for file in group}) > 1]
        if split:
            lines.append(f"duplicates across classes: {len(split):,}, e.g. {quoted([f.name for f in split[0]])}")
    if manifest.bad:
        lines.append(f"unusable: {len(manifest.bad):,}")
        lines += _listed(manifest.bad)
    return [*lines, f"hash: {manifest.hash}"]


def _sizes(manifest: Manifest) -> str:
    heights, widths = manifest.heights, manifest.widths
    if heights.least == heights.most and widths.least == widths.most:
        return f"all of height {heights.least} and width {widths.least}"
    spreads = {"height": heights, "width": widths}.items()
    return ", ".join(f"{what} {least} to {most}, median {median}" for what, (least, median, most) in spreads)


def describe_refused(bad: Sequence[Unreadable], count: int) -> str:
    """Explains why images are refused: the bad ones with their reasons, and what to do."""
    advice = "Repair or remove them, or skip them with --on-bad-image skip."
    return "\n".join((f"{len(bad):,} bad among {count:,} images:", *_listed(bad), advice))


def describe_skipped(bad: Sequence[Unreadable]) -> str:
    """Lists the bad files that were skipped, with their reasons."""
    which = "1 unusable image" if len(bad) == 1 else f"{len(bad):,} unusable images"
    return "\n".join((f"skipped {which}:", *_listed(bad)))


def describe_all_bad(bad: Sequence[Unreadable], count: int) -> str:
    """Says that all ``count`` images are bad, with their reasons."""
    count_text = "1 image, and it is unusable" if count == 1 else f"{count:,} images, none of them usable"
    return "\n".join((f"{count_text}:", *_listed(bad)))


def _listed(bad: Sequence[Unreadable]) -> list[str]:
    """Formats the first bad files with their reasons, one per line."""
    return first_lines([f"{escaped(name)}: {reason}" for name, reason in bad])


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest."""
    data = MANIFEST.read(read_json(path), path)
    try:
        return manifest_from_json(data)
    except RatpError as error:
        raise RatpError(f"{path}: {error}") from error


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """Converts a manifest to JSON with one list per column, since there may be very many files."""
    ways = list(dict.fromkeys(file.conversions for file in manifest.files))
    way_index = {way: k for k, way in enumerate(ways)}
    class_index = {name: k for k, name in enumerate(manifest.classes or ())}
    return {
        **MANIFEST.mark,
        "name": manifest.name,
        "classes": manifest.classes,
        "conversions": ways,
        "unreadable": manifest.unreadable,
        "ignored": manifest.ignored,
        "ignored_count": manifest.ignored_count,
        "errors": {str(k): file.error for k, file in enumerate(manifest.files) if file.error is not None},
        "files": {
            "name": [file.name for file in manifest.files],
            "class": [None if file.class_name is None else class_index[file.class_name] for file in manifest.files],
            "sha256": [file.sha256 for file in manifest.files],
            "height": [file.height for file in manifest.files],
            "width": [file.width for file in manifest.files],
            "conversions": [way_index[file.conversions] for file in manifest.files],
        },
    }


def manifest_from_json(data: Mapping[str, Any]) -> Manifest:
    """Rebuilds a manifest from :func:`manifest_to_json`, of the current version."""
    try:
        ways = [tuple(way) for way in data["conversions"]]
        classes = None if data["classes"] is None else tuple(data["classes"])
        columns = data["files"]
        class_names = [None if k is None else (classes or ())[k] for k in columns["class"]]
        errors: list[str | None] = [None] * len(class_names)
        for k, reason in data["errors"].items():
            errors[int(k)] = reason
        files = tuple(
            map(
                FileRecord._make,
                zip(
                    columns["name"],
                    class_names,
                    columns["sha256"],
                    columns["height"],
                    columns["width"],
                    [ways[k] for k in columns["conversions"]],
                    errors,
                    strict=True,
                ),
            )
        )
        unreadable = tuple(Unreadable(name, reason) for name, reason in data["unreadable"])
        return Manifest(data["name"], classes, files, unreadable, tuple(data["ignored"]), int(data["ignored_count"]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RatpError(f"not a manifest, or a damaged one ({error!r}). Check the data again.") from error
