"""Methods that learn each target from fixed pseudo-labels, as labels that are partly wrong: CoDAG and MPM.

They train on the source by cross-entropy, with RandMix copies. The last phase of a target is that of
:class:`SelNLPLPhase`: the labels of its images stay, and the network learns from them by SelNLPL, while the memory
keeps it from forgetting.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.data.domain import LabelledDomain
from ratp.functional.losses import distillation, mean_over
from ratp.functional.negative_learning import (
    SelNLPLConfig,
    complementary_labels,
    negative_losses,
    rarity,
    select,
)
from ratp.functional.optim import Group, SGDConfig, StageSGD
from ratp.functional.pseudo_labels import shot_labels
from ratp.functional.randmix import RandMixConfig
from ratp.methods.shared.randmix_copies import Copies, CopyingMethod
from ratp.methods.shared.source_free import all_groups
from ratp.networks.network import Output
from ratp.training.finite import log_draw
from ratp.training.memory import Selection, Views
from ratp.training.phase import Phase
from ratp.training.phases import SupervisedPhase, update_labels_

Labelling = Literal["predictions", "centroids"]


@dataclass(frozen=True)
class ReplayConfig:
    """Switches of the memory."""

    batch: float = switch(1.0, "exemplars with every batch of a target, as a multiple of its images", minimum=0)
    distill: float = switch(1.0, "weight λ of the distillation from the old model on exemplars", minimum=0)
    selection: Selection = switch("herding", "choice of exemplars: herding, or nearest to the class mean")


@dataclass(frozen=True)
class NoisyLabelConfig:
    """Switches that these methods share."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    backbone_rate: float = switch(1.0, "factor on the rate of the feature extractor", minimum=0)
    beta: float = switch(0.1, "β, weight of the cross-entropy in SHOT's loss", minimum=0)
    augment: bool = switch(True, "RandMix copies of all images, on the source and in the last phase of a target")
    randmix: RandMixConfig = switch(RandMixConfig(), "augmentation, if augment is on")
    labelling: Labelling = switch(
        "predictions", "labels of a target: the model's predictions, or SHOT's centroids of them"
    )
    selnlpl: SelNLPLConfig = switch(SelNLPLConfig(), "learning from labels that are partly wrong")
    replay_memory: ReplayConfig = switch(ReplayConfig(), "memory in the last phase of a target")
    length: float = switch(1.0, "epochs of the last phase of a target, as a multiple of the recipe's", above=0)


class NoisyLabelMethod(CopyingMethod):
    """Learns the source by cross-entropy; its config is a :class:`NoisyLabelConfig`."""

    @classmethod
    def masks_copies(cls, config: Any) -> bool:
        """Returns False: all images get a copy."""
        del config
        return False

    def copies(self) -> Copies:
        """Returns copies of all images of a stage."""
        return Copies(self, self.randmix)

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase of cross-entropy on images and copies."""
        copies = self.copies()
        phase = SupervisedPhase(
            self.setting,
            self.network,
            domain,
            self.config.sgd,
            groups=all_groups(self.network, self.config.backbone_rate),
            forward=copies.learn_all if copies.generators else None,
            generators=copies.generators,
            finish=lambda learned: self.remember(learned.images, learned.labels, self.config.replay_memory.selection),
        )
        return [phase]


def labels_from(embedding: Tensor, probabilities: Tensor, labelling: Labelling) -> Tensor:
    """Labels all images of a domain by a model's embeddings and predictions."""
    return shot_labels(embedding, probabilities) if labelling == "centroids" else probabilities.argmax(dim=1)


