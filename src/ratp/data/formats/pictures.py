"""Labelled pictures on their way into a domain, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ratp.errors import RatpError, unknown


class ImageBytes(NamedTuple):
    """An image file in memory.

    Attributes:
        data: Its content.
        ending: The ending of its name, with the dot.
    """

    data: bytes
    ending: str


@dataclass(frozen=True)
class Pictures:
    """Labelled pictures, read one at a time.

    Attributes:
        classes: The class of every picture.
        read: Gives the picture of that position, or raises :class:`~ratp.data.listing.BadImage` with its name and
            the reason.
        notes: What is worth knowing about them.
        unreadable: What could not even be listed, each with the reason.
    """

    classes: Sequence[str]
    read: Callable[[int], ImageBytes]
    notes: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.classes)


def joined(parts: Sequence[Pictures]) -> Pictures:
    """All pictures of ``parts``, one after the other."""
    places = [(part, k) for part in parts for k in range(len(part))]
    return Pictures(
        [part.classes[k] for part, k in places],
        lambda position: places[position][0].read(places[position][1]),
        tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        tuple(dict.fromkeys(problem for part in parts for problem in part.unreadable)),
    )


def selected(pictures: Pictures, classes: Collection[str]) -> Pictures:
    """The pictures of some classes.

    Raises:
        RatpError: If there is no picture of one of them.
    """
    found = set(pictures.classes)
    for label in classes:
        if label not in found:
            raise RatpError(unknown("class", label, found))
    places = [k for k, label in enumerate(pictures.classes) if label in classes]
    left_out = len(found) - len(set(classes))
    note = f"{len(pictures) - len(places):,} images of {left_out:,} other classes were left out."
    return _at(places, pictures, note if left_out else None)


def thinned(pictures: Pictures, most: int) -> Pictures:
    """No more than so many of the pictures, chosen by chance, always the same ones, in their order."""
    if len(pictures) <= most:
        return pictures
    places = np.sort(np.random.default_rng(0).permutation(len(pictures))[:most]).tolist()
    return _at(places, pictures, f"{most:,} of {len(pictures):,} images were chosen by chance.")


def _at(places: Sequence[int], pictures: Pictures, note: str | None) -> Pictures:
    return Pictures(
        [pictures.classes[k] for k in places],
        lambda position: pictures.read(places[position]),
        (*pictures.notes, *([note] if note else [])),
        pictures.unreadable,
    )
