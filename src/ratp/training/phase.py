"""Phases, which are epochs × steps of one kind of update, and the loop that drives them.

A method defines one step and the work between epochs. The loop belongs to the harness, which shows progress, measures
within a stage, saves checkpoints and drives several runs at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ratp._core.state import State, Stateful
from ratp.errors import RatpError
from ratp.functional.numerics import sum_type
from ratp.training.cuda_graphs import bunches, stepper


class Phase(Stateful, ABC):
    """A stretch of training: ``epochs`` times ``steps`` updates of one kind.

    A run that is stopped within a stage saves the phases that have begun: their ``generators`` and the attributes that
    ``saved`` lists, such as ``saved = "_optimiser _labels"`` (:class:`ratp._core.state.Stateful`). Networks belong to
    the method, which saves them. To continue, the phases are built again, :meth:`begin` is called, and the state is
    loaded.

    On CUDA a step may be captured: recorded once, then replayed without running its Python code. A phase allows it by
    setting ``captures``, and its step then

    * does the same work on the same tensors every time: shapes, branches and Python numbers never depend on data or
      on the step's number, and nothing is read back (no ``item``, ``nonzero``, indexing by a mask);
    * changes tensors in place only, those of optimiser and networks included, and keeps no state in Python:
      what ``begin_epoch`` changes, it writes into tensors that the step reads (``copy_``, ``fill_``);
    * takes random numbers from ``generators`` only;
    * leaves the modules in the mode in which the next step expects them.

    Attributes:
        name: Short name for progress and journal.
        epochs: Number of epochs.
        steps: Updates per epoch.
        captures: Whether the step may be captured.
        generators: All generators that the step uses.
    """

    name: str
    epochs: int
    steps: int
    captures: bool = False
    generators: Sequence[torch.Generator] = ()
    saved = "generators"

    def begin(self) -> None:
        """Prepares the phase before its first epoch, and again before its state is loaded.

        For example, it binds dropout to its generator. The result must not depend on anything that training changes.
        """

    @abstractmethod
    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Prepares an epoch on the host (learning rate, pseudo-labels); returns statistics to record."""

    @abstractmethod
    def step(self) -> dict[str, Tensor]:
        """Updates once; returns scalars on the device, always by the same names, without reading them back."""

    @abstractmethod
    def finish(self) -> dict[str, float]:
        """Ends the phase after its last epoch (memory, old model); returns statistics to record."""


class ContractError(RatpError):
    """A method returns something that violates the contract."""


class NotYetError(ContractError):
    """A method returns nothing yet, but may return something after training."""


def called(method: object, function: str) -> str:
    """Returns how messages name a function of a method."""
    return f"{function} of {getattr(method, 'name', type(method).__name__)}"


def check_phases(phases: object, giver: str) -> None:
    """Raises a ContractError unless this is a list of phases that have names and lengths."""
    wanted = f"{giver} must return a list of phases, [] if there is nothing to do"
    if not isinstance(phases, Sequence):
        raise ContractError(f"{wanted}; got {shown(phases)}.")
    for phase in phases:
        if not isinstance(phase, Phase):
            raise ContractError(f"{wanted}; got one that holds {shown(phase)}.")
        kind = type(phase).__name__
        if not isinstance(getattr(phase, "name", None), str):
            raise ContractError(f"{giver}: the phase {kind} needs a name, a text.")
        for size in ("epochs", "steps"):
            value = getattr(phase, size, None)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                asked = f"the phase {kind} needs {size}, a whole number from 0"
                raise ContractError(f"{giver}: {asked}; got {shown(value)}.")


def shown(value: object) -> str:
    """Describes a value in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if is_plain else f"an object of type {type(value).__name__}"


class PhaseShape(Protocol):
    """The name and the length of a phase."""

    name: str
    epochs: int
    steps: int


@dataclass(frozen=True)
class Tick:
    """A moment of training, as the loop yields it."""

    phase: PhaseShape
    epoch: int  # its epoch, from 0
    step: int  # steps done in this epoch
    made: int  # number of steps since the previous tick
    read_means: Callable[[], Mapping[str, Tensor]]  # computes ``means``; must be called before the next step
    statistics: Mapping[str, float]  # what ``begin_epoch`` returned
    epoch_done: bool  # whether this was the last step of the epoch

    @cached_property
    def means(self) -> Mapping[str, Tensor]:
        """Means over the epoch so far of what the steps returned, on the device; read them before the next step."""
        return self.read_means()


class _Means(Stateful):
    """Means of a phase's scalars over an epoch, summed on the device."""

    saved = "_names _sums steps"

    def __init__(self) -> None:
        self._names: list[str] | None = None
        self._sums: Tensor | None = None
        self.steps = 0

    def clear(self) -> None:
        """Begins an epoch; the sums keep their memory, where a captured step adds to them."""
        self.steps = 0
        if self._sums is not None:
            self._sums.zero_()

    def add(self, scalars: Mapping[str, Tensor]) -> None:
        """Adds the scalars of one step; this is part of what is captured."""
        if not isinstance(scalars, Mapping):
            raise RatpError(f"a step must return its scalars by name, e.g. {{'total': loss}}; got {scalars!r}.")
        names = list(scalars)
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
            raise RatpError(f"a step must return scalars as tensors of one number each: {_fault(wrong[0], scalars)}.")
        values = [value.detach().reshape(()) for value in scalars.values()]
        if len({(value.device, value.dtype) for value in values}) > 1:
            values = [value.to(values[0].device, sum_type(values[0].device)) for value in values]
        if self._sums is None:
            self._sums = torch.stack(values).to(sum_type(values[0].device))
        else:
            self._sums.add_(torch.stack(values).to(self._sums.device))

    def reader(self) -> Callable[[], Mapping[str, Tensor]]:
        """Returns a function that computes the means so far, until the next step."""
        steps = self.steps

        def read() -> Mapping[str, Tensor]:
            if steps != self.steps:
                raise RatpError("the means of a tick must be read before the next step.")
            if self._names is None or self._sums is None:
                return {}
            return dict(zip(self._names, (self._sums / steps).float().unbind(), strict=True))

        return read


