"""Exemplars beside the batches of a target, for methods that see a target once."""

from __future__ import annotations

from ratp.memory import Memory
from ratp.method import Setting
from ratp.training import Batch, Batches

# Fewest images that have batch statistics.
SMALLEST = 2


class Exemplars:
    """Draws a batch of exemplars for each batch of a target: as large, or of all there are.

    Too few to have batch statistics are none.

    Args:
        setting: Recipe, randomness and device.
        stage: Number of the stage, for the generators.
        memory: Where they come from, as it is at the start of the stage; None: there is no replay.
    """

    def __init__(self, setting: Setting, stage: int, memory: Memory | None) -> None:
        self._count = min(setting.recipe.batch, len(memory)) if memory is not None else 0
        self._batches: Batches | None = None
        if memory is not None and self._count >= SMALLEST:
            self._batches = Batches(setting, "target", stage, memory.images, memory.labels)

    def draw(self) -> Batch | None:
        """Exemplars with their stored labels; None: there are none."""
        return None if self._batches is None else self._batches.draw(self._count)
