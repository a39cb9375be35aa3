"""What methods share that learn a target with a fixed classifier and labels made anew every epoch: SHOT and its kin.

* :class:`SourceFreeConfig` holds the switches they have in common, :class:`SourceFreeMethod` their source stage.
* :class:`TargetPhase` is a target stage: labels at the start of an epoch, batches with replay, one loss a step.
* :class:`SHOTPhase` is SHOT's: pseudo labels and information maximisation, with or without a rotation task.
* :class:`RotationTask` and :class:`RotationPhase` are the task SHOT+ adds, and the training of its head.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.copies import Copies
from ratp.domain import LabelledDomain
from ratp.drawn import drew
from ratp.errors import ConfigError
from ratp.method import Setting
from ratp.network import Network, Output
from ratp.parts.chunks import in_chunks
from ratp.parts.information import information_maximisation
from ratp.parts.losses import cross_entropy
from ratp.parts.rotation import TURNS, draw_turns, rotate, rotation_input
from ratp.parts.sgd import Group, SGDConfig, StageSGD
from ratp.parts.shot_labels import shot_labels
from ratp.phase import Phase
from ratp.training import Batch, Batches, NetworkMethod, SupervisedPhase, look, relabel

Finish = Callable[[Tensor, Tensor], dict[str, float]]

# Images turned at once, all at once would take several copies of a domain.
ROTATED = 1024

# SHOT's optimiser for large networks, and its rate. It was published for a bottleneck that ends in BatchNorm. Here it
# serves methods that leave convolutions as they are on targets; one that trains them there wears the network out.
SHOT_LARGE: Mapping[str, Any] = {
    "backbone_rate": 0.1,
    "sgd.momentum": 0.9,
    "sgd.weight_decay": 1e-3,
    "sgd.schedule": "per-step",
    "sgd.nesterov": True,
}
SHOT_RATE: Mapping[str, Any] = {"lr": 0.01}
SHOT_RATES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    (stream, "official"): SHOT_RATE for stream in ("pacs", "domainnet10", "folders")
}


@dataclass(frozen=True)
class SourceFreeConfig:
    """Switches these methods have in common. Defaults: SHOT's for digits, with RaTP's optimiser."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    backbone_rate: float = switch(1.0, "factor on the rate of the feature extractor", minimum=0)
    smoothing: float = switch(0.1, "ε of label smoothing on the source", minimum=0, below=1)
    replay: Literal["union", "separate", "none"] = switch(
        "union", "batches from target and memory together, a memory batch beside each, or no replay"
    )


class SourceFreeMethod(NetworkMethod):
    """A method that learns the source by smoothed cross-entropy and keeps the classifier fixed on targets.

    Attributes:
        config: Its switches, those of :class:`SourceFreeConfig` among them.
    """

    config: SourceFreeConfig

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase of cross-entropy with smoothed labels."""
        return [SourcePhase(self, domain)]

    def copies(self) -> Copies | None:
        """RandMix copies of the stage's images, if the method makes any."""
        return None


class SourcePhase(SupervisedPhase):
    """Cross-entropy with smoothed labels; the feature extractor has a rate of its own."""

    def __init__(self, method: SourceFreeMethod, domain: LabelledDomain) -> None:
        setting, config, network = method.setting, method.config, method.network

        def finish(learnt: LabelledDomain) -> dict[str, float]:
            return method.remember(learnt.images, learnt.labels)

        groups = [*extractor_groups(network, config.backbone_rate), (network.classifier.parameters(), 1.0)]
        copies = method.copies()
        super().__init__(
            setting,
            network,
            domain,
            config.sgd,
            smoothing=config.smoothing,
            groups=groups,
            forward=copies.learn_all if copies else None,
            generators=copies.generators if copies else (),
            finish=finish,
        )


def extractor_groups(network: Network, backbone_rate: float) -> list[Group]:
    """All parameters but the classifier's, each with the factor on its rate."""
    return [(network.backbone.parameters(), backbone_rate), (network.bottleneck.parameters(), 1.0)]


class Views:
    """Draws images with replacement and changes them as the recipe says, for a phase beside the main one.

    Args:
        setting: Recipe, randomness and device.
        name: What it draws for, for the generators.
        stage: Number of the stage, for the generators.
    """

    def __init__(self, setting: Setting, name: str, stage: int) -> None:
        self._inputs = setting.training_inputs("target")
        self._places = setting.generator(f"{name} batches", stage)
        self._changes = setting.generator(f"{name} transforms", stage)
        self.generators = self._places, self._changes

    def places(self, population: int, count: int) -> Tensor:
        """Random places in a population."""
        return torch.randint(population, (count,), generator=self._places, device=self._places.device)

    def change(self, images: Tensor) -> Tensor:
        """uint8 images as the network sees them while it trains."""
        return self._inputs(images, self._changes)


