"""Adaptation to every window of images as it arrives.

The model that answers adapts itself. From time to time the guard compares it with the last version: if it accepts it,
the adapted model becomes the next version, else the last version answers again. A window that is foreign, or that the
model puts into one class, brings the last version back at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ratp._core.environment import Randomness
from ratp.deploy.drift import WINDOW, Level, Reference
from ratp.deploy.model import AnswerError, Model
from ratp.errors import ConfigError
from ratp.guard.watch import LIMITS, Predictions, Verdict, View, compare, decide, variety
from ratp.methods import METHODS
from ratp.training.finite import lost_weights
from ratp.training.method import Method, OnlineMethod

# Images of each known domain on which a version is judged and the alarm calibrated: four windows.
CHECKED = 4 * WINDOW
LOST = "values became NaN or infinite"
# A window is too short to tell from the previous model's classes whether its images are of use.
_LIMITS = replace(LIMITS, variety_before=0.0)


def check_online(method: Method) -> None:
    """Raises ConfigError unless a method adapts while it predicts."""
    if not isinstance(method, OnlineMethod):
        able = ", ".join(name for name, kind in METHODS.items() if issubclass(kind, OnlineMethod))
        raise ConfigError(
            f"{method.name} adapts in stages, not with every batch: choose --adapt auto, or deploy one of {able}."
        )


class Online:
    """What a model has adapted to since its last version, and how that is judged.

    Args:
        model: The model that answers, and adapts.
        scratch: Another instance of its method, which stands for the model at other times.
        good: The state of the version.
        known: Images of the domains it knows by name, the source first.
        labels: Labels of the source's images.
        randomness: Calibrates the alarm.

    Attributes:
        references: The known domains, as the model predicts them while it adapts.
        images: Number of images it has adapted to since the version.
        windows: Number of windows it has adapted to since the version.
        is_unsure: Whether a window was interrupted, so that the model is neither the version nor judged.
    """

    def __init__(
        self,
        model: Model,
        scratch: Method,
        good: Mapping[str, Tensor],
        known: Mapping[str, Tensor],
        labels: Tensor,
        randomness: Randomness,
    ) -> None:
        self._model, self._scratch = model, Model(scratch, model.version)
        self._known = {name: images[:CHECKED] for name, images in known.items()}
        self._labels, self._randomness = labels[:CHECKED], randomness
        self._source, self.references = self._look(good)
        self._next = self._source, self.references
        self._last: tuple[Tensor, Predictions] | None = None
        self._images: list[Tensor] = []
        self._names: list[str] = []
        self.images = self.windows = 0
        self.is_unsure = False

    @property
    def checked_references(self) -> list[Reference]:
        """The references of the state that was checked last."""
        return self._next[1]

    @property
    def room(self) -> int:
        """Number of images that the current window still needs."""
        return WINDOW - sum(map(len, self._images))

    def add(self, images: Tensor, names: Sequence[str]) -> None:
        """Adds images to the current window, at most as many as there is room for."""
        self._images.append(images)
        self._names += names

    def take(self) -> tuple[Tensor, list[str]]:
        """Returns the images of the current window and their names, and begins the next."""
        images, names = torch.cat(self._images), self._names
        self.clear()
        return images, names

    def clear(self) -> None:
        """Forgets the images of the current window."""
        self._images, self._names = [], []

    def judge(self, found: Predictions, level: Level) -> list[str]:
        """Returns what speaks against having adapted to a window."""
        if self._has_lost_weights():
            return [LOST]
        if level == "foreign":
            return ["the images are foreign"]
        spread = variety(found.probabilities, self._labels)
        if spread < _LIMITS.variety:
            return [f"the model puts nearly all images into one class: variety {spread:.2f}, limit {_LIMITS.variety:g}"]
        return []

    def _has_lost_weights(self) -> bool:
        """Whether weights are not finite. Sums find that in a tenth of the time, but may overflow."""
        state = self._model.method.state()
        sums = [tensor.sum() for tensor in state.values() if tensor.is_floating_point()]
        is_sound = bool(torch.stack([one.to(sums[0].device) for one in sums]).isfinite().all())
        return not is_sound and bool(lost_weights(state))

    def count(self, images: Tensor, found: Predictions) -> None:
        """Notes that the model has adapted to a window."""
        self._last = images, found
        self.images += len(images)
        self.windows += 1

    def check(self, good: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Verdict | None:
        """Compares the state of the adapted model with that of its version; None if numbers are not finite."""
        assert self._last is not None
        images, found = self._last
        try:
            before = View(self._seen(good, images), self._source)
            self._next = self._look(now)
        except AnswerError:
            return None
        after = View(found, self._next[0])
        if not after.is_finite or lost_weights(now):
            return None
        return decide(compare(before, after, structure=1.0, source_labels=self._labels), _LIMITS)

    def accept(self) -> None:
        """Takes the state that was checked last as the version."""
        self._source, self.references = self._next
        self.forget()

    def forget(self) -> None:
        """Begins anew from the version."""
        self.images = self.windows = 0
        self.is_unsure = False

    def _look(self, state: Mapping[str, Tensor]) -> tuple[Predictions, list[Reference]]:
        """Returns what a state predicts for the source while it adapts, and the references of all known domains."""
        found = {name: self._seen(state, images) for name, images in self._known.items()}
        references = [
            Reference.of(name, seen, self._randomness.generator("deploy", "alarm", name))
            for name, seen in found.items()
        ]
        return next(iter(found.values())), references

    def _seen(self, state: Mapping[str, Tensor], images: Tensor) -> Predictions:
        """Streams images past a state, window by window."""
        self._scratch.method.load_state(state)
        parts = [self._scratch.learn(part) for part in torch.split(images, WINDOW)]
        embeddings = [part.embedding for part in parts if part.embedding is not None]
        embedding = torch.cat(embeddings) if len(embeddings) == len(parts) else None
        return Predictions(torch.cat([part.probabilities for part in parts]), embedding)
