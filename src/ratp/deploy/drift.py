"""The drift alarm: do the images of the last window look, to the model, like images of a domain it knows?

A :class:`Reference` describes the model's predictions for images of one known domain. Three *indicators* compare a
window with it: mean confidence, the mix of predicted classes, and the distance between mean embeddings. Each is put on
the scale of windows of the known domain itself, and the largest is the window's *score*. The limit of the score is set
so that at most one in 200 windows of the known domain exceeds it. No label is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ratp.errors import RatpError
from ratp.guard.watch import Predictions

Level = Literal["fine", "watch", "drifted", "foreign"]

WINDOW = 64  # images
# The share of windows of a known domain that may exceed the limit, and how far beyond it one window is enough.
FALSE_ALARMS, CLEARLY = 0.005, 1.5
# Windows drawn per split of the reference images, and number of splits.
DRAWS, SPLITS = 100, 8
LEAST_IMAGES = 40
# Parts of the reference images, each of which measures the rate of false alarms once.
FOLDS = 4


@dataclass(frozen=True)
class Usual:
    """Means of the model's predictions for images: class mix and embedding, with the deviation of embeddings."""

    mix: Tensor
    centre: Tensor
    scale: Tensor

    @classmethod
    def of(cls, found: Predictions) -> Usual:
        """Computes the means of some images."""
        embedding = _embedding(found)
        scale = embedding.std(dim=0, correction=0).clamp_min(1e-6)
        return cls(found.probabilities.double().mean(dim=0), embedding.mean(dim=0), scale)

    def indicators(self, confidence: Tensor, mix: Tensor, centre: Tensor) -> Tensor:
        """Returns doubt, difference of class mix and distance of embeddings; rows are windows."""
        distance = ((centre - self.centre) / self.scale).square().mean(dim=-1).sqrt()
        return torch.stack([1 - confidence, (mix - self.mix).abs().sum(dim=-1) / 2, distance], dim=-1)


