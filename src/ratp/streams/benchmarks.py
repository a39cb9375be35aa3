"""The paper's benchmarks: where their images lie and how they are trained on. Sizes follow the published code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratp.data.catalogue import data_set
from ratp.data.catalogue.locate import data_folder, find_all
from ratp.data.formats.canonical import origin_of
from ratp.functional.transforms import CROP_FLIP, OBJECTS
from ratp.networks.backbones import IMAGENET_MEAN, IMAGENET_STD
from ratp.networks.network import NetworkConfig
from ratp.streams.catalogue import STREAMS
from ratp.streams.files import load_domains
from ratp.streams.stream import DataOptions, LoadedDomain, StreamSpec
from ratp.training.recipe import Recipe


@dataclass(frozen=True)
class _Files:
    """Finds and loads the files of a benchmark.

    Attributes:
        catalogue: Its data set in the catalogue.
        names: Names in the catalogue by code of the domain.
    """

    catalogue: str
    names: Mapping[str, str]

    def places(self, codes: Sequence[str], options: DataOptions) -> dict[str, Path]:
        folder = data_folder(Path(options.folder) if options.folder else None)
        found = find_all(folder, self.catalogue, [self.names[code] for code in codes])
        return {code: found[self.names[code]] for code in codes}

    def load(self, codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
        return load_domains(
            self.places(codes, options),
            size,
            options,
            classes=data_set(self.catalogue).classes,
            origin=lambda path, decoded: origin_of(path, decoded.manifest.hash),
        )


_DIGITS = _Files("digits", {"MT": "mnist", "MM": "mnist_m", "SN": "svhn", "SD": "syn", "US": "usps"})
_PACS = _Files("pacs", {"P": "photo", "A": "art_painting", "C": "cartoon", "S": "sketch"})
_DOMAINNET = _Files(
    "domainnet",
    {"Qu": "quickdraw", "Cl": "clipart", "Pa": "painting", "In": "infograph", "Sk": "sketch", "Re": "real"},
)


DIGITS = StreamSpec(
    **vars(STREAMS["digits"]),
    recipe=Recipe(),
    load=_DIGITS.load,
    places=_DIGITS.places,
)

PACS = StreamSpec(
    **vars(STREAMS["pacs"]),
    recipe=Recipe(
        network=NetworkConfig(backbone="resnet50", hidden=512, dim=256),
        size=224,
        epochs=30,
        steps=50,
        lr=0.005,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        source_transform=OBJECTS,
        target_transform=OBJECTS,
    ),
    load=_PACS.load,
    places=_PACS.places,
)

DOMAINNET10 = StreamSpec(
    **vars(STREAMS["domainnet10"]),
    recipe=replace(
        PACS.recipe,
        network=replace(PACS.recipe.network, dim=512),
        steps=70,
        target_transform=CROP_FLIP,
    ),
    load=_DOMAINNET.load,
    places=_DOMAINNET.places,
)

BENCHMARKS = {spec.name: spec for spec in (DIGITS, PACS, DOMAINNET10)}
