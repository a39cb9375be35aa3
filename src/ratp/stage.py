"""A stage of a run, under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ratp.method import Method
from ratp.midstage import Checkpoint
from ratp.numbers import NumbersLostError, WeightWatch, check_numbers
from ratp.phase import Phase, Progress, Tick
from ratp.snapshot import Marks


@dataclass
class Stage:
    """A stage under way.

    Attributes:
        number: Its number.
        phases: What it trains.
        images: Number of its images.
        marks: How method and phases were when it began.
        progress: Where in its phases it is.
        weights: The watch over what it trains.
        done: Steps made.
        seconds: Time it took before this process.
        statistics: What its finished phases recorded.
        events: What the journal said of it before this process.
    """

    number: int
    phases: Sequence[Phase]
    images: int
    marks: Marks
    progress: Progress
    weights: WeightWatch
    done: int = 0
    seconds: float = 0.0
    statistics: dict[str, float] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def begun(cls, number: int, phases: Sequence[Phase], images: int, method: Method, device: torch.device) -> Stage:
        """A stage at its beginning."""
        progress = Progress()
        marks = Marks({"progress": progress, "phases": list(phases), "method": method}, device)
        return cls(number, phases, images, marks, progress, WeightWatch(method))

    @property
    def total(self) -> int:
        """Steps of the whole stage."""
        return sum(phase.epochs * phase.steps for phase in self.phases)

    def go_on(self, checkpoint: Checkpoint) -> None:
        """Takes up the stage where a checkpoint left it.

        Raises:
            RatpError: If the checkpoint does not fit; the stage may then be half restored.
        """
        self.marks.restore(checkpoint.snapshot)
        self.done, self.seconds = checkpoint.done, checkpoint.seconds
        self.statistics, self.events = dict(checkpoint.statistics), checkpoint.events

    def checkpoint(self, seconds: float, events: list[Mapping[str, Any]]) -> Checkpoint:
        """Where the stage is.

        Args:
            seconds: Time it took in this process.
            events: What the journal says of it.
        """
        return Checkpoint(
            stage=self.number,
            snapshot=self.marks.snapshot(),
            place=(self.progress.phase, self.progress.epochs_begun),
            done=self.done,
            seconds=self.seconds + seconds,
            statistics=dict(self.statistics),
            events=events,
        )

    def check(self, tick: Tick) -> None:
        """Raises an error if losses, statistics of the epoch or weights are no numbers any more.

        Raises:
            NumbersLostError: If so.
        """
        check_numbers(tick.means, self.progress)
        check_numbers(tick.statistics, self.progress)
        self.weights.check(self.progress)

    def is_sound(self, tick: Tick | None) -> bool:
        """Whether :meth:`check` has nothing to say; None: no step was made."""
        try:
            if tick is not None:
                self.check(tick)
        except NumbersLostError:
            return False
        return True

    def lost_at_the_end(self, what: str) -> NumbersLostError:
        """Something that is no number any more after the last step."""
        last = max(len(self.phases) - 1, 0)
        epoch = self.phases[last].epochs - 1 if self.phases else 0
        return NumbersLostError(f"{what} after the last step", last, epoch, in_weights=True)


def ready(phases: Sequence[Phase], checkpoint: Checkpoint) -> None:
    """Has phases make the objects that existed when a checkpoint was made."""
    number, epochs = checkpoint.place
    for earlier in phases[:number]:
        earlier.make_ready(earlier.epochs, finished=True)
    for current in phases[number : number + 1]:
        current.make_ready(epochs, finished=False)
