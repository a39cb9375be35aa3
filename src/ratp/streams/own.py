"""Streams of a user's own images in memory: tensors, data sets, data loaders, domains, also next to folders."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ratp.data.cache.decoded import open_decoded
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.data.in_memory import Given, is_pair, longest_side, read_images
from ratp.errors import ConfigError, nearest
from ratp.streams.catalogue import FOLDERS, STREAMS
from ratp.streams.files import load_domains, some
from ratp.streams.folders import RECIPE, domain_name, from_names, from_paths
from ratp.streams.stream import DataOptions, LoadedDomain, StreamSpec
from ratp.training.recipe import Recipe

# Images up to this side are trained on by DTN, at their own size or 32 pixels; larger ones like those in folders.
SMALL = 64
_SMALLEST = 32


def own_stream(
    source: Any,
    targets: Any,
    *,
    tests: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    name: str = "own",
) -> StreamSpec:
    """Makes a stream of your own images, for ``ratp.resolve(request, stream)``.

    A domain is a folder or zip, a tensor or array of images (uint8, or floats of 0 to 1), a tuple of such a batch and
    its labels, a map-style data set or list of images or (image, label) pairs, a ``DataLoader``, whose data set is
    read, or a ``LabelledDomain`` or ``UnlabelledDomain``. Images are resized to the recipe's size.

    A run records a hash of all images and labels, so it resumes only with the same ones. Labels of targets only serve
    to measure accuracies.

    Args:
        source: The labelled domain to begin with; ``{name: domain}`` gives it a name.
        targets: A domain, a list of domains in their order of arrival, or a dict of them by name.
        tests: Labelled images to measure accuracies on, by the name of their domain. Without them, a fifth of the
            source is held out, and a target is measured on the images it is trained on.
        classes: Class names by number, for labels that are numbers.
        name: Name of the stream.

    Returns:
        The stream, for :func:`ratp.resolve`.

    Raises:
        ConfigError: If the domains do not fit together.
    """
    if name in STREAMS:
        raise ConfigError(f"a stream of your own cannot be called {name!r}, the name of a built-in one.")
    first, others = _named(source, "source"), _named(targets, "target")
    if len(first) != 1:
        raise ConfigError(f"there is one source; got {len(first)} domains. Those that come later are targets.")
    if not others:
        raise ConfigError("a stream needs at least one target, got none.")
    pairs = [*first, *others]
    paths = [Path(data) for _, data in pairs if isinstance(data, str | Path)]
    in_files = len(paths) == len(pairs) and not tests
    if in_files and not isinstance(source, Mapping) and not isinstance(targets, Mapping):
        return from_paths(paths[0], paths[1:])
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        raise ConfigError("two domains have the same name: name them, e.g. targets={'rain': …, 'night': …}.")
    if in_files:
        return from_names(dict(zip(by_name, paths, strict=True)))
    if odd := [test for test in tests or () if test not in by_name]:
        near = nearest(odd[0], list(by_name))
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(f"tests for {odd[0]!r}, which is no domain.{hint} The domains are {some(list(by_name))}.")
    order = tuple(by_name)
    recipe = _recipe(order[0], by_name[order[0]])

    def load(codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
        parts = {code: by_name[code] for code in codes}
        return _load(parts, tests or {}, tuple(classes or ()), size, options)

    return StreamSpec(
        name=name,
        title="own images",
        domains=dict.fromkeys(order, "own images"),
        orders={"default": order},
        recipe=recipe,
        load=load,
        values=FOLDERS if recipe is RECIPE else "",
    )


def _named(given: Any, usual: str) -> list[tuple[str, Any]]:
    """Returns domains with their names."""
    if isinstance(given, Mapping):
        return [(str(name), data) for name, data in given.items()]
    several = isinstance(given, list | tuple) and not is_pair(given)
    listed = list(given) if several else [given]
    numbers = [f"{usual}{number}" for number in range(1, len(listed) + 1)] if len(listed) != 1 else [usual]
    return [(_name_of(data) or number, data) for data, number in zip(listed, numbers, strict=True)]


def _name_of(data: Any) -> str | None:
    if isinstance(data, LabelledDomain | UnlabelledDomain):
        return data.name
    return domain_name(Path(data)) if isinstance(data, str | Path) else None


def _recipe(name: str, source: Any) -> Recipe:
    """Returns the recipe for images like the first one of the source."""
    if isinstance(source, str | Path):
        return RECIPE
    images = source.images if isinstance(source, LabelledDomain | UnlabelledDomain) else source
    side = longest_side(images, f"domain {name!r}")
    return RECIPE if side > SMALL else Recipe(size=max(side, _SMALLEST), steps=RECIPE.steps)


def _load(
    parts: Mapping[str, Any], tests: Mapping[str, Any], classes: tuple[str, ...], size: int, options: DataOptions
) -> list[LoadedDomain]:
    """Loads all domains and their test sets; reports all mistakes at once, but for those of the source, at once."""
    source, *targets = parts
    first = _load_one(source, parts[source], classes, size, options, is_source=True)
    if not isinstance(first.domain, LabelledDomain):
        raise ConfigError(f"the source {source!r} has no labels: give (images, labels), or a data set with labels.")
    known = first.domain.classes
    loaded, problems = [first], list[str]()
    for name in targets:
        try:
            loaded.append(_load_one(name, parts[name], known, size, options))
        except ConfigError as error:
            problems += error.problems
    for place, item in enumerate(loaded):
        name = item.domain.name
        if name not in tests:
            continue
        try:
            test = _load_one(name, tests[name], known, size, options).domain
        except ConfigError as error:
            problems += [f"tests: {problem}" for problem in error.problems]
            continue
        if isinstance(test, LabelledDomain):
            loaded[place] = replace(item, test=test)
        else:
            problems.append(f"the tests of {name!r} have no labels: give (images, labels).")
    if problems:
        raise ConfigError(problems)
    return loaded


def _load_one(
    name: str, data: Any, classes: tuple[str, ...], size: int, options: DataOptions, *, is_source: bool = False
) -> LoadedDomain:
    if isinstance(data, str | Path):
        return _load_files(name, Path(data), None if is_source else classes, size, options)
    where = f"domain {name!r}"
    if isinstance(data, LabelledDomain | UnlabelledDomain):
        images = read_images(data.images, (size, size), where).images
        return LoadedDomain(replace(data, name=name, images=images))
    found = read_images(data, (size, size), where)
    if found.labels is None:
        return LoadedDomain(UnlabelledDomain(name, found.images))
    names = classes if classes else _class_names(found, where)
    domain = LabelledDomain(name, found.images, _numbers(found, names, where, is_source=is_source), names)
    missing = [label for number, label in enumerate(names) if not bool((domain.labels == number).any())]
    unlearnt = ", which the model therefore cannot learn" if is_source else ""
    return LoadedDomain(domain, notes=(f"{name}: no images of {some(missing)}{unlearnt}.",) if missing else ())


def _load_files(
    name: str, path: Path, classes: tuple[str, ...] | None, size: int, options: DataOptions
) -> LoadedDomain:
    """Loads a folder or zip; without ``classes`` it is the source, which has its own."""
    if classes is not None:
        progress = None if options.progress is None else partial(options.progress, name)
        decoded = open_decoded(path, size, on_bad=options.on_bad, labelled=True, sure=True, progress=progress)
        if decoded.class_names is None:
            files = tuple(file.name for file in decoded.manifest.usable)
            return LoadedDomain(UnlabelledDomain(name, decoded.images, decoded.manifest.hash), files=files)
    (loaded,) = load_domains({name: path}, size, options, classes=classes)
    return loaded


def _class_names(found: Given, where: str) -> tuple[str, ...]:
    """Returns the class names of a source: its own, or its numbers as text."""
    labels = found.labels or ()
    texts = {label for label in labels if isinstance(label, str)}
    if texts:
        return tuple(sorted(texts))
    if found.classes:
        return found.classes
    numbers = {label for label in labels if isinstance(label, int)}
    if min(numbers):
        raise ConfigError(
            f"{where}: labels must count from 0, got {min(numbers)}..{max(numbers)}. Subtract {min(numbers)}, or give "
            "class names as labels."
        )
    return tuple(str(number) for number in range(max(numbers) + 1))


def _numbers(found: Given, names: Sequence[str], where: str, *, is_source: bool) -> torch.Tensor:
    """Returns labels as indices into ``names``: matched by name where there are names, else by number."""
    own, labels = found.classes, found.labels or ()
    if own and not is_source and set(own) & set(names):
        labels = tuple(own[label] if isinstance(label, int) and label < len(own) else label for label in labels)
    index = {name: number for number, name in enumerate(names)}
    numbers = [index.get(label, -1) if isinstance(label, str) else label for label in labels]
    odd = {label for label, number in zip(labels, numbers, strict=True) if not 0 <= number < len(names)}
    if odd:
        raise ConfigError(
            f"{where} has labels that are no classes: {some(_sorted(odd))}. The classes are {some(list(names))}"
            f"{'' if is_source else ', from the source'}; leave such images out."
        )
    return torch.tensor(numbers)


def _sorted(labels: Collection[int | str]) -> list[str]:
    return [str(label) for label in sorted(labels, key=lambda label: (isinstance(label, str), label))]