@dataclass(frozen=True)
class Window:
    """What the alarm says of one window.

    Attributes:
        images: Number of images.
        confidence: Mean probability of the predicted classes.
        mix: Total variation distance between its class mix and that of the nearest known domain.
        distance: Distance between mean embeddings, in standard deviations of the known domain.
        score: Score relative to its limit: above 1, the window is unlike all known domains.
        nearest: The known domain with the smallest score.
        level: The level after this window.
        causes: Positions of its least typical images, the least typical first.
    """

    images: int
    confidence: float
    mix: float
    distance: float
    score: float
    nearest: str
    level: Level = "fine"
    causes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reference:
    """A model's predictions for a domain it knows, and how much windows of this domain differ from them.

    Attributes:
        name: Name of the domain.
        usual: Means over its images.
        mean: Mean of each indicator over its windows.
        deviation: Standard deviation of each indicator over its windows.
        limit: The score that at most ``FALSE_ALARMS`` of its windows exceed.
        false_alarms: The share of windows beyond a limit that other images of the domain set, by cross-validation.
    """

    name: str
    usual: Usual
    mean: Tensor
    deviation: Tensor
    limit: float
    false_alarms: float

    @classmethod
    def of(cls, name: str, found: Predictions, generator: torch.Generator, size: int = WINDOW) -> Reference:
        """Calibrates the alarm on a model's predictions for images of a known domain."""
        count = len(found.probabilities)
        if count < LEAST_IMAGES:
            raise RatpError(f"{count} images of {name!r} are too few to calibrate an alarm: give {LEAST_IMAGES}.")
        known = cls._calibrated(name, found, generator, size)
        wrong = []
        for test in torch.randperm(count, generator=generator).chunk(FOLDS):
            seen = torch.ones(count, dtype=torch.bool)
            seen[test] = False
            other = cls._calibrated(name, _part(found, seen.nonzero().flatten()), generator, size)
            values = _windows(other.usual, _part(found, test), size, generator)
            wrong.append((other._scores(values) > 1).double().mean())
        return replace(known, false_alarms=torch.stack(wrong).mean().item())

    @classmethod
    def _calibrated(cls, name: str, found: Predictions, generator: torch.Generator, size: int) -> Reference:
        """Sets the limit from windows of images that each time did not serve to compute the means."""
        drawn = []
        for _ in range(SPLITS):
            half, other = torch.randperm(len(found.probabilities), generator=generator).chunk(2)
            drawn.append(_windows(Usual.of(_part(found, half)), _part(found, other), size, generator))
        values = torch.cat(drawn)
        mean, deviation = values.mean(dim=0), values.std(dim=0).clamp_min(1e-6)
        limit = ((values - mean) / deviation).amax(dim=1).quantile(1 - FALSE_ALARMS).item()
        return cls(name, Usual.of(found), mean, deviation, limit, 0.0)

    def _scores(self, values: Tensor) -> Tensor:
        """Returns scores of windows, given their indicators: above 1, a window is beyond the limit."""
        return ((values - self.mean) / self.deviation).amax(dim=-1) / self.limit

    def judge(self, found: Predictions) -> Window:
        """Compares a window with this domain."""
        confidence = found.probabilities.double().amax(dim=1)
        embedding = _embedding(found)
        values = self.usual.indicators(
            confidence.mean(), found.probabilities.double().mean(dim=0), embedding.mean(dim=0)
        )
        score = self._scores(values).item()
        odd = ((embedding - self.usual.centre) / self.usual.scale).square().mean(dim=1).sqrt() + (1 - confidence)
        doubt, mix, distance = values.tolist()
        causes = tuple(odd.argsort(descending=True)[:5].tolist())
        return Window(len(confidence), 1 - doubt, mix, distance, score, self.name, causes=causes)

    def to_json(self) -> dict[str, Any]:
        """Returns the numbers apart from tensors."""
        return {"name": self.name, "limit": self.limit, "false_alarms": self.false_alarms}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors."""
        usual = self.usual
        return {
            "mix": usual.mix,
            "centre": usual.centre,
            "scale": usual.scale,
            "mean": self.mean,
            "deviation": self.deviation,
        }

    @classmethod
    def load(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Reference:
        """Rebuilds what :meth:`to_json` and :meth:`tensors` returned."""
        usual = Usual(tensors["mix"], tensors["centre"], tensors["scale"])
        numbers = float(about["limit"]), float(about["false_alarms"])
        return cls(str(about["name"]), usual, tensors["mean"], tensors["deviation"], *numbers)


class Alarm:
    """Turns the scores of consecutive windows into a level.

    One window beyond the limit gives ``watch``; two of the last three, or one far beyond it, give ``drifted``; two
    within it give ``fine`` again. ``foreign`` is up to the caller, which can look at the images.
    """

    def __init__(self) -> None:
        self.level: Level = "fine"
        self._scores: list[float] = []

    def to_json(self) -> dict[str, Any]:
        """Returns the level and the scores it depends on."""
        return {"level": self.level, "scores": self._scores}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Alarm:
        """Rebuilds what :meth:`to_json` returned."""
        alarm = cls()
        alarm.level, alarm._scores = state["level"], list(map(float, state["scores"]))
        return alarm

    def update(self, score: float) -> Level:
        """Returns the level after one more window."""
        self._scores = [*self._scores[-2:], score]
        beyond = sum(value > 1 for value in self._scores)
        if score > CLEARLY or beyond >= 2:
            self.level = "drifted"
        elif all(value <= 1 for value in self._scores[-2:]):
            self.level = "fine"
        elif self.level == "fine":
            self.level = "watch"
        return self.level


@dataclass(frozen=True)
class Part:
    """Images of one window, what the model predicts for them, and their names."""

    images: Tensor
    found: Predictions
    names: tuple[str, ...]


class Pending:
    """Collects images until they fill a window."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._parts: list[Part] = []

    def __len__(self) -> int:
        return sum(len(part.images) for part in self._parts)

    def add(self, images: Tensor, found: Predictions, names: Sequence[str]) -> list[Part]:
        """Adds images; returns all windows that are full now."""
        parts = [*self._parts, Part(images, found, tuple(names))]
        count = sum(len(part.images) for part in parts)
        joined = Part(
            torch.cat([part.images for part in parts]),
            Predictions(
                torch.cat([part.found.probabilities for part in parts]),
                torch.cat([_embedding(part.found) for part in parts]),
            ),
            tuple(name for part in parts for name in part.names),
        )
        full = count - count % self._size
        self._parts = [_rows(joined, full, count)] if full < count else []
        return [_rows(joined, start, start + self._size) for start in range(0, full, self._size)]


def _rows(part: Part, start: int, end: int) -> Part:
    rows = torch.arange(start, end)
    return Part(part.images[start:end], _part(part.found, rows), part.names[start:end])


def nearest(references: Sequence[Reference], found: Predictions) -> Window:
    """Compares a window with all known domains and returns the comparison with the most similar one."""
    return min((reference.judge(found) for reference in references), key=lambda window: window.score)


def _windows(usual: Usual, found: Predictions, size: int, generator: torch.Generator) -> Tensor:
    """Draws windows from images with replacement; returns their indicators, shape (DRAWS, 3)."""
    drawn = torch.randint(len(found.probabilities), (DRAWS, size), generator=generator)
    probabilities = found.probabilities.double()
    confidence = probabilities.amax(dim=1)[drawn].mean(dim=1)
    embedding = _embedding(found)
    mixes, centres = ((torch.stack([part[rows].mean(dim=0) for rows in drawn])) for part in (probabilities, embedding))
    return usual.indicators(confidence, mixes, centres)


def _part(found: Predictions, rows: Tensor) -> Predictions:
    embedding = _embedding(found)
    return Predictions(found.probabilities[rows], embedding[rows])


def _embedding(found: Predictions) -> Tensor:
    """Returns the embeddings; the probabilities where a method has none."""
    return (found.probabilities if found.embedding is None else found.embedding).double()
