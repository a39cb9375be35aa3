"""What there is to say about a published data set: its domains, their files and the way by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ratp.errors import RatpError, unknown

Part = Literal["train", "test", "all"]


@dataclass(frozen=True)
class SourceFile:
    """A file on the web.

    Attributes:
        name: What to call it here.
        urls: Its addresses, best first.
        size: Number of bytes, if known.
        sha256: Its hash, if known.
        part: Which part of the domain is in it.
        images: Number of images in it; 0 for labels and lists, None if not known.
    """

    name: str
    urls: tuple[str, ...]
    size: int | None = None
    sha256: str | None = None
    part: Part = "all"
    images: int | None = None


@dataclass(frozen=True)
class DomainSource:
    """Where a domain comes from.

    Attributes:
        name: Of the domain.
        files: What to download; empty if there is no reliable address.
        parts: Which parts of it make up the domain in the benchmark streams.
        manual: How to get it by hand.
        rebuilds: Whether it can be rebuilt after its published recipe.
        published: Number of images the benchmark was published with, where files do not say.
        terms: What its authors allow, where they restrict it.
        collected: What its files are called in a collection of all domains, if there is one.
    """

    name: str
    files: tuple[SourceFile, ...] = ()
    parts: tuple[Part, ...] = ("all",)
    manual: str = ""
    rebuilds: bool = False
    published: int | None = None
    terms: str = ""
    collected: tuple[str, ...] = ()

    def chosen(self) -> tuple[SourceFile, ...]:
        """The files of the parts that make up the domain."""
        return tuple(file for file in self.files if file.part in self.parts)

    def images(self) -> int | None:
        """How many images those files hold, if that is known."""
        counts = [file.images for file in self.chosen()]
        return None if not counts or None in counts else sum(count for count in counts if count)


@dataclass(frozen=True)
class DataSet:
    """A published data set.

    Attributes:
        name: As written on the command line; also the folder of its domains.
        title: A line on what it is.
        classes: Its classes, or those of them that the benchmark uses.
        is_selection: Whether ``classes`` are only some of those published.
        domains: Its domains by name.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    domains: Mapping[str, DomainSource]
    is_selection: bool = False

    def domain(self, name: str) -> DomainSource:
        """The source of a domain.

        Raises:
            RatpError: If the data set has no such domain.
        """
        if name not in self.domains:
            raise RatpError(unknown(f"domain of {self.name}", name, self.domains))
        return self.domains[name]


def by_hand(what: str, where: str, name: str, files: str) -> str:
    """How to get files with a browser, and the command that takes them; ``FOLDER`` stands for the data folder.

    Args:
        what: What to download.
        where: The address of the page.
        name: Of the domain or data set, as ``ratp data import`` takes it.
        files: What to give to that command.
    """
    return f"By hand: download {what} from\n  {where}\nthen import it:\n  ratp data import {name} {files} --data FOLDER"


def by_name(*sources: DomainSource) -> dict[str, DomainSource]:
    """Sources under their names."""
    return {source.name: source for source in sources}
