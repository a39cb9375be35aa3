"""What ``ratp doctor`` finds, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: What was looked at.
        found: What was found.
        ok: Whether it is as it should be.
        advice: What to do if not.
        blocks: Whether nothing can be run until it is mended.
    """

    what: str
    found: str
    ok: bool = True
    advice: str = ""
    blocks: bool = False


def some(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
