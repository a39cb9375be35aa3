"""The published data sets: their domains, files and classes, read from ``sources.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ratp.data.formats.frames import Frame
from ratp.errors import RatpError, unknown

Part = Literal["train", "test", "all"]


@dataclass(frozen=True)
class SourceFile:
    """A file on the web."""

    name: str
    urls: tuple[str, ...]  # its addresses, best first
    size: int | None = None
    sha256: str | None = None
    part: Part = "all"  # which part of the domain is in it
    images: int | None = None  # number of images in it; 0 for labels and lists, None if not known


@dataclass(frozen=True)
class DomainSource:
    """Where a domain comes from."""

    name: str
    files: tuple[SourceFile, ...] = ()  # what to download; empty if there is no reliable address
    parts: tuple[Part, ...] = ("all",)  # which parts of it make up the domain in the benchmark streams
    manual: str = ""  # how to get it by hand
    rebuilds: bool = False  # whether it can be rebuilt after its published recipe
    published: int | None = None  # number of images the benchmark was published with, where files do not say
    terms: str = ""  # what its authors allow, where they restrict it
    collected: tuple[str, ...] = ()  # what its files are called in a collection of all domains, if there is one
    frame: Frame | None = None  # how that collection frames its images, if not as they were first released

    def chosen(self) -> tuple[SourceFile, ...]:
        """The files of the parts that make up the domain."""
        return tuple(file for file in self.files if file.part in self.parts)

    def images(self) -> int | None:
        """How many images those files hold, if that is known."""
        counts = [file.images for file in self.chosen()]
        return None if not counts or None in counts else sum(count for count in counts if count)


@dataclass(frozen=True)
class DataSet:
    """A published data set."""

    name: str  # as written on the command line; also the folder of its domains
    title: str
    classes: tuple[str, ...]  # its classes, or those of them that the benchmark uses
    domains: Mapping[str, DomainSource]
    is_selection: bool = False  # whether ``classes`` are only some of those published
    most: int | None = None  # number of images per domain that the benchmark uses at most; None: all of them

    def domain(self, name: str) -> DomainSource:
        """The source of a domain."""
        if name not in self.domains:
            raise RatpError(unknown(f"domain of {self.name}", name, self.domains))
        return self.domains[name]


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def _read() -> dict[str, DataSet]:
    tables = tomllib.loads(Path(__file__).with_name("sources.toml").read_text(encoding="utf-8"))
    found = {}
    for name, table in tables.items():
        domains = {}
        for domain, source in table["domains"].items():
            files = [SourceFile(**_tuples(file)) for file in source.get("files", ())]
            frame = Frame(**source["frame"]) if "frame" in source else None
            domains[domain] = DomainSource(domain, **_tuples({**source, "files": files, "frame": frame}))
        found[name] = DataSet(name, **_tuples({**table, "domains": domains}))
    return found


CATALOGUE: Mapping[str, DataSet] = _read()
DIGITS = CATALOGUE["digits"].classes
PACS_CLASSES = CATALOGUE["pacs"].classes
DOMAINNET_10 = CATALOGUE["domainnet"].classes


def data_set(name: str) -> DataSet:
    """A data set of the catalogue."""
    if name not in CATALOGUE:
        raise RatpError(unknown("data set", name, CATALOGUE))
    return CATALOGUE[name]


def find_sources(name: str) -> tuple[DataSet, tuple[DomainSource, ...]]:
    """What a user means by a name: all domains of a data set, or one domain.

    Where several sets have a domain of that name, it is ``set/domain``. Case does not matter, nor whether words are
    joined by ``-`` or ``_``.
    """
    plain = name.strip().lower().replace("-", "_")
    first, slash, second = plain.partition("/")
    if slash:
        chosen = data_set(first)
        return chosen, (chosen.domain(second),)
    if plain in CATALOGUE:
        return CATALOGUE[plain], tuple(CATALOGUE[plain].domains.values())
    owners = [entry for entry in CATALOGUE.values() if plain in entry.domains]
    if len(owners) > 1:
        ways = " or ".join(f"{entry.name}/{plain}" for entry in owners)
        raise RatpError(f"{name!r} is a domain of {len(owners)} data sets. Write {ways}.")
    if not owners:
        names = {*CATALOGUE, *(domain for entry in CATALOGUE.values() for domain in entry.domains)}
        raise RatpError(unknown("data set or domain", name, names))
    return owners[0], (owners[0].domains[plain],)
