"""The contract of a method: what the harness asks of RaTP and of everything it is compared with.

A method turns a domain into *phases* (:mod:`ratp.phase`); a phase is epochs × steps of one kind of update.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from ratp.contract import called, check_phases, check_state
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import RatpError
from ratp.network import Network
from ratp.phase import Phase, train
from ratp.precision import Precision
from ratp.randomness import Randomness
from ratp.recipe import Recipe, Scaling, TrainingInputs
from ratp.source_models import SourceModels
from ratp.weights import Weights, load_backbone

Statistics = Literal["running", "batch"]

_CHECKS: Mapping[str, Callable[[object, str], None]] = {
    "source_phases": check_phases,
    "target_phases": check_phases,
    "told_phases": check_phases,
    "state": check_state,
}


@dataclass(frozen=True)
class Setting:
    """What a method is built from, beside its own switches.

    Attributes:
        recipe: Sizes shared by all methods on the stream.
        classes: Class names.
        image_size: Height and width of the images.
        randomness: Source of all generators.
        device: Where to compute.
        weights: What the feature extractor starts from; None: from random numbers.
        precision: How exactly to compute.
        models: Networks trained on the source by earlier runs; None: there are none to be used.
    """

    recipe: Recipe
    classes: tuple[str, ...]
    image_size: tuple[int, int]
    randomness: Randomness
    device: torch.device
    weights: Weights | None = None
    precision: Precision = "fp32"
    models: SourceModels | None = None
    transient: ClassVar[bool] = True  # nothing in it ever changes

    def scaling(self) -> Scaling:
        """From stored images to what the network sees."""
        return Scaling(self.recipe.mean, self.recipe.std, self.device)

    def training_inputs(self, kind: Literal["source", "target"]) -> TrainingInputs:
        """From stored images to what the network sees while it trains on the source, or on a target and memory."""
        config = self.recipe.source_transform if kind == "source" else self.recipe.target_transform
        return TrainingInputs(config, self.recipe.size, self.scaling())

    def network(self) -> Network:
        """The network before any training; the same one for every method with this seed."""
        with self.randomness.scope("network"):
            network = Network(self.recipe.network, len(self.classes), self.image_size)
        if self.weights is not None:
            load_backbone(network.backbone, self.weights)
        return network.on(self.device, self.precision)

    def generator(self, *name: str | int) -> torch.Generator:
        """A generator for the use called ``name``, on the device."""
        return self.randomness.generator(*name, device=self.device)


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
        large: Values for large pretrained networks, against the defaults, which are for DTN: by dotted name.
        stream_values: Values for single streams, by stream and preset; they may set the stream's recipe too.
        needs: What it takes, in a few words: source data, memory, passes over a domain.
        ignores_targets: Whether it predicts after every target as before, so that it need not be measured again. Each
            class says so for itself; subclasses do not inherit it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    family: ClassVar[str]
    paper: ClassVar[str]
    config_type: ClassVar[type]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    large: ClassVar[Mapping[str, Any]] = {}
    stream_values: ClassVar[Mapping[tuple[str, str], Mapping[str, Any]]] = {}
    needs: ClassVar[str] = ""
    ignores_targets: ClassVar[bool] = False

    _knows_source = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Has every method remember that it was shown the source, or given the state of one that was.

        Phases and state are looked at whenever it gives them.
        """
        super().__init_subclass__(**keywords)
        for name in ("source_phases", "load_state"):
            if name in vars(cls):
                setattr(cls, name, _remembered(vars(cls)[name]))
        for name, check in _CHECKS.items():
            if name in vars(cls):
                setattr(cls, name, _checked(name, vars(cls)[name], check))

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

    @classmethod
    def evaluation_statistics(cls, config: Any) -> Statistics:
        """Which statistics BatchNorm uses when a trained model is measured on a domain."""
        del config
        return "running"

    @classmethod
    def uses_target_labels(cls, config: Any) -> bool:
        """Whether it is told the true labels of targets, to see how much better labels would help.

        Such a method gets :meth:`told_phases` in place of ``target_phases``, and every result of it says so.
        """
        del config
        return False

    def told_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """What to do on one more target domain, with its labels."""
        raise RatpError(f"{self.name} must not be told the labels of {domain.name!r}.")

    def predict_as(self, images: Tensor, stage: int) -> Tensor | None:
        """As :meth:`predict`, for images known to be of the domain of a stage; None: to know it makes no difference.

        Stages are counted as the method has learnt them: one that the guard undid has no number.
        """
        del images, stage
        return None

    def show(self, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """What the method makes of some uint8 images before learning from them, for the report."""
        del images, generator
        return {}

    def embed(self, images: Tensor) -> Tensor | None:
        """What the method makes of uint8 images before it classifies them, for the report; None: nothing to show."""
        del images
        return None

    @final
    def fit_source(self, domain: LabelledDomain) -> None:
        """Trains on the labelled source domain."""
        if not isinstance(domain, LabelledDomain):
            raise TypeError(f"fit_source takes a LabelledDomain, got {type(domain).__name__}.")
        for _ in train(self.source_phases(domain)):
            pass

    @final
    def adapt(self, domain: UnlabelledDomain) -> None:
        """Adapts to one more target domain.

        Raises:
            RatpError: If it has neither been fitted to a source nor loaded a state.
        """
        if not isinstance(domain, UnlabelledDomain):
            raise TypeError(
                f"adapt takes an UnlabelledDomain, got {type(domain).__name__}: call its unlabelled() first."
            )
        if not self._knows_source:
            raise RatpError(
                f"{self.name} has learnt nothing yet to adapt to {domain.name!r}: call fit_source first, or load_state."
            )
        for _ in train(self.target_phases(domain)):
            pass


def _remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(self: Method, *arguments: Any, **keywords: Any) -> Any:
        result = function(self, *arguments, **keywords)
        self._knows_source = True
        return result

    return call


def _checked(name: str, function: Callable[..., Any], check: Callable[[object, str], None]) -> Callable[..., Any]:
    @wraps(function)
    def call(self: Method, *arguments: Any, **keywords: Any) -> Any:
        result = function(self, *arguments, **keywords)
        check(result, called(self, name))
        return result

    return call


class OnlineMethod(Method):
    """A method that learns while it predicts, one batch after another; it can be driven by hand."""

    @abstractmethod
    def observe(self, images: Tensor) -> Tensor:
        """Logits of a batch of uint8 images; the method adapts to it, most after they are made (T3A: before)."""


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
