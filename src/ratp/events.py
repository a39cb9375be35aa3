"""What happens in a run, as it is handed out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratp.phase import Tick


@dataclass(frozen=True)
class Waiting:
    """A stage waits for another run, which trains the network that it begins with. It is told of again and again."""

    stage: int
    domain: str


@dataclass(frozen=True)
class StageStarted:
    """A stage begins.

    Attributes:
        stage: Its number, from 0.
        domain: Name of its domain.
        images: Number of training images.
        steps: Updates it will take.
        done: How many of them were made before, if it was interrupted.
    """

    stage: int
    domain: str
    images: int
    steps: int
    done: int = 0


@dataclass(frozen=True)
class Trained:
    """One update was made, or a few in a row."""

    stage: int
    domain: str
    tick: Tick


@dataclass(frozen=True)
class Probed:
    """The new domain was measured within its stage.

    Attributes:
        progress: Share of the stage's updates done.
        accuracy: Accuracy in percent by domain.
    """

    stage: int
    domain: str
    progress: float
    accuracy: Mapping[str, float]


@dataclass(frozen=True)
class StageFinished:
    """A stage ended and was saved.

    Attributes:
        guard: What the guard made of it, as in the journal; None: nothing.
    """

    stage: int
    domain: str
    accuracy: Mapping[str, float]
    statistics: Mapping[str, float]
    seconds: float
    guard: Mapping[str, Any] | None = None


Event = Waiting | StageStarted | Trained | Probed | StageFinished
