"""Streams of a user's own images: from paths, from a folder of domains, or from a TOML file.

The TOML file::

    name = "yard"                        # default: the file's name
    order = ["day", "rain", "night"]     # the source first

    [domains]                            # folders or zips, relative to the file
    day = "pictures/day"
    rain = "rain.zip"
    night = { path = "night", unlabelled = true }   # its folders are not classes

    [recipe]                             # optional; `ratp streams show` lists the names
    size = 96
    network.backbone = "resnet18"
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ratp._core.toml import flat, read_toml
from ratp.config import override
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.data.read.layout import classes_in
from ratp.data.read.listing import is_clutter
from ratp.errors import ConfigError, unknown
from ratp.streams.benchmarks import PACS
from ratp.streams.catalogue import FOLDERS
from ratp.streams.files import load_domains, some
from ratp.streams.stream import DataOptions, LoadedDomain, StreamSpec
from ratp.training.recipe import Recipe, follow_backbone

# Photographs and drawings at 224 pixels, a pretrained ResNet-50: what the paper does on PACS.
RECIPE = PACS.recipe
# Name and place of a source that is not there, because a run starts with an adopted model.
NO_SOURCE = "no source"
_KEYS = ("name", "order", "domains", "recipe")
_OF_A_DOMAIN = ("path", "unlabelled")


def from_paths(source: Path | None, targets: Sequence[Path]) -> StreamSpec:
    """Builds a stream from a source, if there is one, and targets in their order of arrival, each a folder or a zip."""
    if not targets:
        raise ConfigError("a stream needs at least one target: --targets RAIN NIGHT")
    if source is None:
        return without_source(targets)
    paths = [source, *targets]
    again = _twice(paths)
    if again:
        raise ConfigError([f"{place} is given twice: each domain may come once." for place in again])
    return _spec(FOLDERS, dict(zip(_names(paths), paths, strict=True)), order=None, recipe=RECIPE)


def without_source(targets: Sequence[Path] = ()) -> StreamSpec:
    """Builds the stream of an adopted model of whose source no image is there."""
    if again := _twice(targets):
        raise ConfigError([f"{place} is given twice: each domain may come once." for place in again])
    named = dict(zip(_names(targets), targets, strict=True))
    return _spec(FOLDERS, {NO_SOURCE: Path(NO_SOURCE), **named}, order=None, recipe=RECIPE)


def from_names(paths: Mapping[str, Path]) -> StreamSpec:
    """Builds a stream from named folders or zips in their order of arrival, the source first."""
    if again := _twice([*paths.values()]):
        raise ConfigError([f"{place} is given twice: each domain may come once." for place in again])
    return _spec(FOLDERS, paths, order=None, recipe=RECIPE)


@dataclass(frozen=True)
class EarlierDomains:
    """The domains of a run on own images that another run continues, and what is known of them without their images.

    Attributes:
        stream: Name of the stream.
        paths: Folders or zips of the domains, by name in their order of arrival.
        unlabelled: Domains that are read without labels.
        classes: Class names.
        hashes: Hashes of the domains' files.
        size: Side of the images.
    """

    stream: str
    paths: Mapping[str, str]
    unlabelled: tuple[str, ...]
    classes: tuple[str, ...]
    hashes: Mapping[str, str]
    size: int

    def blank(self, name: str) -> LoadedDomain:
        """Returns what stands for a domain whose images are gone."""
        note = f"{name}: its images are gone ({self.paths[name]}), so it is not measured again."
        if name == next(iter(self.paths)):
            return _blank_source(name, self.classes, self.size, self.hashes[name], note)
        images = torch.zeros(len(self.classes), 3, self.size, self.size, dtype=torch.uint8)
        return LoadedDomain(UnlabelledDomain(name, images, self.hashes[name]), notes=(note,), is_gone=True)


def _blank_source(name: str, classes: Sequence[str], size: int, hashed: str, note: str) -> LoadedDomain:
    """Returns what stands for a source without images."""
    images = torch.zeros(len(classes), 3, size, size, dtype=torch.uint8)
    source = LabelledDomain(name, images, torch.arange(len(classes)), tuple(classes), manifest=hashed)
    return LoadedDomain(source, notes=(f"{note} Without them, the guard is off.",), is_gone=True)


def after_earlier(earlier: EarlierDomains, targets: Sequence[Path], unlabelled: Sequence[Path | str]) -> StreamSpec:
    """Builds the stream that continues that of an earlier run with further targets, some perhaps ``unlabelled``."""
    old = {name: Path(place) for name, place in earlier.paths.items()}
    new = dict(zip(_names(targets), targets, strict=True))
    if known := sorted(old.keys() & new.keys()):
        raise ConfigError(f"the earlier run has a domain {known[0]!r} already: rename the new folder.")
    asked = {str(name) for name in unlabelled}
    bare = frozenset((*earlier.unlabelled, *(name for name, path in new.items() if {name, str(path)} & asked)))
    paths = old | new
    if again := _twice(list(paths.values())):
        raise ConfigError([f"{place} is given twice: each domain may come once." for place in again])

    def load(codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
        there = {code: paths[code] for code in codes if code in new or paths[code].exists()}
        loaded = load_domains(there, size, options, classes=earlier.classes, unlabelled=bare)
        by_name = {item.domain.name: item for item in loaded}
        return [by_name.get(code) or earlier.blank(code) for code in codes]

    spec = _spec(earlier.stream, paths, order=None, recipe=RECIPE, unlabelled=bare)
    return replace(spec, load=load, places=None)


def from_root(root: Path) -> StreamSpec:
    """Builds the stream of all domains in a folder; the user must give the order."""
    try:
        classes = classes_in(root)
        found = sorted(
            path
            for path in root.iterdir()
            if not is_clutter(path.name) and (path.is_dir() or path.suffix.lower() == ".zip")
        )
    except OSError as error:
        raise ConfigError(f"cannot read the folder {root}: {error.strerror or error}.") from error
    if classes:
        raise ConfigError(
            f"{root} looks like one domain, with a folder for each of its classes ({some(classes)}), and a stream is a "
            f"source and its targets: {FOLDERS} --source {shlex.quote(str(root))} --targets RAIN NIGHT"
        )
    if len(found) < 2:
        raise ConfigError(
            f"{root} holds {len(found)} folder(s) or zip(s): a stream needs a source and at least one target."
        )
    paths = dict(zip(_names(found), found, strict=True))
    name = domain_name(root) or FOLDERS
    return replace(_spec(name, paths, order=None, recipe=RECIPE), needs_order=True)


def without_labels(spec: StreamSpec, asked: Sequence[str]) -> StreamSpec:
    """Returns a stream of own images with some domains, by name or path, read without labels.

    Their folders are not classes.
    """
    if not asked:
        return spec
    if spec.values != FOLDERS:
        raise ConfigError(f"--unlabelled is for targets of your own images; {spec.name} comes with its labels.")
    places = {os.path.realpath(place): code for code, place in spec.domains.items() if "\0" not in place}
    codes, problems = set(spec.unlabelled), []
    for name in asked:
        code = name if name in spec.domains else places.get(os.path.realpath(name.replace("\0", "")))
        if code is None or not name:
            problems.append(unknown("target in --unlabelled:", name, spec.domains))
        else:
            codes.add(code)
    if problems:
        raise ConfigError(problems)
    paths = {code: Path(place) for code, place in spec.domains.items()}
    made = _spec(spec.name, paths, order=spec.orders["default"], recipe=spec.recipe, unlabelled=frozenset(codes))
    return replace(made, needs_order=spec.needs_order)


def from_file(path: Path) -> StreamSpec:
    """Builds the stream that a TOML file describes."""
    data = read_toml(path, "stream file")
    problems = [unknown(f"key in {path.name}", key, _KEYS) for key in data if key not in _KEYS]
    domains, order, name, recipe = (data.get(key) for key in ("domains", "order", "name", "recipe"))
    known = domains if isinstance(domains, dict) else {}
    if len(known) < 2:
        problems.append(
            f"{path.name}: [domains] must name at least two folders or zips, e.g. day = 'pictures/day', or "
            "day = { path = 'pictures/day', unlabelled = true }."
        )
    places, unlabelled = _places(path.name, known, problems)
    if not isinstance(order, list) or not all(isinstance(item, str) for item in order) or len(order) < 2:
        problems.append(f"{path.name}: order must list at least two domains, the source first, e.g. ['day', 'night'].")
    elif isinstance(domains, dict):
        problems += [
            unknown(f"domain in the order of {path.name}:", item, domains) for item in order if item not in domains
        ]
        problems += [f"{path.name}: the order names {n!r} twice." for n, c in Counter(order).items() if c > 1]
    if name is not None and (not isinstance(name, str) or not name.strip()):
        problems.append(f"{path.name}: name must be a text.")
    sizes = RECIPE
    if recipe is not None and not isinstance(recipe, dict):
        problems.append(f"{path.name}: [recipe] must be a table of values.")
    elif recipe:
        sizes, mistakes = _sizes(recipe)
        problems += [f"{path.name}, [recipe]: {mistake}" for mistake in mistakes]
    paths = {code: _place(path.parent, place, problems) for code, place in places.items()}
    problems += [f"{path.name}: two domains lie in {place}." for place in _twice(list(paths.values()))]
    if problems:
        raise ConfigError(problems)
    assert isinstance(order, list)
    return _spec(name or path.stem, paths, order=tuple(order), recipe=sizes, unlabelled=unlabelled)


def _sizes(table: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """Returns the recipe with the values of a table, and their mistakes."""
    values, sizes = flat(table), RECIPE
    mistakes: list[str] = []
    for change in (follow_backbone, override):
        try:
            sizes = change(sizes, values)
        except ConfigError as error:
            mistakes += error.problems
    return sizes, mistakes


def _place(folder: Path, place: str, problems: list[str]) -> Path:
    """Returns the path of a domain that a file in ``folder`` names; appends to ``problems`` if it is not one."""
    try:
        if not place or "\0" in place:
            raise RuntimeError
        return folder / Path(place).expanduser()
    except RuntimeError:  # ~name, and there is no such user
        problems.append(f"{place!r} is not the path of a folder or a zip.")
        return Path(place or "''")  # unlike any other


def _twice(paths: Sequence[Path]) -> list[str]:
    """Returns the folders or zips to which several paths point."""
    places = Counter(os.path.realpath(path) for path in paths if "\0" not in str(path))
    return [place for place, count in places.items() if count > 1]


def _places(file: str, domains: Mapping[str, Any], problems: list[str]) -> tuple[dict[str, str], frozenset[str]]:
    """Returns the paths of a file's domains and which have no labels; appends mistakes to ``problems``."""
    tables = {code: given if isinstance(given, dict) else {"path": given} for code, given in domains.items()}
    wrong = {code: mistakes for code, table in tables.items() if (mistakes := _mistakes(table))}
    problems += [f"{file}, domain {code!r}: {mistake}" for code, mistakes in wrong.items() for mistake in mistakes]
    right = {code: table for code, table in tables.items() if code not in wrong}
    bare = frozenset(code for code, table in right.items() if table.get("unlabelled"))
    return {code: table["path"] for code, table in right.items()}, bare


