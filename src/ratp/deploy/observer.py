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


class _Recent:
    """Windows of recent images, and the images that do not make a window yet."""

    def __init__(self) -> None:
        self._pending = Pending()
        self.recent: list[Tensor] = []

    @property
    def waiting(self) -> int:
        """Number of recent images."""
        return sum(map(len, self.recent))

    @property
    def room(self) -> int:
        """Number of images that the current window still needs."""
        return WINDOW - len(self._pending)


class Observer(_Recent):
    """The alarm of one version of a model.

    Args:
        references: The domains the version knows, the source first.
        source: Images of the source.
        recognition: Returns how well the model recognises images, relative to the source's, given its predictions for
            them; None if it cannot be told.
        every: Recognition is checked in one of so many windows.

    Attributes:
        references: The domains that windows are compared with.
        level: Level after the last window.
        recent: Images since the level last was ``fine``, in parts.
    """

    def __init__(
        self,
        references: Sequence[Reference],
        source: Tensor,
        recognition: Callable[[Tensor, Predictions], float | None],
        every: int = 1,
    ) -> None:
        self.references, self._recognition, self._every = references, recognition, every
        self._structure = picture_structure(source[:FEW])
        super().__init__()
        self._alarm = Alarm()
        self.level: Level = "fine"
        self._recognised: list[float] = []  # in the last windows
        self._drifted = 0  # windows since the level was fine

    def observe(self, images: Tensor, found: Predictions, names: Sequence[str]) -> list[tuple[Window, tuple[str, ...]]]:
        """Returns the windows that are complete now, each with the names of the images that caused an alarm."""
        return [self._judge(part) for part in self._pending.add(images, found, names)]

    def forget(self) -> None:
        """Drops the recent images, after a stage on them came to nothing."""
        self.recent, self.level = [], "watch"

    def state(self) -> dict[str, Any]:
        """Returns what it remembers of complete windows, apart from images, as plain data."""
        return {**self._alarm.to_json(), "shown": self.level, "recognised": self._recognised, "drifted": self._drifted}

    def restore(self, state: Mapping[str, Any], recent: Tensor) -> None:
        """Restores what :meth:`state` returned, with the recent images."""
        self._alarm, self._pending, self.level = Alarm.load(state), Pending(), state["shown"]
        self._recognised = list(map(float, state.get("recognised", ())))
        self._drifted = int(state.get("drifted", 0))
        self.recent = [recent[k : k + WINDOW] for k in range(0, len(recent), WINDOW)]

    def _judge(self, part: Part) -> tuple[Window, tuple[str, ...]]:
        seen = nearest(self.references, part.found)
        self.level = self._alarm.update(seen.score)
        if self.is_noise(part.images) or (self.level == "drifted" and self._is_unknown(part)):
            self.level = "foreign"
        if self.level == "fine":
            self.recent, self._recognised, self._drifted = [], [], 0
            return replace(seen, level=self.level), ()
        self.recent.append(part.images)
        while sum(map(len, self.recent[1:])) >= RECENT_IMAGES:
            del self.recent[0]
        return replace(seen, level=self.level), tuple(part.names[k] for k in seen.causes)

    def is_noise(self, images: Tensor) -> bool:
        """Whether images are noise or blank, by the guard's limit."""
        found = picture_structure(images[:FEW])
        return self._structure > LEAST_STRUCTURE and found / self._structure < LIMITS.structure

    def _is_unknown(self, part: Part) -> bool:
        """Whether the model recognises nothing in the last windows, by the guard's limit."""
        if self._drifted % self._every == 0:
            found = self._recognition(part.images[:FEW], Predictions(part.found.probabilities[:FEW]))
            self._recognised = [*self._recognised[1 - AVERAGED :], found] if found is not None else []
        self._drifted += 1
        return bool(self._recognised) and mean(self._recognised) < LIMITS.recognition


class Baseline(_Recent):
    """Collects the first images of a model that has no source images: what is usual will be measured on them.

    It has the interface of an :class:`Observer` that never raises the alarm. Windows of noise do not count.
    """

    level: Level = "fine"
    references: Sequence[Reference] = ()

    def observe(self, images: Tensor, found: Predictions, names: Sequence[str]) -> list[tuple[Window, tuple[str, ...]]]:
        """Returns the windows that are complete now."""
        windows = list[tuple[Window, tuple[str, ...]]]()
        for part in self._pending.add(images, found, names):
            is_noise = picture_structure(part.images[:FEW]) < LIMITS.structure
            self.recent += [] if is_noise else [part.images]
            level: Level = "foreign" if is_noise else "fine"
            windows.append((Window(len(part.images), part.found.confidence, 0.0, 0.0, 0.0, "", level), ()))
        return windows

    def forget(self) -> None:
        """Begins anew."""
        self.recent = []

    def state(self) -> dict[str, Any]:
        """Returns what it remembers, apart from images, as plain data."""
        return {**Alarm().to_json(), "shown": self.level}

    def restore(self, state: Mapping[str, Any], recent: Tensor) -> None:
        """Restores the images."""
        del state
        self._pending = Pending()
        self.recent = [recent[k : k + WINDOW] for k in range(0, len(recent), WINDOW)]


def recent_images(observer: Observer | Baseline) -> Tensor | None:
    """Returns the recent images; None if there are none."""
    return torch.cat(observer.recent) if observer.recent else None
