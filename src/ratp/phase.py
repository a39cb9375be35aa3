"""A phase, epochs × steps of one kind of update, and the loop that drives it.

The harness owns the loop, so that it can show progress, measure within a stage and drive several runs at once, while a
method says only what one step and the work between epochs are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ratp.capture import bunches, stepper
from ratp.errors import RatpError


class Phase(ABC):
    """A stretch of training: ``epochs`` times ``steps`` updates of one kind.

    On CUDA a step may be captured: recorded once and replayed from then on, without running its Python code. A
    phase allows it by setting ``captures``, and its step then

    * does the same work on the same tensors every time: shapes, branches and Python numbers never depend on data or
      on the step's number, and nothing is read back (no ``item``, ``nonzero``, indexing by a mask);
    * changes tensors in place only, those of the optimiser and the networks too, and keeps nothing else in Python:
      what ``begin_epoch`` changes, it writes into tensors the step reads (``copy_``, ``fill_``);
    * draws from ``generators`` alone;
    * leaves the modules in the mode it would find them in after another step.

    Attributes:
        name: Short name for progress and journal.
        epochs: Number of epochs.
        steps: Updates an epoch.
        captures: Whether the step may be captured.
        generators: All generators the step draws from.
    """

    name: str
    epochs: int
    steps: int
    captures: bool = False
    generators: Sequence[torch.Generator] = ()

    @abstractmethod
    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Work on the host before an epoch (learning rate, pseudo labels); returns what to record of it."""

    @abstractmethod
    def step(self) -> dict[str, Tensor]:
        """One update. Returns scalars on the device, the same names every time; reads none of them back."""

    @abstractmethod
    def finish(self) -> dict[str, float]:
        """Work after the last epoch (memory, old model); returns what to record of it."""

    def make_ready(self, begun: int, finished: bool) -> None:
        """Makes the objects that exist by the time so many epochs have begun, or all are finished.

        Called in place of training when a stage goes on in its middle, before everything gets its values back. A phase
        that makes its objects when it is built, and later only tensors and numbers, has nothing to do.
        """
        del begun, finished


class PhaseShape(Protocol):
    """What there is to know of a phase without driving it.

    Attributes:
        name: Short name for progress and journal.
        epochs: Number of epochs.
        steps: Updates an epoch.
    """

    name: str
    epochs: int
    steps: int


@dataclass(frozen=True)
class Tick:
    """A moment of training, as the loop hands it out.

    Attributes:
        phase: The phase under way.
        epoch: Its epoch, from 0.
        step: Steps done in this epoch.
        made: How many of them since the last such moment.
        read_means: Gives ``means``, as long as no further step is made.
        statistics: What ``begin_epoch`` returned.
        epoch_done: Whether this was the last step of the epoch.
    """

    phase: PhaseShape
    epoch: int
    step: int
    made: int
    read_means: Callable[[], Mapping[str, Tensor]]
    statistics: Mapping[str, float]
    epoch_done: bool

    @cached_property
    def means(self) -> Mapping[str, Tensor]:
        """Means over the epoch so far of what the steps returned, still on the device.

        They are computed when first asked for, which has to be before the next step.
        """
        return self.read_means()


