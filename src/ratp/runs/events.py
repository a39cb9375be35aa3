"""What happens in a run, as :meth:`ratp.runs.run.Run.events` yields it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratp.training.phase import Tick


@dataclass(frozen=True)
class Waiting:
    """A stage waits for another run to train the network it starts from. Emitted repeatedly while waiting."""

    stage: int
    domain: str


@dataclass(frozen=True)
class StageStarted:
    """A stage begins or resumes.

    Attributes:
        stage: Its number, from 0.
        domain: Name of its domain.
        images: Number of training images.
        steps: Number of updates it takes.
        done: Number of updates made before an interruption.
    """

    stage: int
    domain: str
    images: int
    steps: int
    done: int = 0


@dataclass(frozen=True)
class Trained:
    """The stage has advanced by one or more updates."""

    stage: int
    domain: str
    tick: Tick


@dataclass(frozen=True)
class Probed:
    """The new domain was measured within its stage.

    Attributes:
        progress: Share of the stage's updates made.
        accuracy: Accuracy in percent by domain.
    """

    stage: int
    domain: str
    progress: float
    accuracy: Mapping[str, float]


@dataclass(frozen=True)
class Streamed:
    """The new domain has streamed past a copy of the model once in every order, before its stage.

    Attributes:
        accuracy: Accuracy in percent by order.
    """

    stage: int
    domain: str
    accuracy: Mapping[str, float]


@dataclass(frozen=True)
class StageFinished:
    """A stage ended and was saved. ``guard`` is the guard's verdict as in the journal; None if there was none."""

    stage: int
    domain: str
    accuracy: Mapping[str, float]
    statistics: Mapping[str, float]
    seconds: float
    guard: Mapping[str, Any] | None = None


Event = Waiting | StageStarted | Streamed | Trained | Probed | StageFinished
