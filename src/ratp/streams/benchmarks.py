"""The paper's benchmarks: where their images lie and how they are trained on. Sizes follow the published code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratp.data.cache.decoded import DecodedDomain
from ratp.data.catalogue import data_set
from ratp.data.catalogue.locate import archives, data_folder, find_all
from ratp.data.formats.canonical import origin_of
from ratp.errors import ConfigError
from ratp.functional.transforms import CROP_FLIP, OBJECTS
from ratp.networks.backbones import IMAGENET_MEAN, IMAGENET_STD
from ratp.networks.network import NetworkConfig
from ratp.streams.catalogue import STREAMS
from ratp.streams.files import load_domains
from ratp.streams.stream import DataOptions, LoadedDomain, StreamSpec
from ratp.training.recipe import Recipe


@dataclass(frozen=True)
class _Files:
    """Finds and loads the files of a benchmark."""

    catalogue: str  # its data set in the catalogue
    names: Mapping[str, str]  # names in the catalogue by code of the domain

    def places(self, codes: Sequence[str], options: DataOptions) -> dict[str, Path]:
        folder = data_folder(Path(options.folder) if options.folder else None)
        found = find_all(folder, self.catalogue, [self.names[code] for code in codes])
        _refuse_parts(self.catalogue, found)
        return {code: found[self.names[code]] for code in codes}

    def load(self, codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
        chosen = data_set(self.catalogue)

        def describe(path: Path, decoded: DecodedDomain) -> str | None:
            return origin_of(path, decoded.manifest, chosen.domain(decoded.name).frame)

        loaded = load_domains(self.places(codes, options), size, options, classes=chosen.classes, origin=describe)
        if mixed := _mixed_frames(loaded):
            loaded[0] = replace(loaded[0], notes=(*loaded[0].notes, mixed))
        return loaded


def _refuse_parts(catalogue: str, found: Mapping[str, Path]) -> None:
    """Refuses domains of which only the first archive would be read."""
    parts = {name: archives(path.parent, name) for name, path in found.items()}
    several = [f"{name} ({', '.join(path.name for path in paths)})" for name, paths in parts.items() if len(paths) > 1]
    if several:
        folder = next(iter(found.values())).parent
        raise ConfigError(
            f"these domains of {catalogue} come in several archives: {'; '.join(several)}. "
            f"Join them in a new data folder, then use that: ratp data import {catalogue} {folder} --data NEW"
        )


def _mixed_frames(loaded: Sequence[LoadedDomain]) -> str | None:
    """Returns a note if some domains have their original frame and others that of Digits-Five."""
    original = [item.domain.name for item in loaded if "original frame" in (item.origin or "")]
    others = [item.domain.name for item in loaded if "as in Digits-Five" in (item.origin or "")]
    if not original or not others:
        return None
    return (
        f"mixed frames: {', '.join(original)} as first released, {', '.join(others)} as in Digits-Five. "
        "Import all with the same --frame to compare with other results."
    )


def _spec(name: str, files: _Files, recipe: Recipe) -> StreamSpec:
    return StreamSpec(**vars(STREAMS[name]), recipe=recipe, load=files.load, places=files.places)


_DIGITS = _Files("digits", {"MT": "mnist", "MM": "mnist_m", "SN": "svhn", "SD": "syn", "US": "usps"})
_PACS = _Files("pacs", {"P": "photo", "A": "art_painting", "C": "cartoon", "S": "sketch"})
_DOMAINNET = _Files(
    "domainnet", {"Qu": "quickdraw", "Cl": "clipart", "Pa": "painting", "In": "infograph", "Sk": "sketch", "Re": "real"}
)
_OBJECTS = Recipe(
    network=NetworkConfig(backbone="resnet50", hidden=512, dim=256),
    size=224,
    epochs=30,
    steps=50,
    lr=0.005,
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    source_transform=OBJECTS,
    target_transform=OBJECTS,
)

_MORE_OBJECTS = replace(_OBJECTS, network=replace(_OBJECTS.network, dim=512), steps=70, target_transform=CROP_FLIP)

DIGITS = _spec("digits", _DIGITS, Recipe())
PACS = _spec("pacs", _PACS, _OBJECTS)
DOMAINNET10 = _spec("domainnet10", _DOMAINNET, _MORE_OBJECTS)

BENCHMARKS = {spec.name: spec for spec in (DIGITS, PACS, DOMAINNET10)}