class _Means:
    """Means of a phase's scalars over an epoch, summed up where they are."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None
        self._sums: Tensor | None = None
        self.steps = 0

    def clear(self) -> None:
        """Begins an epoch. The sums stay where they are, for a captured step adds to them there."""
        self.steps = 0
        if self._sums is not None:
            self._sums.zero_()

    def add(self, scalars: Mapping[str, Tensor]) -> None:
        """Takes the scalars of one step; this much is captured."""
        if not isinstance(scalars, Mapping):
            raise RatpError(f"a step must return its scalars by name, e.g. {{'total': loss}}; got {scalars!r}.")
        names = tuple(scalars)
        if self._names is None:
            self._names = names
        elif names != self._names:
            raise RatpError(
                f"steps of a phase must return the same names: {_listed(self._names)}, then {_listed(names)}."
            )
        if not names:
            return
        wrong = [n for n, value in scalars.items() if not isinstance(value, Tensor) or value.numel() != 1]
        if wrong:
            raise RatpError(f"a step must return scalars as tensors of one number each: {_told(wrong[0], scalars)}.")
        values = [value.detach().reshape(()) for value in scalars.values()]
        if len({(value.device, value.dtype) for value in values}) > 1:
            values = [value.to(values[0].device, torch.float64) for value in values]
        if self._sums is None:
            self._sums = torch.stack(values).to(torch.float64)
        else:
            self._sums.add_(torch.stack(values).to(self._sums.device))

    def reader(self) -> Callable[[], Mapping[str, Tensor]]:
        """Gives the means after the steps so far, until the next one."""
        steps = self.steps

        def read() -> Mapping[str, Tensor]:
            if steps != self.steps:
                raise RatpError("the means of a tick must be read before the next step is made.")
            if self._names is None or self._sums is None:
                return {}
            return dict(zip(self._names, (self._sums / steps).float().unbind(), strict=True))

        return read


def _told(name: str, scalars: Mapping[str, object]) -> str:
    value = scalars[name]
    if isinstance(value, Tensor):
        return f"{name!r} has the shape {tuple(value.shape)}; take its mean, say"
    return f"{name!r} is {value!r}; write torch.tensor({value!r}), or leave it out"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _recorded(record: Mapping[str, float], where: str) -> dict[str, float]:
    """What there is to record, once all of it is seen to be numbers, as the journal takes them."""
    wanted = f"{where} must return the numbers to record by name, e.g. {{'lr': 0.1}}, or {{}}"
    if not isinstance(record, Mapping):
        raise RatpError(f"{wanted}; got {record!r}.")
    for name, value in record.items():
        if not isinstance(name, str) or not isinstance(value, int | float):
            hint = "; write float(…), or leave it out" if hasattr(value, "__float__") else ""
            raise RatpError(f"{wanted}; {name!r} is {value!r}{hint}.")
    return dict(record)


class Progress:
    """Where in its phases a training is, with what it has summed up there: all that the loop keeps.

    Attributes:
        phase: Number of the phase.
        epoch: Its epoch.
        begun: Whether ``begin_epoch`` was called for it.
        statistics: What that returned.
        means: Sums over the epoch so far.
    """

    def __init__(self) -> None:
        self.phase = 0
        self.epoch = 0
        self.begun = False
        self.statistics: dict[str, float] = {}
        self.means = _Means()

    @property
    def epochs_begun(self) -> int:
        """Epochs of the phase that have begun."""
        return self.epoch + self.begun

    def begin(self, phase: Phase) -> None:
        """Begins the epoch, unless it has been begun."""
        if not self.begun:
            self.statistics = _recorded(phase.begin_epoch(self.epoch), f"begin_epoch of the phase {phase.name!r}")
            self.means.clear()
            self.begun = True

    def next_epoch(self) -> None:
        """The epoch is over."""
        self.epoch, self.begun = self.epoch + 1, False

    def next_phase(self) -> None:
        """The phase is over."""
        self.phase, self.epoch, self.begun, self.statistics, self.means = self.phase + 1, 0, False, {}, _Means()


def train(
    phases: Sequence[Phase], *, capture: bool = False, progress: Progress | None = None
) -> Iterator[Tick | dict[str, float]]:
    """The loop: drives phases to their end, yielding a tick a step and, last, each ``finish`` record.

    Captured steps come a few at a time, with one tick.

    Args:
        phases: What to train.
        capture: Whether to capture the steps of phases that allow it. It changes no result.
        progress: Where to go on, kept up to date; None: from the start.
    """
    progress = progress or Progress()
    while progress.phase < len(phases):
        yield from _train_phase(phases[progress.phase], capture, progress)


def _train_phase(phase: Phase, capture: bool, progress: Progress) -> Iterator[Tick | dict[str, float]]:
    means = progress.means
    captures, bunch = capture and phase.captures, bunches(phase.steps)
    with stepper(lambda: means.add(phase.step()), phase.generators, capture=captures, bunch=bunch) as update:
        while progress.epoch < phase.epochs:
            progress.begin(phase)
            while means.steps < phase.steps:
                made = update(phase.steps - means.steps)
                means.steps += made
                done = means.steps == phase.steps
                yield Tick(phase, progress.epoch, means.steps, made, means.reader(), progress.statistics, done)
            progress.next_epoch()
    record = _recorded(phase.finish(), f"finish of the phase {phase.name!r}")
    progress.next_phase()
    yield record
