"""Where published data sets can be had: addresses, sizes, hashes, and the way by hand where no address is reliable.

The addresses stand in :mod:`ratp.data.source_digits` and :mod:`ratp.data.source_pictures`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratp.data.source_digits import DIGITS, DIGITS_SET
from ratp.data.source_pictures import DOMAINNET, DOMAINNET_10, DOMAINNET_ORIGINAL, PACS, PACS_CLASSES
from ratp.data.source_types import DataSet, DomainSource, SourceFile
from ratp.errors import RatpError, unknown

__all__ = [
    "CATALOGUE",
    "DIGITS",
    "DOMAINNET_10",
    "PACS_CLASSES",
    "DataSet",
    "DomainSource",
    "SourceFile",
    "data_set",
    "find_sources",
]

CATALOGUE: Mapping[str, DataSet] = {entry.name: entry for entry in (DIGITS_SET, PACS, DOMAINNET, DOMAINNET_ORIGINAL)}


def data_set(name: str) -> DataSet:
    """A data set of the catalogue.

    Raises:
        RatpError: If there is none of that name.
    """
    if name not in CATALOGUE:
        raise RatpError(unknown("data set", name, CATALOGUE))
    return CATALOGUE[name]


def find_sources(name: str) -> tuple[DataSet, tuple[DomainSource, ...]]:
    """What a user means by a name: all domains of a data set, or one domain.

    Args:
        name: Of a data set or a domain, or ``set/domain`` where several sets have a domain of that name. Case
            does not matter, nor whether words are joined by ``-`` or ``_``.

    Raises:
        RatpError: If there is nothing of that name, or more than one domain.
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
