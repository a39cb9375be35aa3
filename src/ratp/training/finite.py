"""Detects NaN and infinities in training, and finds the batch that caused them.

Losses are summed on the device, and one NaN poisons the sum: it suffices to check means and weights once per epoch and
before anything is saved. If they are not finite, the stage is repeated from the last checkpoint with the same random
numbers and checked after every step of that epoch. Sampled images are logged only then, never during a capture.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ratp.errors import TrainingError
from ratp.training.phase import Phase, Progress, Tick, train

_thread = threading.local()


@dataclass
class Draws:
    """Sampled images."""

    images: list[int] = field(default_factory=list)  # indices in the stage's domain
    memory: list[int] = field(default_factory=list)  # indices in the memory


@contextmanager
def logging_draws() -> Iterator[Draws]:
    """Logs which images this thread samples within the block."""
    draws = _thread.draws = Draws()
    try:
        yield draws
    finally:
        _thread.draws = None


def log_draw(places: Tensor, own: int | None = None, among: Tensor | None = None) -> None:
    """Logs sampled images, if this thread logs them.

    Places are indices in the domain (or in ``among``, some of these), and from ``own`` on, if given, in the memory.
    """
    draws: Draws | None = getattr(_thread, "draws", None)
    if draws is None:
        return
    drawn = places.tolist()
    images = [place for place in drawn if own is None or place < own]
    draws.images += images if among is None else among[images].tolist()
    draws.memory += [place - own for place in drawn if own is not None and place >= own]


class NonFiniteError(TrainingError):
    """A loss, statistic or weight is not finite, in an epoch of a phase, which is given by its number in the stage.

    ``in_weights`` tells that weights are not finite although all losses were.
    """

    def __init__(self, what: str, phase: int, epoch: int, *, in_weights: bool = False) -> None:
        super().__init__(what)
        self.phase, self.epoch, self.in_weights = phase, epoch, in_weights


@dataclass(frozen=True)
class BadBatch:
    """The batch after which values were not finite."""

    phase: str  # its name
    epoch: int  # its epoch, from 0
    step: int  # which step of it, from 0
    # losses or weights that were not finite; empty if only values computed from the weights were not
    lost: tuple[str, ...]
    images: tuple[int, ...]  # indices of its images in the domain
    memory: tuple[int, ...]  # indices of its images in the memory


def lost_numbers(values: Mapping[str, Tensor] | Mapping[str, float]) -> list[str]:
    """Returns the names of values that are not finite. Waits for the device."""
    return [name for name, value in values.items() if not math.isfinite(float(value))]


def lost_weights(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of tensors with values that are not finite. Waits for their device once."""
    sound = {name: tensor.isfinite().all() for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not sound:
        return []
    device = next(iter(sound.values())).device
    finite = torch.stack([one.to(device) for one in sound.values()]).tolist()
    return [name for name, is_finite in zip(sound, finite, strict=True) if not is_finite]


class WeightWatch:
    """Watches the weights and statistics of a method's networks within a stage.

    These are its attributes that are modules; ``state`` may be incomplete until the stage ends.
    """

    def __init__(self, method: object) -> None:
        self._method = method
        self._were_none = set(lost_weights(self._tensors()))

    def _tensors(self) -> dict[str, Tensor]:
        networks = {name: value for name, value in vars(self._method).items() if isinstance(value, nn.Module)}
        return {f"{name}.{key}": value for name, one in networks.items() for key, value in one.state_dict().items()}

    def lost(self) -> list[str]:
        """Returns the names of tensors that have become non-finite since this object was created."""
        return [name for name in lost_weights(self._tensors()) if name not in self._were_none]

    def check(self, progress: Progress) -> None:
        """Raises a NonFiniteError if there are any."""
        bad = self.lost()
        if bad:
            what = f"{bad[0]} holds non-finite values in epoch {progress.epoch}"
            raise NonFiniteError(what, progress.phase, progress.epoch, in_weights=True)


def check_numbers(values: Mapping[str, Tensor] | Mapping[str, float], progress: Progress) -> None:
    """Raises a NonFiniteError if a mean or statistic of the epoch is not finite."""
    bad = lost_numbers(values)
    if bad:
        what = f"{', '.join(bad)} became {float(values[bad[0]])} in epoch {progress.epoch}"
        raise NonFiniteError(what, progress.phase, progress.epoch)


def find_batch(
    phases: Sequence[Phase],  # the phases, in the state that ``progress`` describes
    progress: Progress,  # where to begin
    error: NonFiniteError,  # the error to reproduce
    capture: bool,  # whether to capture the steps before that epoch
    weights: WeightWatch,
) -> BadBatch | None:
    """Repeats training to find the batch after which values were not finite; None if all are finite this time."""
    place = error.phase, error.epoch
    if (progress.phase, progress.epoch) < place:
        for moment in train(phases, capture=capture, progress=progress):
            if (progress.phase, progress.epoch + (isinstance(moment, Tick) and moment.epoch_done)) >= place:
                break
    steps = train(phases, progress=progress)
    while True:
        with logging_draws() as draws:
            tick = next(steps, None)
        if not isinstance(tick, Tick):
            return None
        bad = lost_numbers(tick.means) or (weights.lost() if error.in_weights else [])
        if bad or tick.epoch_done:
            break
    if not bad and not error.in_weights:
        return None
    about = tick.phase.name, tick.epoch, tick.step - 1, tuple(bad)
    return BadBatch(*about, tuple(draws.images), tuple(draws.memory))
