"""Methods made of a loss: the loss is a function, and everything else is there already."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ratp._core.environment import Randomness
from ratp.config import switch
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import ConfigError, unknown
from ratp.functional.optim import SGDConfig
from ratp.functional.transforms import NONE, TransformConfig
from ratp.methods import METHODS
from ratp.training.method import Method
from ratp.training.phase import ContractError, Phase, shown
from ratp.training.phases import NetworkMethod, NetworkPhase, SupervisedPhase
from ratp.training.recipe import Recipe, TrainingInputs

# What a loss may take, by the names of its parameters.
_PARTS = ("network", "images", "view", "labels", "confidence", "memory")
_SWITCHES = (bool, int, float, str)

Loss = Callable[..., Tensor | Mapping[str, Tensor]]


def loss_method(loss: Loss) -> type[Method]:
    """Makes a method of a loss on a batch of target images, as a decorator.

    The method trains on the source by cross-entropy. On every target it minimises the loss with SGD, and at the end it
    stores exemplars. The function takes what it needs, by the names of its parameters:

    * ``network``: the network in training mode; ``network(images)`` has ``logits`` and ``embedding``.
    * ``images``: a batch of target images, normalised, and augmented as the recipe says.
    * ``view``: another augmentation of the same images, with random crop, flip and colours if the recipe has none.
    * ``labels``: their pseudo-labels, predicted by the network before every epoch.
    * ``confidence``: the probability of each pseudo-label.
    * ``memory``: a batch of stored images of earlier domains, with ``images`` and ``labels``.

    Any other parameter needs a default and is a switch of the method. The function returns a scalar, or several by
    name, which are added. Random numbers that it draws on the CPU repeat with the run's seed.

    Args:
        loss: The function.

    Returns:
        The method, for :func:`ratp.fit` or :func:`ratp.resolve`.

    Raises:
        ConfigError: If the function's parameters do not fit.

    Examples:
        >>> @ratp.loss_method
        ... def entropy(network, images, *, weight: float = 1.0):
        ...     logits = network(images).logits
        ...     return -weight * (logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        >>> result = ratp.fit(day, [rain], method=entropy, weight=0.5)
    """
    name = loss.__name__.replace("_", "-")
    takes, values = _signature(loss, name)
    switches = [(key, type(value), switch(value, "parameter of the loss")) for key, value in values.items()]
    config = make_dataclass(
        f"{loss.__name__}_config",
        [*switches, ("sgd", SGDConfig, switch(SGDConfig(), "optimiser"))],
        frozen=True,
    )
    about = inspect.getdoc(loss) or f"the loss {name}"
    attributes = {
        "__module__": loss.__module__,
        "__qualname__": loss.__qualname__,
        "__doc__": about,
        "name": name,
        "title": about.splitlines()[0],
        "family": "own loss",
        "paper": "none",
        "config_type": config,
        "code_hash": _hash(loss),
        "loss": staticmethod(loss),
        "takes": takes,
    }
    return type(loss.__name__, (_LossMethod,), attributes)


class _LossMethod(NetworkMethod):
    """Trains on true labels, then minimises a loss on every target.

    Attributes:
        loss: The function.
        takes: Names of the parts that it takes.
    """

    loss: ClassVar[Loss]
    takes: ClassVar[tuple[str, ...]]

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        """Refuses a recipe without memory if the loss takes some."""
        if "memory" in cls.takes and not recipe.memory:
            raise ConfigError(
                f"{cls.name} takes images from the memory, which is empty with memory=0. "
                "Set memory to some images, or leave the parameter `memory` out of the loss."
            )

    def source_phases(self, domain: LabelledDomain) -> list[Phase]:
        """Returns one phase of cross-entropy."""

        def finish(learned: LabelledDomain) -> dict[str, float]:
            return self.remember(learned.images, learned.labels)

        return [SupervisedPhase(self.setting, self.network, domain, self.config.sgd, finish=finish)]

    def target_phases(self, domain: UnlabelledDomain) -> list[Phase]:
        """Returns one phase that minimises the loss."""
        return [_LossPhase(self, domain.images)]


class _LossPhase(NetworkPhase):
    """Minimises the loss on batches of a target."""

    method: _LossMethod
    saved = "confidence"
    confidence: Tensor | None = None

    def __init__(self, method: _LossMethod, images: Tensor) -> None:
        setting, stage = method.setting, method.stage
        self._views = setting.generator("views", stage)
        self._own = setting.randomness.generator("loss", stage)  # on the CPU, which must not wait for a GPU
        super().__init__(method, images, None, replay=False, generators=(self._views, self._own))
        recipe = setting.recipe
        change = TransformConfig() if recipe.target_transform == NONE else recipe.target_transform
        self._view = TrainingInputs(change, recipe.size, method.scaling)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate, and the pseudo-labels if the loss takes them."""
        record = super().begin_epoch(epoch)
        if {"labels", "confidence"} & {*self.method.takes}:
            self.confidence, labels = self.method.predict(self.batches.images).softmax(dim=1).max(dim=1)
            self.batches.labels.copy_(labels)
        return record

    def step(self) -> dict[str, Tensor]:
        """Updates the network once."""
        method, batch = self.method, self.batches.draw(self.batch)
        given: dict[str, Any] = {"network": self.network.train(), "images": batch.images, "labels": batch.labels}
        if self.confidence is not None:
            given["confidence"] = self.confidence[batch.places]
        if "view" in method.takes:
            given["view"] = self._view(self.batches.images[batch.places], self._views)
        if "memory" in method.takes:
            given["memory"] = self.batches.draw_memory(method.memory, self.batch)
        values = {key: value for key, value in vars(method.config).items() if key != "sgd"}
        seed = int(torch.randint(2**62, (), generator=self._own))
        with Randomness(seed).scope("loss"):
            loss = method.loss(**{part: given[part] for part in method.takes}, **values)
        terms = dict(loss) if isinstance(loss, Mapping) else {"loss": loss}
        _check(terms, method.name)
        return self.minimise(terms)

    def finish(self) -> dict[str, float]:
        """Puts exemplars into the memory, by present predictions."""
        self.batches.labels.copy_(self.method.predict(self.batches.images).argmax(dim=1))
        return super().finish()


def _check(terms: Mapping[Any, Any], name: str) -> None:
    wanted = f"the loss {name} must return a scalar tensor that depends on the network, or several by name"
    if not terms:
        raise ContractError(f"{wanted}; got none.")
    for term in terms.values():
        if not isinstance(term, Tensor):
            raise ContractError(f"{wanted}; got {shown(term)}.")
        if term.ndim or not term.is_floating_point():
            raise ContractError(f"{wanted}; got {term.dtype} of shape {tuple(term.shape)}. Take its mean, say.")
    if not any(term.requires_grad for term in terms.values()):
        raise ContractError(f"{wanted}; it depends on none of its weights.")


def _signature(loss: Loss, name: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns the parts that a loss takes, and its switches with their defaults."""
    if not inspect.isfunction(loss):
        raise ConfigError(f"loss_method takes a function, got {shown(loss)}.")
    if name in METHODS:
        raise ConfigError(f"the loss has the name of a built-in method, {name!r}: rename it.")
    takes, values, problems = list[str](), dict[str, Any](), list[str]()
    for key, parameter in inspect.signature(loss).parameters.items():
        if key in _PARTS:
            takes.append(key)
        elif parameter.default is parameter.empty:
            problems.append(f"{unknown(f'parameter of the loss {name}:', key, _PARTS)} A switch needs a default.")
        elif type(parameter.default) not in _SWITCHES or key == "sgd":
            problems.append(
                f"the parameter {key} of the loss {name} cannot be a switch: its default must be a number, a text, "
                f"True or False, and its name not sgd; got {shown(parameter.default)}."
            )
        else:
            values[key] = parameter.default
    if "network" not in takes and not problems:
        problems.append(f"the loss {name} must take the network: def {loss.__name__}(network, images)")
    if problems:
        raise ConfigError(problems)
    return tuple(takes), values


def _hash(loss: Loss) -> str:
    """Returns the sha256 of the function's source, which identifies the method in other processes too."""
    try:
        source = inspect.getsource(loss)
    except OSError as error:
        raise ConfigError(
            f"the source of the loss {loss.__name__} cannot be read, and a run records a hash of it: define it in a "
            "file or a notebook."
        ) from error
    return hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()
