"""What a domain consists of, file by file, and what is wrong with it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median_low
from typing import NamedTuple

from ratp.data.listing import Unreadable, escaped, quoted
from ratp.data.parallel import Progress, decode_all
from ratp.data.tree import ImageTree
from ratp.data.worker import Outcome

_NAMED = 20  # files a message names, one a line


class FileRecord(NamedTuple):
    """One file of a domain.

    Attributes:
        name: Relative name with ``/``.
        class_name: Its class, or None in a flat domain.
        sha256: Of its bytes; None if they could not be read.
        height: Height in pixels, 0 if it could not be decoded.
        width: Width in pixels, 0 if it could not be decoded.
        conversions: What was done to its pixels, in the words of :mod:`ratp.data.decode`.
        error: Why it is no usable image, or None.
    """

    name: str
    class_name: str | None
    sha256: str | None
    height: int
    width: int
    conversions: tuple[str, ...]
    error: str | None


class Spread(NamedTuple):
    """Least, median and most of some number."""

    least: int
    median: int
    most: int


class Duplicate(NamedTuple):
    """The same bytes in several domains.

    Attributes:
        sha256: Of the bytes.
        places: Domain and file, for every occurrence.
    """

    sha256: str
    places: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Manifest:
    """The files of a domain and what became of them.

    Attributes:
        name: Name of the domain.
        classes: Names of its classes, sorted; None if it is flat.
        files: All image files, sorted by name.
        unreadable: Folders and links that could not be followed.
        ignored: The first names of files that are no images by their ending.
        ignored_count: How many of those there are.
    """

    name: str
    classes: tuple[str, ...] | None
    files: tuple[FileRecord, ...]
    unreadable: tuple[Unreadable, ...] = ()
    ignored: tuple[str, ...] = ()
    ignored_count: int = 0

    @cached_property
    def usable(self) -> tuple[FileRecord, ...]:
        """The files that are images."""
        return tuple(file for file in self.files if file.error is None)

    @cached_property
    def bad(self) -> tuple[Unreadable, ...]:
        """What is no usable image or could not be looked into, each with the reason."""
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


def _spread(values: list[int]) -> Spread:
    return Spread(min(values), median_low(values), max(values)) if values else Spread(0, 0, 0)


def make_manifest(tree: ImageTree, outcomes: Sequence[Outcome]) -> Manifest:
    """The manifest of a domain whose files have all been decoded."""
    files = tuple(
        FileRecord(file.name, file.class_name, *outcome) for file, outcome in zip(tree.files, outcomes, strict=True)
    )
    return Manifest(tree.name, tree.classes, files, tree.unreadable, tree.ignored[:_NAMED], len(tree.ignored))


def renewed(manifest: Manifest, tree: ImageTree) -> Manifest | None:
    """A manifest kept from before as one of this domain, or None if its files are others.

    What may have changed without the images having changed is the domain's: its name and what is ignored.
    """
    if len(manifest.files) != len(tree.files) or any(
        record.name != file.name or record.class_name != file.class_name
        for record, file in zip(manifest.files, tree.files, strict=True)
    ):
        return None
    return replace(manifest, name=tree.name, ignored=tree.ignored[:_NAMED], ignored_count=len(tree.ignored))


def check_domain(
    tree: ImageTree,
    size: tuple[int, int] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Decodes every image of a domain and keeps none.

    Args:
        tree: The domain.
        size: Height and width to resize to as well, as a training run would; None to leave that out.
        workers: Processes to decode in; by default as many as there are cores.
        progress: Called with the number of files done and that of all.

    Raises:
        RatpError: If a decoding process ends unexpectedly.
    """
    return make_manifest(tree, decode_all(tree, size, workers=workers, progress=progress))


def duplicates_between(manifests: Iterable[Manifest]) -> tuple[Duplicate, ...]:
    """Images whose bytes occur in more than one of the domains."""
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
    """What there is to say about a domain, a line each: what it has first, then what deserves a look."""
    count = len(manifest.classes or ())
    classes = f"{count or 'no'} {'class' if count == 1 else 'classes'}"
    lines = [f"{manifest.name}: {len(manifest.usable):,} images, {classes}"]
    if manifest.classes is not None:
        lines.append("images a class: " + ", ".join(f"{name} {count:,}" for name, count in manifest.counts.items()))
    if manifest.usable:
        lines.append(_sizes(manifest))
    if manifest.conversions:
        lines.append("converted: " + ", ".join(f"{name} {count:,}" for name, count in manifest.conversions.items()))
    if manifest.ignored_count:
        lines.append(f"not images by their names, ignored: {manifest.ignored_count:,} ({quoted(manifest.ignored)})")
    if manifest.duplicates:
        extra = sum(len(group) - 1 for group in manifest.duplicates)
        lines.append(f"exact duplicates: {extra:,}, e.g. {quoted([file.name for file in manifest.duplicates[0]])}")
        split = [group for group in manifest.duplicates if len({file.class_name for file in group}) > 1]
        if split:
            lines.append(f"of those in two classes at once: {len(split):,}, e.g. {quoted([f.name for f in split[0]])}")
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
    """Why images are refused: the bad ones among ``count`` with their reasons, and what to do."""
    advice = "Mend or remove them, or leave them out with --on-bad-image skip."
    return "\n".join((f"{len(bad):,} bad among {count:,} images:", *_listed(bad), advice))


def describe_left_out(bad: Sequence[Unreadable]) -> str:
    """Which bad files were left out, with their reasons."""
    which = "1 that is no usable image" if len(bad) == 1 else f"{len(bad):,} that are no usable images"
    return "\n".join((f"left out {which}:", *_listed(bad)))


def describe_useless(bad: Sequence[Unreadable], count: int) -> str:
    """That ``count`` images are all bad, with their reasons."""
    told = "1 image, and it cannot be used" if count == 1 else f"{count:,} images, and not one that can be used"
    return "\n".join((f"{told}:", *_listed(bad)))


def _listed(bad: Sequence[Unreadable]) -> list[str]:
    """The first bad files with their reasons, a line each."""
    lines = [f"  {escaped(name)}: {reason}" for name, reason in bad[:_NAMED]]
    return lines if len(bad) <= _NAMED else [*lines, f"  and {len(bad) - _NAMED:,} more"]
