"""What methods share: supervised training, and base classes for methods and phases with one network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import as_dict
from ratp.data.domain import LabelledDomain
from ratp.functional.losses import PCAConfig, fused_terms
from ratp.functional.norm import supports_row_masks
from ratp.functional.optim import Adam, Group, SGDConfig, StageSGD
from ratp.functional.randmix import Inputs
from ratp.networks.network import Network, Output
from ratp.training.memory import Batches, Memory, Selection
from ratp.training.method import Method, Setting, pack, unpack
from ratp.training.phase import Phase
from ratp.training.recipe import classify, embed, run_in_chunks
from ratp.training.source_cache import SharedTraining


class SupervisedPhase(Phase):
    """Trains on a labelled domain by cross-entropy, with SGD.

    If an earlier run has trained the same network, the phase loads it and has no epochs.

    Args:
        setting: Recipe, randomness and device.
        network: The network to train.
        domain: The domain to train on.
        sgd: Switches of the optimiser.
        smoothing: ε of label smoothing: targets are (1 − ε)·one-hot + ε/K.
        groups: Parameters to train, each group with a factor on the rate; None: all of the network.
        stage: Number of the stage.
        memory: Exemplars to replay; None: no replay.
        forward: Passes a batch, possibly with copies of its images, through the network; None: the batch alone.
        generators: Generators that ``forward`` uses.
        finish: Called at the end with the domain on the device; its result is recorded.
    """

    captures = True
    saved = "_optimiser"

    def __init__(
        self,
        setting: Setting,
        network: Network,
        domain: LabelledDomain,
        sgd: SGDConfig,
        *,
        smoothing: float = 0.0,
        groups: Sequence[Group] | None = None,
        stage: int = 0,
        memory: Memory | None = None,
        forward: Callable[[Tensor], Output] | None = None,
        generators: Sequence[torch.Generator] = (),
        finish: Callable[[LabelledDomain], dict[str, float]] | None = None,
    ) -> None:
        recipe = setting.recipe
        self.name: Literal["source", "target"] = "target" if stage else "source"
        self.steps = recipe.steps
        self._network, self._batch, self._smoothing, self._finish = network, recipe.batch, smoothing, finish
        self._domain = domain.to(setting.device)
        self._batches = Batches(setting, self.name, stage, self._domain.images, self._domain.labels, memory)
        self._dropout = setting.generator("dropout", stage)
        self._forward = forward or (lambda images: network.train()(images))
        self.generators = (*self._batches.generators, self._dropout, *generators)
        trained = [(list(network.parameters()), 1.0)] if groups is None else [(list(g), f) for g, f in groups]
        self._optimiser = StageSGD(trained, recipe.lr, recipe.epochs, sgd, recipe.steps)
        models = setting.models if stage == 0 and forward is None else None
        self._shared = SharedTraining(models, self._describe(sgd, trained), network)
        self.epochs = 0 if self._shared.is_done else recipe.epochs

    def _describe(self, sgd: SGDConfig, trained: Sequence[tuple[Sequence[Tensor], float]]) -> dict[str, Any]:
        """Describes what the trained network depends on besides recipe, seed and source."""
        names = {id(parameter): name for name, parameter in self._network.named_parameters()}
        return {
            "network": str(self._network),
            "initial": [(name, list(tensor.shape)) for name, tensor in self._network.state_dict().items()],
            "sgd": as_dict(sgd),
            "smoothing": self._smoothing,
            "groups": [([names.get(id(parameter)) for parameter in group], factor) for group, factor in trained],
            "images": len(self._domain),
            "kind": type(self).__qualname__,
        }

    def begin(self) -> None:
        """Binds dropout to its generator."""
        self._network.use_generator(self._dropout)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate."""
        return {"lr": self._optimiser.begin_epoch(epoch)}

    def step(self) -> dict[str, Tensor]:
        """Updates the network once, on a batch drawn with replacement."""
        batch = self._batches.draw(self._batch)
        logits = self._forward(batch.images).logits
        labels = batch.labels.repeat(len(logits) // len(batch.labels))
        loss = F.cross_entropy(logits, labels, label_smoothing=self._smoothing)
        self._optimiser.minimise(loss)
        return {"total": loss}

    def finish(self) -> dict[str, float]:
        """Stores or loads the shared network, then calls ``finish``."""
        return self._shared.finish() | (self._finish(self._domain) if self._finish else {})


def embed_all(network: Network, setting: Setting, images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns embeddings and softmax of uint8 images, in evaluation mode and without augmentation."""
    embedding, logits = run_in_chunks(network, network, images, setting.scaling())
    return embedding, logits.softmax(dim=1)


def update_labels_(own: Tensor, labels: Tensor, probabilities: Tensor, *, first: bool) -> dict[str, float]:
    """Overwrites the labels ``own`` in place, where a captured step reads them; returns statistics to record.

    ``probabilities`` are the network's predictions, shape (n, classes); ``first`` says that ``own`` held no labels yet.
    """
    changed = 1.0 if first else (labels != own).float().mean().item()
    own.copy_(labels)
    shares = labels.bincount(minlength=probabilities.shape[1]) / len(labels)
    return {
        "labels_changed": changed,
        "labels_as_predicted": (labels == probabilities.argmax(dim=1)).float().mean().item(),
        "smallest_class": shares.min().item(),
        "largest_class": shares.max().item(),
    }


class NetworkMethod(Method):
    """Base class of methods with one network and an exemplar memory; a subclass adds the phases.

    Attributes:
        setting: Recipe, randomness, device and more.
        config: Its switches.
        scaling: Turns uint8 images into inputs of the network.
        network: The network that trains and predicts.
        memory: The exemplars.
        extras: What is saved besides, by name: modules, or others with ``state_dict`` and ``load_state_dict``.
    """

    extras: Mapping[str, Any] = {}

    def __init__(self, setting: Setting, config: Any) -> None:
        self.setting = setting
        self.config = config
        self.scaling = setting.scaling()
        self.network = setting.network()
        self.memory = Memory(setting.recipe.memory, len(setting.classes), setting.device)

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over a trained network in place of the source stage; the memory gets no exemplars."""
        self.network.load_state_dict(dict(tensors))
        self.memory.seen += 1
        self._knows_source = True

    @property
    def stage(self) -> int:
        """Number of domains the memory has seen."""
        return self.memory.seen

    def predict(self, images: Tensor) -> Tensor:
        """Returns logits of uint8 images."""
        return classify(self.network, images, self.scaling)

    def compute_logits(self, inputs: Tensor) -> Tensor | None:
        """Computes logits of normalised images by the network."""
        return self.network(inputs).logits

    def embed(self, images: Tensor) -> Tensor:
        """Returns embeddings of uint8 images, by running statistics."""
        return embed(self.network, images, self.scaling)

    def optimiser(self, parameters: Iterable[nn.Parameter] | Sequence[Group], sgd: SGDConfig | None = None) -> StageSGD:
        """Returns the SGD of one stage, at the recipe's rate; by the switch ``sgd`` of the method, or another."""
        recipe = self.setting.recipe
        return StageSGD(parameters, recipe.lr, recipe.epochs, sgd or self.config.sgd, recipe.steps)

    def remember(
        self,
        images: Tensor,
        labels: Tensor,
        selection: Selection = "herding",
        chosen_by: Literal["backbone", "embedding"] = "backbone",
        mix: Tensor | None = None,
    ) -> dict[str, float]:
        """Puts exemplars of one more domain into the memory, chosen by features of unit length.

        ``images`` are all images of the domain, ``labels`` their labels or pseudo-labels; ``mix`` are its class
        proportions, if exemplars should have them (:meth:`ratp.training.memory.Memory.add`).
        """
        network = self.network
        compute = network.features if chosen_by == "backbone" else lambda inputs: network(inputs).embedding
        (features,) = run_in_chunks(network, lambda inputs: (compute(inputs),), images, self.scaling)
        self.memory.add(images, labels, F.normalize(features, dim=1), selection, mix)
        return {"exemplars": float(len(self.memory))}

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory and extras."""
        extras = {name: part.state_dict() for name, part in self.extras.items()}
        return pack({"network": self.network.state_dict(), "memory": self.memory.state(), **extras})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        parts = unpack(state)
        self.network.load_state_dict(parts["network"])
        self.memory.load_state(parts["memory"])
        for name, part in self.extras.items():
            part.load_state_dict(parts[name])


class OldModelMethod(NetworkMethod):
    """A method that keeps a frozen copy of its network, to distil from it.

    Attributes:
        old: The network as the last stage left it; None on the source. A phase replaces it when it finishes.
    """

    def __init__(self, setting: Setting, config: Any) -> None:
        super().__init__(setting, config)
        self.old: Network | None = None

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory, extras and the old network."""
        return super().state() | (pack({"old": self.old.state_dict()}) if self.old is not None else {})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        parts = unpack(state)
        self.old = None
        if "old" in parts:
            self.old = self.network.frozen_copy()
            self.old.load_state_dict(parts["old"])


class NetworkPhase(Phase):
    """Trains a method's network on batches of one domain; a subclass adds :meth:`step`.

    At the end it puts exemplars into the memory, by the labels in ``batches.labels``. A target begins with zeros there;
    the subclass writes its pseudo-labels into them.

    Attributes:
        method: The method; its switches are in ``method.config``.
        network: The network that trains.
        memory: The method's exemplars.
        batches: Draws batches: ``self.batches.draw(self.batch)``; ``batches.images`` are all images of the domain.
        batch: Images in a batch.
        optimiser: What trains.
        is_target: Whether the domain is a target.

    Args:
        method: The method whose network is trained.
        images: All images of the domain.
        labels: Their labels; None: the domain is a target.
        optimiser: What trains; None: the method's SGD on all parameters of its network.
        replay: Whether batches of a target come from target and memory together.
        generators: Generators that ``step`` uses besides those of the batches and of dropout.
        network: What trains; None: the method's network.
    """

    saved = "optimiser batches"

    def __init__(
        self,
        method: NetworkMethod,
        images: Tensor,
        labels: Tensor | None,
        optimiser: StageSGD | Adam | None = None,
        *,
        replay: bool = True,
        generators: Sequence[torch.Generator] = (),
        network: Network | None = None,
    ) -> None:
        recipe, setting, stage = method.setting.recipe, method.setting, method.stage
        self.is_target = labels is None
        kind: Literal["source", "target"] = "target" if labels is None else "source"
        self.name: str = kind
        self.epochs, self.steps, self.batch = recipe.epochs, recipe.steps, recipe.batch
        self.method, self.network, self.memory = method, network or method.network, method.memory
        self.optimiser = optimiser or method.optimiser(self.network.parameters())
        given = torch.zeros(len(images), dtype=torch.int64) if labels is None else labels
        memory = method.memory if self.is_target and replay else None
        self.batches = Batches(setting, kind, stage, images, given, memory)
        self._dropout = setting.generator("dropout", stage)
        self.generators = *self.batches.generators, self._dropout, *generators

    def begin(self) -> None:
        """Binds dropout to its generator."""
        self.network.use_generator(self._dropout)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate."""
        return {"lr": self.optimiser.begin_epoch(epoch)}

    def minimise(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes a step on the sum of some loss terms; returns what to record of them."""
        total = torch.stack(list(terms.values())).sum()
        self.optimiser.minimise(total)
        return {"total": total, **terms}

    def finish(self) -> dict[str, float]:
        """Puts exemplars into the memory, by the last labels."""
        return self.method.remember(self.batches.images, self.batches.labels)


class OldModelPhase(NetworkPhase):
    """Trains a method that keeps an old model, on one domain.

    If an earlier run has trained the same network on the source, the phase loads it and has no epochs. Where steps are
    captured, batches are static (:func:`ratp.functional.randmix.with_copies`).

    Attributes:
        targets_only: Switches, or groups of them, that do not affect training on the source.
    """

    targets_only: ClassVar[frozenset[str]]

    def __init__(self, method: OldModelMethod, images: Tensor, labels: Tensor | None, *, replay: bool = True) -> None:
        super().__init__(method, images, labels, replay=replay)
        self._device, self._old = method.setting.device, method.old
        self._teacher = None if method.old is None else method.old.folded()
        can_mask = not self.is_target or supports_row_masks(self.network)
        self._static = self.captures = self._device.type == "cuda" and can_mask
        models = None if self.is_target else method.setting.models
        self._shared = SharedTraining(models, self._describe(), self.network)
        if self._shared.is_done:
            self.epochs = 0

    def _describe(self) -> dict[str, Any]:
        """Lists what the network trained on the source depends on, besides recipe, seed and source."""
        values = as_dict(self.method.config)
        switches = {name: value for name, value in values.items() if name.split(".")[0] not in self.targets_only}
        return {"kind": type(self).__qualname__, "images": len(self.batches.images), "switches": switches}

    @property
    def _old_prototypes(self) -> Tensor | None:
        return None if self._old is None else self._old.prototypes

    def _fused_terms(
        self, inputs: Inputs, output: Output, old: Output | None, pca: PCAConfig, weights: tuple[float, float]
    ) -> dict[str, Tensor]:
        """Computes the terms of :func:`ratp.functional.losses.fused_terms` where steps are captured; else none."""
        if not self._static:
            return {}
        prototypes, teacher = self.network.prototypes, None if old is None else old.logits
        return fused_terms(output, inputs.labels, inputs.valid, prototypes, self._old_prototypes, teacher, pca, weights)