def _mistakes(table: Mapping[str, Any]) -> list[str]:
    """Lists the mistakes in the description of a domain."""
    found = [unknown("key", key, _OF_A_DOMAIN) for key in table if key not in _OF_A_DOMAIN]
    if "path" not in table and not found:
        found.append("it needs a path, e.g. path = 'pictures/day'.")
    if not isinstance(table.get("path", ""), str):
        found.append(f"its path must be a text, e.g. 'pictures/day', got {table['path']!r}.")
    if not isinstance(table.get("unlabelled", False), bool):
        found.append(f"unlabelled must be true or false, without quotes, got {table['unlabelled']!r}.")
    return found


def _spec(
    name: str,
    paths: Mapping[str, Path],
    *,
    order: tuple[str, ...] | None,
    recipe: Recipe,
    unlabelled: frozenset[str] = frozenset(),
) -> StreamSpec:
    def places(codes: Sequence[str], options: DataOptions) -> dict[str, Path]:
        del options
        return {code: paths[code] for code in codes if code != NO_SOURCE}

    def load(codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
        there, found = places(codes, options), list[LoadedDomain]()
        if NO_SOURCE in codes:
            note = "there are no source images, so none is measured."
            found.append(_blank_source(NO_SOURCE, options.classes or (), size, NO_SOURCE, note))
        if there:
            found += load_domains(there, size, options, classes=options.classes, unlabelled=unlabelled)
        return found

    return StreamSpec(
        name=name,
        title="own images",
        domains={code: str(path) for code, path in paths.items()},
        orders={"default": order or tuple(paths)},
        recipe=recipe,
        load=load,
        places=places,
        values=FOLDERS,
        unlabelled=unlabelled,
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """Names every domain after its folder or zip, with the parent folder if two have the same name."""
    plain = [domain_name(path) for path in paths]
    twice = {name for name, count in Counter(plain).items() if count > 1}
    names = [
        f"{Path(os.path.realpath(path)).parent.name}/{n}" if n in twice else n
        for n, path in zip(plain, paths, strict=True)
    ]
    again = [name for name, count in Counter(names).items() if count > 1]
    if again:
        raise ConfigError(f"two domains would be called {again[0]!r}: give them names in a .toml file.")
    return names


def domain_name(path: Path) -> str:
    """Returns the name of a domain: that of its folder or zip."""
    named = path if path.name not in ("", "..") else Path(os.path.realpath(path))
    return (named.stem if named.suffix.lower() == ".zip" and not named.is_dir() else named.name) or str(named)