class SelNLPLPhase(Phase):
    """Trains on a target with fixed labels, on the memory, and on copies of both, all in one pass.

    Loss: SelNLPL with the labels + cross-entropy of exemplars with theirs + λ·KL(old model ‖ model) on exemplars
    without copies. A subclass says where labels come from, and which logits each term uses.
    """

    captures = True
    saved = "_optimiser _labels _history _negative _positive _weights"

    def __init__(self, method: NoisyLabelMethod, images: Tensor, groups: Sequence[Group], name: str) -> None:
        setting, recipe, config = method.setting, method.setting.recipe, method.config
        stage, device = method.stage, setting.device
        self.name, self.steps, self.batch = name, recipe.steps, recipe.batch
        self.epochs = max(1, round(config.length * recipe.epochs))
        self.method, self.network, self.memory, self.config = method, method.network, method.memory, config
        self.images = images.to(device)
        # as many as there are: a batch of exemplars has no more than the memory
        self._stored = min(round(config.replay_memory.batch * recipe.batch), len(self.memory))
        self._views = Views(setting, name, stage)
        self._copies = Copies(method, method.randmix, use=f"{name} randmix")
        self._complements = setting.generator(f"{name} complementary labels", stage)
        self._dropout = setting.generator(f"{name} dropout", stage)
        self.generators = *self._views.generators, *self._copies.generators, self._complements, self._dropout
        self._optimiser = StageSGD(groups, recipe.lr, self.epochs, config.sgd, recipe.steps)
        count = len(images)
        self._classes = len(setting.classes)
        self._labels = torch.zeros(count, dtype=torch.int64, device=device)
        self._weights = torch.ones(count, device=device)  # of negative learning
        self._history = torch.zeros(config.selnlpl.history, count, device=device)  # p_y in the last epochs
        # which images learn negatively, which positively, in this epoch
        self._negative = torch.zeros(count, dtype=torch.bool, device=device)
        self._positive = torch.zeros_like(self._negative)

    @abstractmethod
    def label(self) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Returns labels of all images, the probabilities they come from, and statistics to record."""

    @abstractmethod
    def probabilities(self) -> Tensor:
        """Returns what the network in training now predicts for all images, shape (n, k)."""

    @abstractmethod
    def target_logits(self, output: Output) -> Tensor:
        """Returns the logits of target images."""

    @abstractmethod
    def memory_logits(self, output: Output, domains: Tensor) -> Tensor:
        """Returns the logits of exemplars of some domains."""

    @abstractmethod
    def student(self, output: Output) -> Tensor:
        """Returns the logits of exemplars that should agree with those of :meth:`teacher`."""

    @abstractmethod
    def teacher(self, images: Tensor) -> Tensor:
        """Returns the old model's logits of normalised images."""

    def begin(self) -> None:
        """Binds dropout to its generator."""
        self.network.use_generator(self._dropout)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate, labels all images before the first epoch, and selects those that learn in this one.

        The published code averages predictions made while training; here those of all images at the start of an epoch
        count.
        """
        record = {"lr": self._optimiser.begin_epoch(epoch)}
        config = self.config.selnlpl
        if epoch == 0:
            labels, probabilities, found = self.label()
            record |= found | update_labels_(self._labels, labels, probabilities, first=True)
            if config.weighted:
                self._weights.copy_(rarity(labels, self._classes))
        own = self.probabilities().gather(1, self._labels[:, None]).squeeze(1)
        self._history[epoch % len(self._history)].copy_(own)
        confidence = self._history[: epoch + 1].mean(dim=0)
        chosen = select(confidence, self._classes, epoch / self.epochs, config)
        self._negative.copy_(chosen.negative)
        self._positive.copy_(chosen.positive)
        shares = {"negative_images": chosen.negative, "positive_images": chosen.positive}
        return record | {name: mask.float().mean().item() for name, mask in shares.items()}

    def step(self) -> dict[str, Tensor]:
        """Updates the network once on target images, exemplars and copies of both."""
        place, chosen = self._views.draw(self.images, self.batch)
        log_draw(place)
        kept = place[:0]
        if self._stored:
            kept = self._views.places(len(self.memory), self._stored)
            log_draw(kept, 0)
            chosen = torch.cat([chosen, self.memory.images[kept]])
        clean = self._views.change(chosen)
        output = self._copies.learn_all(clean)
        copies = len(output.logits) // len(clean)
        terms = self._learn_labels(self.target_logits(self._part(output, target=True)), place.repeat(copies))
        if self._stored:
            domains, labels = self.memory.domains[kept], self.memory.labels[kept]
            exemplars = self._part(output, target=False)
            logits = self.memory_logits(exemplars, domains.repeat(copies))
            terms["replay"] = F.cross_entropy(logits, labels.repeat(copies))
            if weight := self.config.replay_memory.distill:
                first = Output(*(part[: self._stored] for part in exemplars))
                with torch.no_grad():
                    old = self.teacher(clean[self.batch :])
                terms["distill"] = weight * distillation(self.student(first), old)
        total = torch.stack(list(terms.values())).sum()
        self._optimiser.minimise(total)
        return {"total": total, **terms}

    def _part(self, output: Output, *, target: bool) -> Output:
        """Picks the rows of target images or of exemplars, and those of their copies."""
        rows = slice(None, self.batch) if target else slice(self.batch, None)
        shape = -1, self.batch + self._stored
        return Output(*(part.reshape(*shape, part.shape[1])[:, rows].flatten(0, 1) for part in output))

    def _learn_labels(self, logits: Tensor, place: Tensor) -> dict[str, Tensor]:
        """Computes SelNLPL; every row has a complementary label of its own."""
        labels = self._labels[place]
        complementary = complementary_labels(labels, self._classes, self._complements)
        negative = self._weights[place] * negative_losses(logits, complementary)
        positive = F.cross_entropy(logits, labels, reduction="none")
        return {
            "negative": mean_over(negative, self._negative[place]),
            "positive": mean_over(positive, self._positive[place]),
        }

    def finish(self) -> dict[str, float]:
        """Puts exemplars into the memory, by the labels."""
        return self.method.remember(self.images, self._labels, self.config.replay_memory.selection)