class TargetPhase(Phase):
    """A target stage with a fixed classifier: labels at the start of every epoch, then one update a batch.

    Args:
        method: Whose network and memory.
        images: All training images of the domain, uint8.
        groups: Parameters to train, each group with the factor on its rate.
        generators: What the loss draws from.
        finish: Called at the end with images and last labels; None: exemplars go to the memory.
    """

    name = "target"
    captures = True

    def __init__(
        self,
        method: SourceFreeMethod,
        images: Tensor,
        groups: Sequence[Group],
        *,
        generators: Sequence[torch.Generator] = (),
        finish: Finish | None = None,
    ) -> None:
        setting, recipe, stage = method.setting, method.setting.recipe, method.stage
        self.epochs, self.steps = recipe.epochs, recipe.steps
        self._setting, self._network, self._memory = setting, method.network, method.memory
        self._replay, self._finish = method.config.replay, finish or method.remember
        unknown = torch.zeros(len(images), dtype=torch.int64)
        union = self._memory if self._replay == "union" else None
        self._batches = Batches(setting, "target", stage, images, unknown, union)
        self._dropout = setting.generator("dropout", stage)
        self.generators = *self._batches.generators, self._dropout, *generators
        self._optimiser = StageSGD(groups, recipe.lr, recipe.epochs, method.config.sgd, recipe.steps)

    @abstractmethod
    def label(self, embedding: Tensor, probabilities: Tensor) -> Tensor:
        """Labels for all images of the domain."""

    @abstractmethod
    def losses(self, batch: Batch, output: Output) -> dict[str, Tensor]:
        """The terms of the loss on a batch, already weighted."""

    def forward(self, images: Tensor) -> Output:
        """What the network makes of a batch while it learns."""
        return self._network.train()(images)

    def after_update(self, batch: Batch, output: Output) -> None:
        """What else a step does."""

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate and labels all images."""
        if epoch == 0:  # not before: another phase of the stage may come first
            self._network.use_generator(self._dropout)
        lr = self._optimiser.begin_epoch(epoch)
        embedding, probabilities = look(self._network, self._setting, self._batches.images)
        labels = self.label(embedding, probabilities)
        return {"lr": lr} | relabel(self._batches.labels, labels, probabilities, first=epoch == 0)

    def step(self) -> dict[str, Tensor]:
        """One update on a batch drawn with replacement."""
        count = self._setting.recipe.batch
        batch = self._batches.draw(count)
        output = self.forward(batch.images)
        terms = self.losses(batch, output)
        if self._replay == "separate" and len(self._memory):
            stored = self._batches.draw_memory(self._memory, count)
            if len(stored.images) > 1:  # one image has no batch statistics
                terms["replay"] = F.cross_entropy(self._network(stored.images).logits, stored.labels)
        total = torch.stack(list(terms.values())).sum()
        self._optimiser.minimise(total)
        self.after_update(batch, output)
        return {"total": total, **terms}

    def finish(self) -> dict[str, float]:
        """Chooses exemplars, by the last labels."""
        return self._finish(self._batches.images, self._batches.labels)


class RotationTask:
    """Telling by how many quarters an image was turned, from its embedding and that of the turned image.

    Attributes:
        head: R, linear, from both embeddings to the four turns.
        generator: What turns are drawn from.
        weight: γ, weight of its loss.
    """

    def __init__(self, setting: Setting, stage: int, weight: float) -> None:
        """Makes a new head.

        Args:
            setting: Recipe, randomness and device.
            stage: Number of the stage, for the generators.
            weight: γ.

        Raises:
            ConfigError: If the images are not square.
        """
        height, width = setting.image_size
        if height != width:
            raise ConfigError(f"images of {height}×{width} cannot be turned by quarters: they must be square.")
        with setting.randomness.scope("rotation head", stage):
            head = nn.Linear(2 * setting.recipe.network.dim, TURNS)
        self.head = head.to(setting.device)
        self.generator = setting.generator("rotation", stage)
        self.weight = weight

    def loss(self, network: Network, images: Tensor, upright: Tensor) -> Tensor:
        """γ times the cross-entropy of the turns; its gradient passes the turned images only.

        Args:
            network: In the mode it learns in.
            images: Normalised images.
            upright: Their embeddings.
        """
        turns = draw_turns(len(images), self.generator)
        turned = network(rotate(images, turns)).embedding
        return self.weight * F.cross_entropy(self.head(rotation_input(upright, turned)), turns)


class RotationPhase(Phase):
    """Trains a rotation head alone, with the network as it is, and keeps that of the best epoch, the last of equals.

    Args:
        method: Whose network.
        images: All training images of the domain, uint8.
        task: Whose head.
    """

    name = "rotation"
    captures = True

    def __init__(self, method: SourceFreeMethod, images: Tensor, task: RotationTask) -> None:
        setting, recipe, stage = method.setting, method.setting.recipe, method.stage
        self.epochs, self.steps = recipe.epochs, recipe.steps
        self._setting, self._network, self._images, self._head = setting, method.network, images, task.head
        self._views = Views(setting, "rotation", stage)
        self._turns = setting.generator("rotation turns", stage)
        self._measuring = setting.generator("rotation measuring", stage)
        self.generators = *self._views.generators, self._turns
        self._optimiser = StageSGD(task.head.parameters(), recipe.lr, recipe.epochs, method.config.sgd, recipe.steps)
        self._pairs: tuple[Tensor, Tensor] | None = None
        self._best = -1.0
        self._kept: dict[str, Tensor] = {}

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate, and measures the head after the epoch before."""
        lr = self._optimiser.begin_epoch(epoch)
        return {"lr": lr} | ({"rotation_accuracy": self._measure()} if epoch else {})

    def step(self) -> dict[str, Tensor]:
        """One update of the head on images turned at random."""
        network = self._network.eval()
        place = self._views.places(len(self._images), self._setting.recipe.batch)
        drew(place)
        images = self._views.change(self._images[place])
        turns = draw_turns(len(images), self._turns)
        with torch.no_grad():
            pairs = rotation_input(network(images).embedding, network(rotate(images, turns)).embedding)
        loss = F.cross_entropy(self._head(pairs), turns)
        self._optimiser.minimise(loss)
        return {"total": loss}

    def finish(self) -> dict[str, float]:
        """Puts the best head back."""
        self._measure()
        self._pairs = None
        self._head.load_state_dict(self._kept)
        return {"rotation_accuracy": self._best}

    @torch.no_grad()
    def _measure(self) -> float:
        """Share of turns the head tells, on every image turned once and for all; keeps the head if it is the best."""
        if self._pairs is None:
            turns = draw_turns(len(self._images), self._measuring)
            upright = look(self._network, self._setting, self._images)[0]
            rotated = in_chunks(lambda rows: (rotate(self._images[rows], turns[rows]),), len(turns), ROTATED)[0]
            turned = look(self._network, self._setting, rotated)[0]
            self._pairs = rotation_input(upright, turned), turns
        pairs, turns = self._pairs
        accuracy = float((self._head(pairs).argmax(dim=1) == turns).float().mean())
        if accuracy >= self._best:
            self._best = accuracy
            self._kept = {name: tensor.clone() for name, tensor in self._head.state_dict().items()}
        return accuracy


