"""The watch over numbers: NaN and infinities in a training, and the batch they came with.

Losses add up on the device, and one that is no number makes the sum none: it is enough to look at the means, and at the
weights, once an epoch and before anything is saved. When they are lost, the stage is made once more from what was saved
last, with the same draws, and looked at after every step of the epoch in question: that finds the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ratp.drawn import listening
from ratp.errors import TrainingError
from ratp.phase import Phase, Progress, Tick, train


class NumbersLostError(TrainingError):
    """Something is no longer a number.

    Attributes:
        phase: Number of the phase it was noticed in, within its stage.
        epoch: Epoch of that phase.
        in_weights: Whether the weights are none while all losses were some.
    """

    def __init__(self, what: str, phase: int, epoch: int, *, in_weights: bool = False) -> None:
        super().__init__(what)
        self.phase, self.epoch, self.in_weights = phase, epoch, in_weights


@dataclass(frozen=True)
class BadBatch:
    """The batch with which numbers were lost.

    Attributes:
        phase: Name of the phase.
        epoch: Its epoch, from 0.
        step: Which step of it, from 0.
        lost: What was no number after it, losses or weights; nothing if only what was made of the weights was none.
        images: Places of its images in the domain.
        memory: Places of its images in the memory.
    """

    phase: str
    epoch: int
    step: int
    lost: tuple[str, ...]
    images: tuple[int, ...]
    memory: tuple[int, ...]


def lost_numbers(values: Mapping[str, Tensor] | Mapping[str, float]) -> list[str]:
    """Names of what is no number. Waits for the device."""
    return [name for name, value in values.items() if not math.isfinite(float(value))]


def lost_weights(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that hold something that is no number. Waits for their device, once."""
    sound = {name: tensor.isfinite().all() for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not sound:
        return []
    device = next(iter(sound.values())).device
    told = torch.stack([one.to(device) for one in sound.values()]).tolist()
    return [name for name, is_sound in zip(sound, told, strict=True) if not is_sound]


class WeightWatch:
    """The watch over weights and statistics of a method's networks within a stage.

    Args:
        method: Its networks are attributes of it. Its ``state`` is not asked for, which may be incomplete till the end.
    """

    def __init__(self, method: object) -> None:
        self._method = method
        self._were_none = set(lost_weights(self._tensors()))

    def _tensors(self) -> dict[str, Tensor]:
        networks = {name: value for name, value in vars(self._method).items() if isinstance(value, nn.Module)}
        return {f"{name}.{key}": value for name, one in networks.items() for key, value in one.state_dict().items()}

    def lost(self) -> list[str]:
        """Names of those that hold something that is no number, and did not when this was made."""
        return [name for name in lost_weights(self._tensors()) if name not in self._were_none]

    def check(self, progress: Progress) -> None:
        """Raises an error if there are any.

        Args:
            progress: Where the training is.

        Raises:
            NumbersLostError: If so.
        """
        bad = self.lost()
        if bad:
            what = f"{bad[0]} holds values that are no numbers in epoch {progress.epoch}"
            raise NumbersLostError(what, progress.phase, progress.epoch, in_weights=True)


def check_numbers(values: Mapping[str, Tensor] | Mapping[str, float], progress: Progress) -> None:
    """Raises an error if something is no number.

    Args:
        values: Means or statistics of an epoch.
        progress: Where the training is.

    Raises:
        NumbersLostError: If so.
    """
    bad = lost_numbers(values)
    if bad:
        what = f"{', '.join(bad)} became {float(values[bad[0]])} in epoch {progress.epoch}"
        raise NumbersLostError(what, progress.phase, progress.epoch)


def find_batch(
    phases: Sequence[Phase],
    progress: Progress,
    error: NumbersLostError,
    capture: bool,
    weights: WeightWatch,
) -> BadBatch | None:
    """Makes steps until numbers are lost; None: they are not, this time.

    Args:
        phases: What to train, in the state ``progress`` tells of.
        progress: Where to begin.
        error: What had happened.
        capture: Whether to capture the steps before the epoch in question.
        weights: What is trained.
    """
    place = error.phase, error.epoch
    if (progress.phase, progress.epoch) < place:
        for moment in train(phases, capture=capture, progress=progress):
            if (progress.phase, progress.epoch + (isinstance(moment, Tick) and moment.epoch_done)) >= place:
                break
    steps = train(phases, progress=progress)
    while True:
        with listening() as heard:
            tick = next(steps, None)
        if not isinstance(tick, Tick):
            return None
        bad = lost_numbers(tick.means) or (weights.lost() if error.in_weights else [])
        if bad or tick.epoch_done:
            break
    if not bad and not error.in_weights:
        return None
    about = tick.phase.name, tick.epoch, tick.step - 1, tuple(bad)
    return BadBatch(*about, tuple(heard.images), tuple(heard.memory))