def _fault(name: str, scalars: Mapping[str, object]) -> str:
    value = scalars[name]
    if isinstance(value, Tensor):
        return f"{name!r} has the shape {tuple(value.shape)}; take its mean, say"
    return f"{name!r} is {value!r}; write torch.tensor({value!r}), or leave it out"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _recorded(record: Mapping[str, float], where: str) -> dict[str, float]:
    """Returns the statistics to record after checking that all are numbers."""
    wanted = f"{where} must return the numbers to record by name, e.g. {{'lr': 0.1}}, or {{}}"
    if not isinstance(record, Mapping):
        raise RatpError(f"{wanted}; got {record!r}.")
    for name, value in record.items():
        if not isinstance(name, str) or not isinstance(value, int | float):
            hint = "; write float(…), or leave it out" if hasattr(value, "__float__") else ""
            raise RatpError(f"{wanted}; {name!r} is {value!r}{hint}.")
    return dict(record)


class Progress(Stateful):
    """The state of the loop: how far training has got in its phases."""

    saved = "phase epoch begun statistics means"

    def __init__(self) -> None:
        self.phase = 0  # number of the phase
        self.epoch = 0  # its epoch
        self.begun = False  # whether ``begin_epoch`` was called for it
        self.statistics: dict[str, float] = {}  # what ``begin_epoch`` returned
        self.means = _Means()  # sums over the epoch so far

    @property
    def phases_begun(self) -> int:
        """Number of phases that have begun, finished ones included."""
        return self.phase + (self.begun or self.epoch > 0)

    def begin(self, phase: Phase) -> None:
        """Begins the epoch, unless it has begun."""
        if not self.begun:
            self.statistics = _recorded(phase.begin_epoch(self.epoch), f"begin_epoch of the phase {phase.name!r}")
            self.means.clear()
            self.begun = True

    def next_phase(self) -> None:
        """Goes to the next phase."""
        self.phase, self.epoch, self.begun, self.statistics, self.means = self.phase + 1, 0, False, {}, _Means()


def save_stage(method: Stateful, phases: Sequence[Phase], progress: Progress) -> State:
    """Returns what is needed to continue a stage: the state of progress, method and the phases that have begun."""
    begun = [phase.state_dict() for phase in phases[: progress.phases_begun]]
    return {"progress": progress.state_dict(), "method": method.state_dict(), "phases": begun}


@torch.no_grad()
def load_stage(state: Mapping[str, Any], method: Stateful, phases: Sequence[Phase], progress: Progress) -> None:
    """Restores what :func:`save_stage` returned, into a stage that was built from the same starting point."""
    progress.load_state_dict(state["progress"])
    begun = phases[: progress.phases_begun]
    for phase in begun:
        phase.begin()
    method.load_state_dict(state["method"])
    for phase, saved in zip(begun, state["phases"], strict=True):
        phase.load_state_dict(saved)


def train(
    phases: Sequence[Phase], *, capture: bool = False, progress: Progress | None = None
) -> Iterator[Tick | dict[str, float]]:
    """Drives phases to their end; yields a tick per step and, at the end of each phase, what ``finish`` returned.

    With ``capture``, the steps of phases that allow it are captured, which changes no result; they come several at a
    time, with one tick. ``progress`` says where to continue (None: from the start) and is kept up to date.
    """
    progress = progress or Progress()
    while progress.phase < len(phases):
        yield from _train_phase(phases[progress.phase], capture, progress)


def _train_phase(phase: Phase, capture: bool, progress: Progress) -> Iterator[Tick | dict[str, float]]:
    means = progress.means
    if progress.phases_begun == progress.phase:
        phase.begin()

    def step() -> None:
        means.add(phase.step())

    def eager(_: int) -> int:
        step()
        return 1

    captures = capture and phase.captures
    with stepper(step, phase.generators, bunch=bunches(phase.steps)) if captures else nullcontext(eager) as update:
        while progress.epoch < phase.epochs:
            progress.begin(phase)
            while means.steps < phase.steps:
                made = update(phase.steps - means.steps)
                means.steps += made
                done = means.steps == phase.steps
                yield Tick(phase, progress.epoch, means.steps, made, means.reader(), progress.statistics, done)
            progress.epoch, progress.begun = progress.epoch + 1, False
    record = _recorded(phase.finish(), f"finish of the phase {phase.name!r}")
    progress.next_phase()
    yield record