class SHOTPhase(TargetPhase):
    """SHOT's target stage: cross-entropy with its labels, and information maximisation over the batch.

    Args:
        method: Whose network and memory.
        images: All training images of the domain, uint8.
        beta: Weight of the cross-entropy.
        rotation: A task beside; its head learns at the bottleneck's rate.
        finish: As for :class:`TargetPhase`.
    """

    def __init__(
        self,
        method: SourceFreeMethod,
        images: Tensor,
        beta: float,
        *,
        rotation: RotationTask | None = None,
        finish: Finish | None = None,
    ) -> None:
        groups = extractor_groups(method.network, method.config.backbone_rate)
        if rotation is not None:
            groups.append((rotation.head.parameters(), 1.0))
        drawn: tuple[torch.Generator, ...] = () if rotation is None else (rotation.generator,)
        self._copies = method.copies()
        if self._copies is not None:
            drawn = *drawn, *self._copies.generators
        super().__init__(method, images, groups, generators=drawn, finish=finish)
        self._beta, self._rotation = beta, rotation
        self._counts: Tensor | None = None

    def label(self, embedding: Tensor, probabilities: Tensor) -> Tensor:
        """SHOT's labels."""
        return shot_labels(embedding, probabilities)

    def forward(self, images: Tensor) -> Output:
        """Images, then copies of the confident ones if copies are made."""
        if self._copies is None:
            return super().forward(images)
        output, self._counts = self._copies.learn_confident(images)
        return output

    def losses(self, batch: Batch, output: Output) -> dict[str, Tensor]:
        """β·CE + H̄ − H(p̄), and the rotation task's if there is one; of copies the cross-entropy alone."""
        count = len(batch.labels)
        labels = batch.labels.repeat(len(output.logits) // count)
        terms = {
            "ce": self._beta * cross_entropy(output.logits, labels, self._counts),
            "im": information_maximisation(output.logits[:count]),
        }
        if self._rotation is not None:
            terms["rotation"] = self._rotation.loss(self._network, batch.images, output.embedding[:count])
        return terms
