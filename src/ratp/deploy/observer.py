"""Watches what a deployed model observes: windows, the level of the alarm, and the images it does not know yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from ratp.deploy.drift import WINDOW, Alarm, Level, Part, Pending, Reference, Window, nearest
from ratp.guard.watch import LEAST_STRUCTURE, LIMITS, Predictions, picture_structure

# Recent images that are kept for a stage; images of a window that are checked for noise and recognition; windows over
# which recognition is averaged, because it costs several predictions per image.
RECENT_IMAGES, FEW, AVERAGED = 2000, 16, 4


class Observer:
    """The alarm of one version of a model.

    Args:
        references: The domains the version knows, the source first.
        source: Images of the source.
        recognition: Returns how well the model recognises images, relative to the source's, given its predictions for
            them; None if it cannot be told.

    Attributes:
        level: Level after the last window.
        recent: Images since the level last was ``fine``, in parts.
    """

    def __init__(
        self,
        references: Sequence[Reference],
        source: Tensor,
        recognition: Callable[[Tensor, Predictions], float | None],
    ) -> None:
        self._references, self._recognition = references, recognition
        self._structure = picture_structure(source[:FEW])
        self._alarm, self._pending = Alarm(), Pending()
        self.level: Level = "fine"
        self.recent: list[Tensor] = []
        self._recognised: list[float] = []  # in the last windows

    @property
    def waiting(self) -> int:
        """Number of recent images."""
        return sum(map(len, self.recent))

    @property
    def room(self) -> int:
        """Number of images that the current window still needs."""
        return WINDOW - len(self._pending)

    def observe(self, images: Tensor, found: Predictions, names: Sequence[str]) -> list[tuple[Window, tuple[str, ...]]]:
        """Returns the windows that are complete now, each with the names of the images that caused an alarm."""
        return [self._judge(part) for part in self._pending.add(images, found, names)]

    def forget(self) -> None:
        """Drops the recent images, after a stage on them came to nothing."""
        self.recent, self.level = [], "watch"

    def state(self) -> dict[str, Any]:
        """Returns what it remembers of complete windows, apart from images, as plain data."""
        return {**self._alarm.to_json(), "shown": self.level, "recognised": self._recognised}

    def restore(self, state: Mapping[str, Any], recent: Tensor) -> None:
        """Restores what :meth:`state` returned, with the recent images."""
        self._alarm, self._pending, self.level = Alarm.load(state), Pending(), state["shown"]
        self._recognised = list(map(float, state.get("recognised", ())))
        self.recent = [recent[k : k + WINDOW] for k in range(0, len(recent), WINDOW)]

    def _judge(self, part: Part) -> tuple[Window, tuple[str, ...]]:
        seen = nearest(self._references, part.found)
        self.level = self._alarm.update(seen.score)
        if self._is_noise(part.images) or (self.level == "drifted" and self._is_unknown(part)):
            self.level = "foreign"
        if self.level == "fine":
            self.recent, self._recognised = [], []
            return replace(seen, level=self.level), ()
        self.recent.append(part.images)
        while sum(map(len, self.recent[1:])) >= RECENT_IMAGES:
            del self.recent[0]
        return replace(seen, level=self.level), tuple(part.names[k] for k in seen.causes)

    def _is_noise(self, images: Tensor) -> bool:
        """Whether images are noise or blank, by the guard's limit."""
        found = picture_structure(images[:FEW])
        return self._structure > LEAST_STRUCTURE and found / self._structure < LIMITS.structure

    def _is_unknown(self, part: Part) -> bool:
        """Whether the model recognises nothing in the last windows, by the guard's limit."""
        found = self._recognition(part.images[:FEW], Predictions(part.found.probabilities[:FEW]))
        if found is None:
            return False
        self._recognised = [*self._recognised[1 - AVERAGED :], found]
        return mean(self._recognised) < LIMITS.recognition


def recent_images(observer: Observer) -> Tensor | None:
    """Returns the recent images; None if there are none."""
    return torch.cat(observer.recent) if observer.recent else None
