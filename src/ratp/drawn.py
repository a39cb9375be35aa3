"""Which images a step draws, for whoever has to know.

Training never asks. Only when a step has gone wrong it is made again, with somebody listening:

    with listening() as heard:
        phase.step()
    heard.images                                            # places in the domain, in the order they were drawn

Nothing may be heard while steps are recorded: what is replayed runs no Python.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

_thread = threading.local()


@dataclass
class Heard:
    """What was drawn.

    Attributes:
        images: Places of images in the stage's domain.
        memory: Places of images in the memory.
    """

    images: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


@contextmanager
def listening() -> Iterator[Heard]:
    """Within the block, what this thread draws is written down."""
    heard = _thread.heard = Heard()
    try:
        yield heard
    finally:
        _thread.heard = None


def drew(places: Tensor, own: int | None = None, among: Tensor | None = None) -> None:
    """Says that images were drawn.

    Args:
        places: Their places in the domain; from ``own`` on, in the memory.
        own: How many images the domain counts for; None: all places are of the domain.
        among: The images of the domain that were drawn from; None: all of them.
    """
    heard: Heard | None = getattr(_thread, "heard", None)
    if heard is None:
        return
    drawn = places.tolist()
    images = [place for place in drawn if own is None or place < own]
    heard.images += images if among is None else among[images].tolist()
    heard.memory += [place - own for place in drawn if own is not None and place >= own]
