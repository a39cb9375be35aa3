"""The contract of a method: what the harness requires of RaTP and of everything it is compared with.

A method turns a domain into *phases* (:mod:`ratp.training.phase`); a phase is epochs × steps of one kind of update.

============================  =====================================================================
trains for many epochs        one phase, ``epochs × steps``
adapts in a single pass       one phase of one epoch, one step per batch of the domain
replaces the classifier       a phase whose step writes prototypes without a gradient
several networks              all in ``state()``; ``predict`` chooses the one that answers
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
from torch import Tensor, nn

from ratp._core.environment import Precision, Randomness
from ratp._core.state import State, Stateful, load_modes, save_modes
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import ConfigError, RatpError
from ratp.networks.network import Network
from ratp.networks.weights import Weights, load_backbone
from ratp.training.phase import ContractError, NotYetError, Phase, called, check_phases, shown, train
from ratp.training.recipe import Recipe, Scaling, TrainingInputs
from ratp.training.source_cache import AdoptedSource, SourceModels

Statistics = Literal["running", "batch"]


@dataclass(frozen=True)
class Setting:
    """Everything that a method is built from, besides its own switches.

    Attributes:
        recipe: Sizes shared by all methods on the stream.
        classes: Class names.
        image_size: Height and width of the images.
        randomness: Source of all generators.
        device: Where to compute.
        weights: Initial weights of the feature extractor; None: random.
        precision: Precision of the network.
        models: Source networks of earlier runs, or one that was trained elsewhere; None: train without them.
    """

    recipe: Recipe
    classes: tuple[str, ...]
    image_size: tuple[int, int]
    randomness: Randomness
    device: torch.device
    weights: Weights | None = None
    precision: Precision = "fp32"
    models: SourceModels | AdoptedSource | None = None

    def scaling(self) -> Scaling:
        """Returns the scaling of uint8 images into inputs of the network."""
        return Scaling(self.recipe.mean, self.recipe.std, self.device)

    def training_inputs(self, kind: Literal["source", "target"]) -> TrainingInputs:
        """Returns scaling and augmentation for training on the source, or on a target and memory."""
        config = self.recipe.source_transform if kind == "source" else self.recipe.target_transform
        return TrainingInputs(config, self.recipe.size, self.scaling())

    def network(self) -> Network:
        """Returns the untrained network; with one seed, the same for every method."""
        with self.randomness.scope("network"):
            network = Network(self.recipe.network, len(self.classes), self.image_size)
        if self.weights is not None:
            load_backbone(network.backbone, self.weights)
        return network.on(self.device, self.precision)

    def generator(self, *name: str | int) -> torch.Generator:
        """Returns a generator for the use called ``name``, on the device."""
        return self.randomness.generator(*name, device=self.device)


def check_state(state: object, giver: str) -> None:
    """Raises a ContractError unless this is a mapping from names to tensors."""
    wanted = f"{giver} must return tensors by name"
    if not isinstance(state, Mapping):
        raise ContractError(f"{wanted}; got {shown(state)}.")
    for name, value in state.items():
        if not isinstance(name, str):
            raise ContractError(f"{wanted}; the name {name!r} is not a text.")
        if value is None:
            raise NotYetError(f"{wanted}; {name!r} is None. Leave out what does not exist yet.")
        if not isinstance(value, Tensor):
            hint = "pack({…}) joins parts" if isinstance(value, Mapping) else "torch.tensor(…) makes one of numbers"
            raise ContractError(f"{wanted}; {name!r} is {shown(value)}. {hint}.")


def check_scores(scores: object, images: int, classes: int, giver: str) -> None:
    """Raises a ContractError unless this has a score per image and class; no value is read."""
    wanted = f"{giver} must return a score for every image and class, floating-point of shape ({images}, {classes})"
    if not isinstance(scores, Tensor):
        raise ContractError(f"{wanted}; got {shown(scores)}.")
    if scores.shape != (images, classes) or not scores.is_floating_point():
        kind = str(scores.dtype).removeprefix("torch.")
        hint = " Return the scores, not the best class." if scores.shape == (images,) else ""
        raise ContractError(f"{wanted}; got {kind} of shape {tuple(scores.shape)}.{hint}")


_CHECKS: Mapping[str, Callable[[object, str], None]] = {
    "source_phases": check_phases,
    "target_phases": check_phases,
    "labelled_target_phases": check_phases,
    "state": check_state,
}


class Method(Stateful, ABC):
    """A way to learn on a stream. A subclass is one file: its frozen config dataclass, its class and its phases.

    Attributes:
        name: As written on the command line.
        title: Full name.
        family: Kind of method, as the paper groups them.
        paper: Where it was published.
        config_type: Dataclass of its switches; its defaults are the preset ``official``.
        presets: Further presets, by name: values that differ from the defaults, by dotted name. They may change the
            recipe of every stream.
        large: Values for large pretrained networks that differ from the defaults, which are for DTN: by dotted name.
        stream_values: Values for single streams, by stream and preset; they may change the stream's recipe.
        needs: What it requires, in a few words: source data, memory, passes over a domain.
        ignores_targets: Whether targets change nothing, so that it is not measured again. Not inherited.
        source_free: Whether it can start from a trained network without any image of the source.
        needs_bottleneck: Whether it changes layers of the bottleneck, and so needs one.
        code_hash: sha256 of its code, if it is neither built in nor in a file of its own.
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
    code_hash: ClassVar[str | None] = None
    needs_bottleneck: ClassVar[bool] = False
    source_free: ClassVar[bool] = False

    _knows_source = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Makes every method record that it knows the source, and checks all phases and states it returns."""
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
        """Returns the phases for the labelled source domain."""

    @abstractmethod
    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns the phases for one more target domain, without labels."""

    @abstractmethod
    def predict(self, images: Tensor) -> Tensor:
        """Returns logits of uint8 images, shape (n, classes). Changes nothing."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Returns everything needed to continue after a finished stage, as named tensors."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""

    def state_dict(self) -> State:
        """Returns everything needed to continue within a stage.

        That is :meth:`state`, the attributes that ``saved`` lists, and the modes and generators of every module that
        is an attribute.
        """
        modules = {name: save_modes(module) for name, module in self._modules().items()}
        return {"state": self.state(), "modules": modules, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        own = dict(state)
        self.load_state(own.pop("state"))
        modules = self._modules()
        for name, modes in own.pop("modules").items():
            load_modes(modules[name], modes)
        super().load_state_dict(own)

    def _modules(self) -> dict[str, nn.Module]:
        return {name: value for name, value in vars(self).items() if isinstance(value, nn.Module)}

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        """Raises a ConfigError if the method cannot work with a recipe, before anything is built."""
        if cls.needs_bottleneck and recipe.network.bottleneck == "none":
            raise ConfigError(f"{cls.name} needs a bottleneck: set network.bottleneck to one or two.")

    @classmethod
    def evaluation_statistics(cls, config: Any) -> Statistics:
        """Which statistics are used when a trained model is measured on a domain, mostly by BatchNorm.

        With ``batch``, a prediction depends on the other images of a test batch.
        """
        del config
        return "running"

    @classmethod
    def uses_target_labels(cls, config: Any) -> bool:
        """Whether it uses the true labels of targets, as an upper bound; results say so.

        :meth:`labelled_target_phases` is then called instead of ``target_phases``.
        """
        del config
        return False

    def labelled_target_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns the phases for one more target domain, with its labels."""
        raise RatpError(f"{self.name} must not see the labels of {domain.name!r}.")

    def predict_for_domain(self, images: Tensor, stage: int) -> Tensor | None:
        """Predicts like :meth:`predict`, for images of a stage's domain; None if knowing the domain changes nothing.

        Stages that the guard undid do not count.
        """
        del images, stage
        return None

    def compute_logits(self, inputs: Tensor) -> Tensor | None:
        """Computes logits of normalised images, each on its own; an exported model consists of this function.

        Modules are in evaluation mode. None: the method predicts in another way, so it cannot be exported.
        """
        del inputs
        return None

    def show(self, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Returns augmented versions of some uint8 images, for the report."""
        del images, generator
        return {}

    def embed(self, images: Tensor) -> Tensor | None:
        """Returns embeddings of uint8 images, for the report; None: there are none."""
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
        """Adapts to one more target domain."""
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
    """A method that learns while it predicts, batch by batch; it can be driven by hand."""

    @abstractmethod
    def observe(self, images: Tensor) -> Tensor:
        """Returns logits of a batch of uint8 images and adapts to it, usually afterwards (T3A: before)."""


def pack(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Joins the states of several parts into one flat state."""
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def unpack(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Splits what :func:`pack` joined."""
    parts: dict[str, dict[str, Tensor]] = {}
    for full, tensor in state.items():
        part, _, name = full.partition(".")
        parts.setdefault(part, {})[name] = tensor
    return parts
