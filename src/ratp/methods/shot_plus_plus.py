"""SHOT++ — "Source Data-absent Unsupervised Domain Adaptation through Hypothesis Transfer and Labeling Transfer", 2021.

SHOT+, and then MixMatch from the images it is sure about to the others ("labelling transfer").

* Source stage and the first phases of a target: SHOT+ (``methods/shot_plus.py``).
* Last phase of a target, as many steps again: the images of least entropy of every predicted class count as labelled,
  as many as have less than the mean (:func:`ratp.parts.mixmatch.confident_split`). A step takes a labelled batch and
  two views of an unlabelled one, guesses the labels of the latter, mixes all three and learns
  CE + w·(mean squared error), with w growing from 0 to 100.
* After a stage: exemplars go to the memory, with what the trained model predicts for them.

Departures from the original:

* Those of SHOT and SHOT+.
* The classifier stays as it is, so that the model of all stages is one. The original makes a new one and trains it:
  ``mixmatch.new_classifier``.
* Images are drawn with replacement, so that a part may be smaller than a batch. If one of the parts is empty, as when
  all images are equally certain, there is nothing to transfer and the steps of this phase do nothing.
* Guesses are made in training mode. Where the recipe changes no images, as for digits, only dropout tells the two
  views apart.
* Exemplars of earlier domains count as labelled (``replay`` union), or have a batch of their own beside each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.domain import UnlabelledDomain
from ratp.drawn import drew
from ratp.parts.information import entropy
from ratp.parts.mixmatch import confident_split, draw_ratio, interleave, mix, sharpen, soft_cross_entropy, squared_error
from ratp.parts.sgd import StageSGD
from ratp.phase import Phase
from ratp.source_free import (
    RotationPhase,
    RotationTask,
    SHOTPhase,
    SourceFreeConfig,
    SourceFreeMethod,
    Views,
    extractor_groups,
)
from ratp.training import look


@dataclass(frozen=True)
class MixMatchConfig:
    """Switches of the labelling transfer."""

    alpha: float = switch(0.1, "α of Beta(α, α), which mixing ratios are drawn from", above=0, below=5)
    temperature: float = switch(0.5, "T, which sharpens guessed labels; 1: as they are", above=0)
    consistency: float = switch(100.0, "weight of the squared error at the end of the phase", minimum=0)
    batch: int = switch(36, "images in each of the three batches", minimum=3)
    backbone_rate: float = switch(0.1, "factor on the rate of the feature extractor", minimum=0)
    new_classifier: bool = switch(False, "begin with a new classifier and train it (published code)")


@dataclass(frozen=True)
class SHOTPlusPlusConfig(SourceFreeConfig):
    """Switches of SHOT++. Defaults: the published ones for digits, but for the optimiser."""

    beta: float = switch(0.1, "β, weight of the cross-entropy with pseudo labels", minimum=0)
    gamma: float = switch(0.2, "γ, weight of the rotation task; 0: none", minimum=0)
    mixmatch: MixMatchConfig = switch(MixMatchConfig(), "labelling transfer")


class SHOTPlusPlus(SourceFreeMethod):
    """SHOT with a rotation task, then MixMatch."""

    name = "shot++"
    title = "SHOT++: SHOT with a rotation task, and labelling transfer by MixMatch"
    family = "source-free domain adaptation"
    paper = (
        "Liang et al., Source Data-absent Unsupervised Domain Adaptation through Hypothesis Transfer and Labeling "
        "Transfer, TPAMI 2021"
    )
    config_type = SHOTPlusPlusConfig
    large: ClassVar[Mapping[str, Any]] = {"beta": 0.3, "gamma": 0.6, "backbone_rate": 0.1, "mixmatch.alpha": 0.75}
    needs = "memory, many passes over a target, square images, further phases"
    config: SHOTPlusPlusConfig

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """The phases of SHOT+, then MixMatch."""
        config, images = self.config, domain.images.to(self.setting.device)
        phases: list[Phase] = []
        task = None
        if config.gamma:
            task = RotationTask(self.setting, self.stage, config.gamma)
            phases.append(RotationPhase(self, images, task))
        phases.append(SHOTPhase(self, images, config.beta, rotation=task, finish=_not_yet))
        return [*phases, MixMatchPhase(self, images)]


def _not_yet(images: Tensor, labels: Tensor) -> dict[str, float]:
    """Exemplars wait for the last phase of the stage."""
    del images, labels
    return {}


class MixMatchPhase(Phase):
    """Labels go over from the images a model is sure about to the others.

    Args:
        method: Whose network and memory.
        images: All training images of the domain, uint8.
    """

    name = "mixmatch"
    captures = True

    def __init__(self, method: SHOTPlusPlus, images: Tensor) -> None:
        setting, recipe, stage = method.setting, method.setting.recipe, method.stage
        config = method.config.mixmatch
        self.epochs, self.steps = recipe.epochs, recipe.steps
        self._method, self._images, self._config, self._stage = method, images, config, stage
        self._network, self._memory, self._replay = method.network, method.memory, method.config.replay
        self._views = Views(setting, "mixmatch", stage)
        self._mixing = setting.generator("mixmatch mixing", stage)
        self._dropout = setting.generator("mixmatch dropout", stage)
        self.generators = *self._views.generators, self._mixing, self._dropout
        groups = extractor_groups(self._network, config.backbone_rate)
        if config.new_classifier:
            groups.append((self._network.classifier.parameters(), 1.0))
        self._optimiser = StageSGD(groups, recipe.lr, recipe.epochs, method.config.sgd, recipe.steps)
        # i / I, on the device: how much of the phase is done
        self._progress = torch.zeros((), device=setting.device)
        self._zero = torch.zeros((), device=setting.device)
        self._sure = self._unsure = torch.zeros(0, dtype=torch.int64, device=setting.device)
        self._labels = self._sure

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; splits the domain before the first epoch."""
        lr = {"lr": self._optimiser.begin_epoch(epoch)}
        return lr | self._begin() if epoch == 0 else lr

    def _begin(self) -> dict[str, float]:
        self._network.use_generator(self._dropout)
        _, probabilities = look(self._network, self._method.setting, self._images)
        classes = probabilities.shape[1]
        predictions = probabilities.argmax(dim=1)
        sure = confident_split(entropy(probabilities), predictions, classes)
        self._sure, self._unsure = sure.nonzero().squeeze(1), (~sure).nonzero().squeeze(1)
        self._labels = predictions[self._sure]
        if self._config.new_classifier and self._possible:
            with self._method.setting.randomness.scope("mixmatch classifier", self._stage), torch.no_grad():
                new = torch.empty(self._network.prototypes.shape)  # drawn on the host, and so alike on all devices
                bound = 1 / math.sqrt(classes)  # as the network's own
                self._network.classifier.weight.copy_(new.uniform_(-bound, bound))
        return {"labelled": sure.float().mean().item()}

    @property
    def _stored(self) -> int:
        """Exemplars that count as labelled."""
        return len(self._memory) if self._replay == "union" else 0

    @property
    def _possible(self) -> bool:
        """Whether there is anything to transfer, and anything to transfer it to."""
        return bool(len(self._unsure)) and bool(len(self._sure))

    def step(self) -> dict[str, Tensor]:
        """One update on three mixed batches."""
        beside = self._replay == "separate" and len(self._memory) > 1
        if not self._possible:  # settled before the first step, for all of them
            return dict.fromkeys(("total", "ce", "consistency", *(("replay",) if beside else ())), self._zero)
        config, network = self._config, self._network.train()
        labelled, targets = self._draw_labelled(config.batch)
        place = self._views.places(len(self._unsure), config.batch)
        drew(place, among=self._unsure)
        chosen = self._images[self._unsure[place]]
        views = [self._views.change(chosen), self._views.change(chosen)]
        with torch.no_grad():
            guesses = torch.stack([network(view).logits.softmax(dim=1) for view in views]).mean(dim=0)
            guesses = sharpen(guesses, config.temperature)
        ratio = draw_ratio(config.alpha, self._mixing)
        order = torch.rand(3 * config.batch, generator=self._mixing, device=ratio.device).argsort()
        inputs = mix(torch.cat([labelled, *views]), ratio, order)
        targets = mix(torch.cat([targets, guesses, guesses]), ratio, order)

        # BatchNorm sees some of all three in each pass.
        passes = [network(part).logits for part in interleave(inputs.chunk(3))]
        logits = torch.cat(interleave(passes))
        count = config.batch
        weight = config.consistency * self._progress
        terms = {
            "ce": soft_cross_entropy(logits[:count], targets[:count]),
            "consistency": weight * squared_error(logits[count:], targets[count:]),
        }
        if beside:
            terms["replay"] = self._replay_loss()
        total = torch.stack(list(terms.values())).sum()
        self._optimiser.minimise(total)
        self._progress += 1 / (self.epochs * self.steps)
        return {"total": total, **terms}

    def _draw_labelled(self, count: int) -> tuple[Tensor, Tensor]:
        """Images the model was sure about, and exemplars, with their labels."""
        own = len(self._sure)
        place = self._views.places(own + self._stored, count)
        drew(place, own, self._sure)
        index = place.clamp(max=own - 1)
        images, labels = self._images[self._sure[index]], self._labels[index]
        if self._stored:
            kept, replayed = (place - own).clamp(min=0), place >= own
            images = torch.where(replayed[:, None, None, None], self._memory.images[kept], images)
            labels = torch.where(replayed, self._memory.labels[kept], labels)
        classes = torch.arange(self._network.classes, device=labels.device)
        return self._views.change(images), (labels[:, None] == classes).float()  # one_hot would look at the labels

    def _replay_loss(self) -> Tensor:
        count = min(self._method.setting.recipe.batch, len(self._memory))
        place = self._views.places(len(self._memory), count)
        drew(place, 0)
        logits = self._network(self._views.change(self._memory.images[place])).logits
        return F.cross_entropy(logits, self._memory.labels[place])

    def finish(self) -> dict[str, float]:
        """Chooses exemplars, by what the model predicts now."""
        _, probabilities = look(self._network, self._method.setting, self._images)
        return self._method.remember(self._images, probabilities.argmax(dim=1))
