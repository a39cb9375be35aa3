"""Loads domains from folders and zips and matches their labels by class name, never by order."""

from __future__ import annotations

import os
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ratp.data.cache.decoded import DecodedDomain, open_decoded
from ratp.data.cache.manifest import duplicates_between
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.data.read.listing import is_clutter
from ratp.data.read.tree import ImageTree, open_tree
from ratp.errors import MOST_NAMES, ConfigError, RatpError, nearest
from ratp.streams.stream import DataOptions, LoadedDomain


def load_domains(
    paths: Mapping[str, Path],
    size: int,
    options: DataOptions,
    *,
    classes: Sequence[str] | None = None,
    unlabelled: Collection[str] = (),
    origin: Callable[[Path, DecodedDomain], str | None] = lambda path, decoded: None,
) -> list[LoadedDomain]:
    """Loads domains, the source first, and reports everything wrong with them at once.

    No image is decoded unless all domains can be listed.
    """
    problems = problems_listed(paths, classes=classes, unlabelled=unlabelled)
    if problems:
        raise ConfigError(problems)
    found: dict[str, DecodedDomain] = {}
    for name, (path, sure) in _places(paths, classes, unlabelled).items():
        progress = None if options.progress is None else partial(options.progress, name)
        try:
            found[name] = open_decoded(
                path, size, on_bad=options.on_bad, labelled=name not in unlabelled, sure=sure, progress=progress
            )
        except RatpError as error:
            problems.append(f"domain {name!r}: {error}")
    source = next(iter(paths))
    known = tuple(classes or (source in found and found[source].class_names) or ())
    if not known:
        raise ConfigError(problems)
    loaded = []
    for name, decoded in found.items():
        try:
            domain, files, notes = _labelled(name, decoded, known, options, source=source)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        notes = (*decoded.notes, *_empty_folders(name, paths[name], decoded), *notes)
        loaded.append(LoadedDomain(domain, origin(paths[name], decoded), files, notes))
    if problems:
        raise ConfigError(problems)
    if shared := _shared_images(found):
        loaded[0] = replace(loaded[0], notes=(*loaded[0].notes, shared))
    return loaded


def problems_listed(
    paths: Mapping[str, Path], *, classes: Sequence[str] | None = None, unlabelled: Collection[str] = ()
) -> list[str]:
    """Returns what is wrong with domains, the source first, as far as their lists of files show it."""
    problems: list[str] = []
    found: dict[str, ImageTree] = {}
    for name, (path, sure) in _places(paths, classes, unlabelled).items():
        try:
            found[name] = open_tree(path, labelled=name not in unlabelled, sure=sure)
        except RatpError as error:
            problems.append(f"domain {name!r}: {error}")
    source = next(iter(paths))
    known = found[source].classes if source in found else ("unknown", "as it cannot be listed")
    if known is None and classes is None:
        problems.append(
            f"the source {source!r} has no labels: all its images are directly in {paths[source]}. "
            "Put them into one folder per class."
        )
    elif known is not None and len(known) < 2 and classes is None:
        problems.append(
            f"the source {source!r} has a single class ({known[0]}): it needs at least two, each in a folder of its "
            f"own in {paths[source]}."
        )
    return problems


def _places(
    paths: Mapping[str, Path], classes: Sequence[str] | None, unlabelled: Collection[str]
) -> dict[str, tuple[Path, bool]]:
    """Returns the path of every domain, and whether it is sure to be one although it may look like several."""
    alike = _alike({name: path for name, path in paths.items() if name not in unlabelled})
    return {name: (path, classes is not None or name in alike) for name, path in paths.items()}


def _alike(paths: Mapping[str, Path]) -> set[str]:
    """Returns the domains with the same folders as another one, which must then be classes."""
    folders = {name: tuple(_folders(path)) for name, path in paths.items()}
    often = Counter(names for names in folders.values() if len(names) > 1)
    return {name for name, names in folders.items() if often[names] > 1}


def _labelled(
    name: str, decoded: DecodedDomain, classes: Sequence[str], options: DataOptions, *, source: str
) -> tuple[LabelledDomain | UnlabelledDomain, tuple[str, ...], tuple[str, ...]]:
    """Returns the domain with labels by class name, its file names, and notes."""
    manifest = decoded.manifest.hash
    files = tuple(file.name for file in decoded.manifest.usable)
    if decoded.class_names is None or decoded.class_index is None:
        return UnlabelledDomain(name, decoded.images, manifest), files, ()
    counts = decoded.manifest.counts
    index = {label: k for k, label in enumerate(classes)}
    places = torch.tensor([index.get(label, -1) for label in decoded.class_names])
    labels = places[decoded.class_index]
    images, notes = decoded.images, []
    if extra := [label for label in decoded.class_names if label not in index]:
        kept = labels >= 0
        if options.extra_classes == "stop" or not bool(kept.any()):
            raise ConfigError(_unknown_classes(name, extra, counts, classes))
        dropped = ", ".join(f"{label} ({counts[label]:,})" for label in extra)
        notes.append(f"{name}: left out the images of other classes than those of the stream: {dropped}.")
        images, labels = images[kept], labels[kept]
        files = tuple(file for file, keep in zip(files, kept.tolist(), strict=True) if keep)
    missing = [label for label in classes if not counts.get(label)]
    if missing:
        unlearnt = ", which the model therefore cannot learn" if name == source else ""
        notes.append(f"{name}: no images of {some(missing)}{unlearnt}.")
    if name == source and (few := [label for label in classes if counts.get(label) == 1]):
        notes.append(f"{name}: a single image of {some(few)}.")
    return LabelledDomain(name, images, labels, tuple(classes), manifest=manifest), files, tuple(notes)


def _unknown_classes(name: str, extra: Sequence[str], counts: Mapping[str, int], classes: Sequence[str]) -> str:
    def described(label: str) -> str:
        near = nearest(label, [known for known in classes if known not in counts] or classes)
        return f"{label!r} ({counts[label]:,} images{f', perhaps {near!r} renamed' if near else ''})"

    return (
        f"domain {name!r} has classes that the stream lacks: {some([described(label) for label in extra])}. The stream "
        f"has {some(classes)}. Rename the folders, leave those images out with --extra-classes drop, or, if the domain "
        f"has no labels, say so: --unlabelled {shlex.quote(name)}, or in a .toml file unlabelled = true."
    )


def _empty_folders(name: str, path: Path, decoded: DecodedDomain) -> tuple[str, ...]:
    """Returns a note on class folders without images, which do not count as classes."""
    if decoded.class_names is None or not path.is_dir():
        return ()
    below = _folders(path)
    if len(below) == 1 and below[0] not in decoded.class_names:  # one extra folder contains all classes
        below = _folders(path / below[0])
    empty = [folder for folder in below if unicodedata.normalize("NFC", folder) not in decoded.class_names]
    return (f"{name}: no images in {some(empty)}: not a class.",) if empty else ()


def _folders(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not is_clutter(entry.name))
    except OSError:
        return []


def _shared_images(found: Mapping[str, DecodedDomain]) -> str | None:
    """Returns a note on images in several domains, which make results look better than they are."""
    shared = duplicates_between(replace(decoded.manifest, name=name) for name, decoded in found.items())
    if not shared:
        return None
    example = " and ".join(f"{name}: {file}" for name, file in shared[0].places[:3])
    return f"{len(shared):,} image(s) are in more than one domain, e.g. {example}."


def some(names: Sequence[str]) -> str:
    """Lists names in a message; of many only the first."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
