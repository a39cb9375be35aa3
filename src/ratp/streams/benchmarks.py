"""The paper's benchmarks: Digits, PACS and ten classes of DomainNet, with its sizes, splits and orders.

Sizes follow the published code. Every order of the paper has a name: ``default`` is the first main order,
``reverse`` the second where there is one, ``1`` to ``10`` are the ten orders of its appendix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratp.backbones import IMAGENET_MEAN, IMAGENET_STD
from ratp.data.origins import origin_of
from ratp.data.place import data_folder, find_all
from ratp.data.sources import data_set
from ratp.network import NetworkConfig
from ratp.parts.transforms import CROP_FLIP, OBJECTS
from ratp.recipe import Recipe
from ratp.stream import DataOptions, LoadedDomain, StreamSpec
from ratp.streams.files import load_domains


@dataclass(frozen=True)
class _Files:
    """The files of a benchmark.

    Attributes:
        catalogue: Its data set in the catalogue.
        names: From the codes of its domains to their names there.
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
            origin=lambda path, decoded: origin_of(path, decoded.manifest),
        )


_DIGITS = _Files("digits", {"MT": "mnist", "MM": "mnist_m", "SN": "svhn", "SD": "syn", "US": "usps"})
_PACS = _Files("pacs", {"P": "photo", "A": "art_painting", "C": "cartoon", "S": "sketch"})
_DOMAINNET = _Files(
    "domainnet",
    {"Qu": "quickdraw", "Cl": "clipart", "Pa": "painting", "In": "infograph", "Sk": "sketch", "Re": "real"},
)


def _orders(default: str, reverse: str | None, *ten: str) -> dict[str, tuple[str, ...]]:
    named = {"default": default} | ({"reverse": reverse} if reverse else {})
    named |= {str(number): order for number, order in enumerate(ten, start=1)}
    return {name: tuple(order.split(">")) for name, order in named.items()}


DIGITS = StreamSpec(
    name="digits",
    title="Digits, 32×32: MNIST, MNIST-M, SVHN, SYN, USPS",
    domains={
        "MT": "MNIST, handwriting",
        "MM": "MNIST-M, handwriting blended into photographs",
        "SN": "SVHN, house numbers",
        "SD": "SYN, rendered digits",
        "US": "USPS, handwriting on envelopes",
    },
    orders=_orders(
        "MT>MM>SN>SD>US",
        "US>SD>SN>MM>MT",
        "SN>MT>MM>SD>US",
        "SN>SD>MT>US>MM",
        "MM>US>MT>SD>SN",
        "MT>MM>SN>SD>US",
        "MT>MM>US>SN>SD",
        "SD>MM>SN>MT>US",
        "SD>SN>US>MM>MT",
        "SD>US>MM>SN>MT",
        "US>MT>SN>MM>SD",
        "US>SD>SN>MM>MT",
    ),
    recipe=Recipe(),
    load=_DIGITS.load,
    places=_DIGITS.places,
)

PACS = StreamSpec(
    name="pacs",
    title="PACS, 224×224: seven classes as photographs, paintings, cartoons, sketches",
    domains={"P": "photographs", "A": "art paintings", "C": "cartoons", "S": "sketches"},
    orders=_orders(
        "P>A>C>S",
        "S>C>A>P",
        "A>C>P>S",
        "A>C>S>P",
        "A>P>C>S",
        "C>A>S>P",
        "C>S>P>A",
        "P>A>C>S",
        "P>S>A>C",
        "P>S>C>A",
        "S>C>A>P",
        "S>P>C>A",
    ),
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
    name="domainnet10",
    title="DomainNet, 224×224: ten classes in six domains",
    domains={
        "Qu": "quickdraw, drawn in seconds",
        "Cl": "clipart",
        "Pa": "paintings",
        "In": "infographics",
        "Sk": "sketches",
        "Re": "real photographs",
    },
    orders=_orders(
        "Qu>Sk>Cl>In>Pa>Re",
        None,
        "Re>Pa>In>Cl>Sk>Qu",
        "Cl>In>Pa>Qu>Re>Sk",
        "Cl>Re>In>Qu>Sk>Pa",
        "In>Qu>Cl>Pa>Re>Sk",
        "Pa>Sk>Qu>In>Re>Cl",
        "Qu>Re>Cl>Pa>In>Sk",
        "Qu>Sk>Cl>In>Pa>Re",
        "Sk>In>Pa>Cl>Re>Qu",
        "Sk>Re>Pa>Cl>Qu>In",
        "Sk>Re>Qu>Pa>In>Cl",
    ),
    recipe=replace(
        PACS.recipe,
        network=replace(PACS.recipe.network, dim=512),
        steps=70,
        target_transform=CROP_FLIP,
    ),
    load=_DOMAINNET.load,
    places=_DOMAINNET.places,
)
