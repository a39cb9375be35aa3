"""From folders and zips to domains whose labels agree: by the names of their classes, never by their order."""

from __future__ import annotations

import os
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ratp.data.decoded import DecodedDomain, open_decoded
from ratp.data.listing import is_clutter
from ratp.data.manifest import duplicates_between
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import ConfigError, RatpError, nearest
from ratp.stream import DataOptions, LoadedDomain

_LISTED = 20


def load_domains(
    paths: Mapping[str, Path],
    size: int,
    options: DataOptions,
    *,
    classes: Sequence[str] | None = None,
    unlabelled: Collection[str] = (),
    origin: Callable[[Path, DecodedDomain], str | None] = lambda path, decoded: None,
) -> list[LoadedDomain]:
    """Reads domains, the source's first; all that is wrong with them is said at once.

    Args:
        paths: Folder or zip of every domain by its name.
        size: Side of the images.
        options: How to read them.
        classes: Names of the classes in order; those of the source, sorted, if None.
        unlabelled: Names of the domains whose folders, if they have any, are no classes.
        origin: From a domain's place and images to what it is if it is not the published data.

    Raises:
        ConfigError: With every domain that cannot be read or does not fit.
    """
    problems: list[str] = []
    found: dict[str, DecodedDomain] = {}
    alike = _alike({name: path for name, path in paths.items() if name not in unlabelled})
    for name, path in paths.items():
        sure = classes is not None or name in alike
        try:
            found[name] = _open(name, path, size, options, labelled=name not in unlabelled, sure=sure)
        except RatpError as error:
            problems.append(f"domain {name!r}: {error}")
    source = next(iter(paths))
    if source in found and found[source].class_names is None:
        problems.append(
            f"the source {source!r} has no labels: its images lie beside each other in {paths[source]}. "
            "Put them into a folder a class."
        )
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
    shared = _shared_images(found)
    if shared:
        loaded[0] = replace(loaded[0], notes=(*loaded[0].notes, shared))
    return loaded


def _alike(paths: Mapping[str, Path]) -> set[str]:
    """Names of domains that have the same folders as another one: these are classes then, whatever they hold."""
    folders = {name: tuple(_folders(path)) for name, path in paths.items()}
    often = Counter(names for names in folders.values() if len(names) > 1)
    return {name for name, names in folders.items() if often[names] > 1}


def _open(name: str, path: Path, size: int, options: DataOptions, *, labelled: bool, sure: bool) -> DecodedDomain:
    report = options.progress
    progress = None if report is None else lambda done, of: report(name, done, of)
    return open_decoded(path, size, on_bad=options.on_bad, labelled=labelled, sure=sure, progress=progress)


def _labelled(
    name: str, decoded: DecodedDomain, classes: Sequence[str], options: DataOptions, *, source: str
) -> tuple[LabelledDomain | UnlabelledDomain, tuple[str, ...], tuple[str, ...]]:
    """The domain with labels by class name, the names of its files, and what to say about it.

    Raises:
        ConfigError: If it has classes that are not known, unless they may be dropped.
    """
    manifest = decoded.manifest.hash
    files = tuple(file.name for file in decoded.manifest.usable)
    if decoded.class_names is None or decoded.class_index is None:
        return UnlabelledDomain(name, decoded.images, manifest), files, ()
    index = {label: k for k, label in enumerate(classes)}
    counts = decoded.manifest.counts
    extra = [label for label in decoded.class_names if label not in index]
    if extra and options.extra_classes == "stop":
        raise ConfigError(_unknown_classes(name, extra, counts, classes))
    places = torch.tensor([index.get(label, -1) for label in decoded.class_names])
    labels = places[decoded.class_index]
    images, notes = decoded.images, []
    if extra:
        kept = labels >= 0
        if not bool(kept.any()):
            raise ConfigError(_unknown_classes(name, extra, counts, classes))
        dropped = ", ".join(f"{label} ({counts[label]:,})" for label in extra)
        notes.append(f"{name}: left out the images of other classes than those of the stream: {dropped}.")
        images, labels = images[kept], labels[kept]
        files = tuple(file for file, keep in zip(files, kept.tolist(), strict=True) if keep)
    missing = [label for label in classes if not counts.get(label)]
    if missing:
        unlearnt = ", so that cannot be learnt" if name == source else ""
        notes.append(f"{name}: no images of {some(missing)}{unlearnt}.")
    few = [label for label in classes if counts.get(label) == 1]
    if few and name == source:
        notes.append(f"{name}: one image only of {some(few)}.")
    return LabelledDomain(name, images, labels, tuple(classes), manifest=manifest), files, tuple(notes)


def _unknown_classes(name: str, extra: Sequence[str], counts: Mapping[str, int], classes: Sequence[str]) -> str:
    listed = []
    for label in extra[:_LISTED]:
        near = nearest(label, [known for known in classes if known not in counts] or classes)
        hint = f", perhaps {near!r} renamed" if near else ""
        listed.append(f"{label!r} ({counts[label]:,} images{hint})")
    more = f" and {len(extra) - _LISTED} more" if len(extra) > _LISTED else ""
    return (
        f"domain {name!r} has other classes than those of the stream: {', '.join(listed)}{more}. The stream has "
        f"{some(classes)}. Rename the folders, leave those images out with --extra-classes drop, or, if the domain "
        f"has no labels, say so: --unlabelled {shlex.quote(name)}, or in a .toml file unlabelled = true."
    )


def _empty_folders(name: str, path: Path, decoded: DecodedDomain) -> tuple[str, ...]:
    """A note on class folders that hold no image: they are no classes."""
    if decoded.class_names is None or not path.is_dir():
        return ()
    root = path
    below = _folders(root)
    if len(below) == 1 and below[0] not in decoded.class_names:  # everything lies in one more folder
        root = path / below[0]
        below = _folders(root)
    known = set(decoded.class_names)
    empty = [folder for folder in below if unicodedata.normalize("NFC", folder) not in known]
    return (f"{name}: no images in {some(empty)}: no class.",) if empty else ()


def _folders(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not is_clutter(entry.name))
    except OSError:
        return []


def _shared_images(found: Mapping[str, DecodedDomain]) -> str | None:
    """A note on files that are in several domains: a target that repeats the source tells less than it seems."""
    shared = duplicates_between(replace(decoded.manifest, name=name) for name, decoded in found.items())
    if not shared:
        return None
    example = " and ".join(f"{name}: {file}" for name, file in shared[0].places[:3])
    return f"{len(shared):,} image(s) are in more than one domain, e.g. {example}."


def some(names: Sequence[str]) -> str:
    """Names in a message, of many the first."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
