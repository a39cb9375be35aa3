"""What folders in a folder are: the classes of a domain, or domains with classes of their own.

Nothing but names can tell. Domains of a stream have classes in common, so if most of the folders hold two or more
folders that others hold too, all are domains, unless each of these has images beside them. Any others are classes, and
what lies in folders within a class belongs to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

Parts = tuple[str, ...]  # the path of a folder below another, part by part

LEVELS = 2  # of folders above a domain: FOLDER/DATASET/DOMAIN
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})  # are no classes
_IN_COMMON = 2  # classes: fewer than two are nothing to tell apart, and many classes keep theirs in a folder "images"


def places_of(names: Iterable[str]) -> frozenset[Parts]:
    """The folders that files of these names lie in."""
    return frozenset(tuple(folder.split("/")) if folder else () for folder in {n.rpartition("/")[0] for n in names})


def inside(places: Collection[Parts]) -> dict[str, frozenset[Parts]]:
    """By the name of every folder, the places in it."""
    found: dict[str, set[Parts]] = {}
    for place in places:
        if place:
            found.setdefault(place[0], set()).add(place[1:])
    return {name: frozenset(found[name]) for name in sorted(found)}


def domains_among(places: Collection[Parts], levels: int = LEVELS) -> list[Parts]:
    """The folders that are domains, if those in a folder are domains or all hold some; none if they are classes.

    Args:
        places: Where images lie, below the folder.
        levels: How deep to look.
    """
    below = inside(places)
    held = {name: [n for n in inside(within) if n.lower() not in _SPLITS] for name, within in below.items()}
    shared = Counter(folder for folders in held.values() for folder in folders)
    alike = [name for name, folders in held.items() if sum(shared[folder] > 1 for folder in folders) >= _IN_COMMON]
    if 2 * len(alike) > len(below) and any(() not in below[name] for name in alike):
        return [(name,) for name in below]
    if levels == 1:
        return []
    deeper = {name: domains_among(within, levels - 1) for name, within in below.items()}
    return [(name, *domain) for name, found in deeper.items() for domain in found] if all(deeper.values()) else []
