"""The contract of a method: what the harness asks of RaTP and of everything it is compared with.

A method turns a domain into *phases*; a phase is epochs × steps of one kind of update. The harness owns the
loop around them, so that it can show progress, measure within a stage and drive several runs at once,
while a method says only what one step and the work between epochs are.

============================  =====================================================================
trains for many epochs        one phase, ``epochs × steps``
adapts in a single pass       one phase of one epoch, a step a batch of the domain
replaces the classifier       a phase whose step writes prototypes and takes no gradient
several networks              all in ``state()``; ``predict`` says which one answers
trains generators, heads      further phases in the same list, or a second optimiser in ``step``
does nothing on targets       no phase
============================  =====================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.randomness import Randomness
from ratp.recipe import Recipe, Scaling


@dataclass(frozen=True)
class Setting:
    """What a method is built from, beside its own switches.

    Attributes:
        recipe: Sizes shared by all methods on the stream.
        classes: Class names.
        image_size: Height and width of the images.
        randomness: Source of all generators.
        device: Where to compute.
    """

    recipe: Recipe
    classes: tuple[str, ...]
    image_size: tuple[int, int]
    randomness: Randomness
    device: torch.device

    def scaling(self) -> Scaling:
        """From stored images to what the network sees."""
        return Scaling(self.recipe.mean, self.recipe.std, self.device)


class Phase(ABC):
    """A stretch of training: ``epochs`` times ``steps`` updates of one kind.

    Attributes:
        name: Short name for progress and journal.
        epochs: Number of epochs.
        steps: Updates an epoch.
    """

    name: str
    epochs: int
    steps: int

    @abstractmethod
    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Work on the host before an epoch (learning rate, pseudo labels); returns what to record of it."""

    @abstractmethod
    def step(self) -> dict[str, Tensor]:
        """One update. Returns scalars on the device, by name; reads none of them back."""

    @abstractmethod
    def finish(self) -> dict[str, float]:
        """Work after the last epoch (memory, old model); returns what to record of it."""


@dataclass(frozen=True)
class Tick:
    """A moment of training, as the loop hands it out.

    Attributes:
        phase: The phase under way.
        epoch: Its epoch, from 0.
        step: Steps done in this epoch.
        means: Means over the epoch so far of what the steps returned, still on the device.
        statistics: What ``begin_epoch`` returned.
        epoch_done: Whether this was the last step of the epoch.
    """

    phase: Phase
    epoch: int
    step: int
    means: Mapping[str, Tensor]
    statistics: Mapping[str, float]
    epoch_done: bool


def train(phases: Sequence[Phase]) -> Iterator[Tick | dict[str, float]]:
    """The loop: drives phases to their end, yielding a tick a step and, last, each ``finish`` record."""
    for phase in phases:
        for epoch in range(phase.epochs):
            statistics = phase.begin_epoch(epoch)
            means: dict[str, Tensor] = {}
            for step in range(1, phase.steps + 1):
                for name, value in phase.step().items():
                    value = value.detach().float()
                    means[name] = means[name] + (value - means[name]) / step if name in means else value
                yield Tick(phase, epoch, step, means, statistics, step == phase.steps)
        yield phase.finish()


class Method(ABC):
    """A way to learn on a stream.

    A subclass is one file: its frozen config dataclass and its class.

    Attributes:
        name: As written on the command line.
        title: Full name.
        family: Kind of method, as the paper groups them.
        paper: Where it was published.
        config_type: Dataclass of its switches; its defaults are the preset ``official``.
        presets: Further sets of values, by name: changes against the defaults, by dotted name.
        stream_values: Values for single streams, by stream and preset; they may set the stream's recipe too.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    family: ClassVar[str]
    paper: ClassVar[str]
    config_type: ClassVar[type]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    stream_values: ClassVar[Mapping[tuple[str, str], Mapping[str, Any]]] = {}

    @abstractmethod
    def __init__(self, setting: Setting, config: Any) -> None:
        """Builds the method, untrained."""

    @abstractmethod
    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """What to do on the labelled source domain."""

    @abstractmethod
    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """What to do on one more target domain, without labels."""

    @abstractmethod
    def predict(self, images: Tensor) -> Tensor:
        """Logits of uint8 images, shape (n, classes). Changes nothing."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on after a finished stage, as named tensors."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""

    def show(self, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """What the method makes of some uint8 images before learning from them, for the report."""
        del images, generator
        return {}

    @final
    def fit_source(self, domain: LabelledDomain) -> None:
        """Trains on the labelled source domain."""
        if not isinstance(domain, LabelledDomain):
            raise TypeError(f"fit_source takes a LabelledDomain, got {type(domain).__name__}.")
        for _ in train(self.source_phases(domain)):
            pass

    @final
    def adapt(self, domain: UnlabelledDomain) -> None:
        """Adapts to one more target domain."""
        if not isinstance(domain, UnlabelledDomain):
            raise TypeError(
                f"adapt takes an UnlabelledDomain, got {type(domain).__name__}: call its unlabelled() first."
            )
        for _ in train(self.target_phases(domain)):
            pass


def pack(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One flat state from the states of several parts."""
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def unpack(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The states of the parts :func:`pack` joined."""
    parts: dict[str, dict[str, Tensor]] = {}
    for full, tensor in state.items():
        part, _, name = full.partition(".")
        parts.setdefault(part, {})[name] = tensor
    return parts
