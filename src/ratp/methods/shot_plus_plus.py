"""SHOT++ — "Source Data-absent Unsupervised Domain Adaptation through Hypothesis Transfer and Labeling Transfer", 2021.

SHOT+, followed by MixMatch from confident images to the others ("labeling transfer").

* Source stage and first phases of a target: SHOT+ (``methods/shot_plus.py``).
* Last phase of a target, equally many steps: the images of lowest entropy in every predicted class count as labelled,
  in the share of images whose entropy is below the mean (:func:`confident_split`). A step takes a labelled batch and
  two views of an unlabelled one, guesses the labels of the latter, mixes all three (MixMatch, NeurIPS 2019) and learns
  CE + w·(mean squared error), with w growing from 0 to 100.
* After a stage: exemplars enter the memory with the trained model's predictions.

Deviations from the original:

* Those of SHOT and SHOT+; the preset ``own-head`` is SHOT's.
* The classifier stays frozen, so that one model serves all stages. The original trains a new one:
  ``mixmatch.new_classifier``.
* Images are drawn with replacement, so a part may be smaller than a batch. If one part is empty, as when all images are
  equally certain, there is nothing to transfer and the steps of this phase do nothing.
* Guesses are made in training mode. Where the recipe changes no images, as for digits, the two views differ by dropout
  only.
* Exemplars of earlier domains count as labelled (``replay`` union) or form their own batch with each.
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
from ratp.data.domain import UnlabelledDomain
from ratp.functional.losses import entropy
from ratp.functional.numerics import beta_numbers, ranks_within, sum_type
from ratp.methods.shared.source_free import (
    OWN_HEAD,
    RotationConfig,
    SourceFreeMethod,
    extractor_groups,
    rotation_phases,
)
from ratp.training.finite import log_draw
from ratp.training.memory import Views
from ratp.training.phase import Phase
from ratp.training.phases import embed_all


def confident_split(entropies: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Selects the samples that count as labelled, from entropies (n,) and predictions (n,), as a mask (n,).

    If a share s of all samples has an entropy below the mean, each predicted class gives its ⌊s·n⌋ samples of lowest
    entropy; a small class may give none.
    """
    entropies = entropies.to(sum_type(entropies.device))
    below = (entropies < entropies.mean()).sum()
    sizes = predictions.bincount(minlength=classes)
    quotas = below * sizes // max(len(entropies), 1)  # ⌊PS·n_c⌋ in whole numbers
    return ranks_within(predictions, entropies.argsort(stable=True)) < quotas[predictions]


def sharpen(probabilities: Tensor, temperature: float) -> Tensor:
    """Computes p^(1/T) over its sum, row by row."""
    powers = (probabilities / probabilities.amax(dim=-1, keepdim=True)).pow(1 / temperature)
    return powers / powers.sum(dim=-1, keepdim=True)


def draw_ratio(alpha: float, generator: torch.Generator) -> Tensor:
    """Draws λ ~ Beta(α, α) and returns max(λ, 1 − λ)."""
    ratio = beta_numbers(alpha, alpha, 1, generator, generator.device)[0]
    return torch.maximum(ratio, 1 - ratio)


def mix(values: Tensor, ratio: Tensor, order: Tensor) -> Tensor:
    """Computes λ·v + (1 − λ)·v[order]."""
    return ratio * values + (1 - ratio) * values[order]


def interleave(parts: Sequence[Tensor]) -> list[Tensor]:
    """Exchanges rows among batches of one size, so that each has some of all; a second call undoes it.

    Row block i of the first batch changes places with row block i of batch i.
    """
    first = parts[0].clone()
    mixed = [first]
    bounds = [len(first) * i // len(parts) for i in range(len(parts) + 1)]
    for i, part in enumerate(parts[1:], start=1):
        block = slice(bounds[i], bounds[i + 1])
        other = part.clone()
        other[block] = parts[0][block]
        first[block] = part[block]
        mixed.append(other)
    return mixed


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Computes −Σ target·log softmax, averaged over rows; targets are probabilities."""
    return -(targets * logits.log_softmax(dim=1)).sum(dim=1).mean()


def squared_error(logits: Tensor, targets: Tensor) -> Tensor:
    """Computes the mean squared error of probabilities."""
    return (logits.softmax(dim=1) - targets).square().mean()


@dataclass(frozen=True)
class MixMatchConfig:
    """Switches of the labelling transfer."""

    alpha: float = switch(0.1, "α of the mixing ratios' distribution Beta(α, α)", above=0, below=5)
    temperature: float = switch(0.5, "T, temperature that sharpens guessed labels; 1: unchanged", above=0)
    consistency: float = switch(100.0, "weight w of the squared error at the end of the phase", minimum=0)
    batch: int = switch(36, "images in each of the three batches", minimum=3)
    backbone_rate: float = switch(0.1, "factor on the rate of the feature extractor", minimum=0)
    new_classifier: bool = switch(False, "start with a new classifier and train it (published code)")


@dataclass(frozen=True)
class SHOTPlusPlusConfig(RotationConfig):
    """Switches of SHOT++. Defaults: the published ones for digits, except for the optimiser."""

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
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"own-head": OWN_HEAD}
    large: ClassVar[Mapping[str, Any]] = {"beta": 0.3, "gamma": 0.6, "backbone_rate": 0.1, "mixmatch.alpha": 0.75}
    needs = "exemplars, many passes over a target, square images, further phases"
    config: SHOTPlusPlusConfig

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns the phases of SHOT+, then MixMatch."""
        images = domain.images.to(self.setting.device)
        # Exemplars wait for the last phase of the stage.
        return [*rotation_phases(self, images, self.config, finish=lambda *_: {}), MixMatchPhase(self, images)]


class MixMatchPhase(Phase):
    """Transfers labels from the images the model is sure about to the others."""

    name = "mixmatch"
    captures = True
    saved = "_optimiser _progress _sure _unsure _labels"

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
        self._optimiser = method.optimiser(groups)
        # i / I, the share of the phase that is done, on the device
        self._progress = torch.zeros((), device=setting.device)
        self._zero = torch.zeros((), device=setting.device)
        self._sure = self._unsure = torch.zeros(0, dtype=torch.int64, device=setting.device)
        self._labels = self._sure

    def begin(self) -> None:
        """Binds dropout to its generator."""
        self._network.use_generator(self._dropout)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; splits the domain before the first epoch."""
        lr = {"lr": self._optimiser.begin_epoch(epoch)}
        return lr | self._split() if epoch == 0 else lr

    def _split(self) -> dict[str, float]:
        _, probabilities = embed_all(self._network, self._method.setting, self._images)
        classes = probabilities.shape[1]
        predictions = probabilities.argmax(dim=1)
        sure = confident_split(entropy(probabilities), predictions, classes)
        self._sure, self._unsure = sure.nonzero().squeeze(1), (~sure).nonzero().squeeze(1)
        self._labels = predictions[self._sure]
        if self._config.new_classifier and self._possible:
            network = self._network
            with self._method.setting.randomness.scope("mixmatch classifier", self._stage), torch.no_grad():
                new = torch.empty(network.prototypes.shape)  # drawn on the host: the same on all devices
                bound = 1 / math.sqrt(network.config.dim if network.config.weight_norm else classes)  # as in Network
                network.set_prototypes(new.uniform_(-bound, bound))
                if network.classifier.bias is not None:
                    network.classifier.bias.zero_()
        return {"labelled": sure.float().mean().item()}

    @property
    def _stored(self) -> int:
        """Returns the number of exemplars that count as labelled."""
        return len(self._memory) if self._replay == "union" else 0

    @property
    def _possible(self) -> bool:
        """Returns whether both parts have images."""
        return bool(len(self._unsure)) and bool(len(self._sure))

    def step(self) -> dict[str, Tensor]:
        """Updates the network once on three mixed batches."""
        beside = self._replay == "separate" and len(self._memory) > 1
        if not self._possible:  # known before the first step
            return dict.fromkeys(("total", "ce", "consistency", *(("replay",) if beside else ())), self._zero)
        config, network = self._config, self._network.train()
        labelled, targets = self._draw_labelled(config.batch)
        place = self._views.places(len(self._unsure), config.batch)
        log_draw(place, among=self._unsure)
        chosen = self._images[self._unsure[place]]
        views = [self._views.change(chosen), self._views.change(chosen)]
        with torch.no_grad():
            guesses = torch.stack([network(view).logits.softmax(dim=1) for view in views]).mean(dim=0)
            guesses = sharpen(guesses, config.temperature)
        ratio = draw_ratio(config.alpha, self._mixing)
        order = torch.rand(3 * config.batch, generator=self._mixing, device=ratio.device).argsort()
        inputs = mix(torch.cat([labelled, *views]), ratio, order)
        targets = mix(torch.cat([targets, guesses, guesses]), ratio, order)

        # In each pass, BatchNorm sees rows of all three batches.
        passes = [network(part).logits for part in interleave(inputs.chunk(3))]
        logits = torch.cat(interleave(passes))
        count = config.batch
        weight = config.consistency * self._progress
        terms = {
            "ce": soft_cross_entropy(logits[:count], targets[:count]),
            "consistency": weight * squared_error(logits[count:], targets[count:]),
        }
        if beside:
            place = self._views.places(len(self._memory), min(self._method.setting.recipe.batch, len(self._memory)))
            log_draw(place, 0)
            replayed = network(self._views.change(self._memory.images[place])).logits
            terms["replay"] = F.cross_entropy(replayed, self._memory.labels[place])
        total = torch.stack(list(terms.values())).sum()
        self._optimiser.minimise(total)
        self._progress += 1 / (self.epochs * self.steps)
        return {"total": total, **terms}

    def _draw_labelled(self, count: int) -> tuple[Tensor, Tensor]:
        """Draws images the model was sure about, and exemplars, with their labels."""
        own = len(self._sure)
        place = self._views.places(own + self._stored, count)
        log_draw(place, own, self._sure)
        index = place.clamp(max=own - 1)
        images, labels = self._images[self._sure[index]], self._labels[index]
        if self._stored:
            kept, replayed = (place - own).clamp(min=0), place >= own
            images = torch.where(replayed[:, None, None, None], self._memory.images[kept], images)
            labels = torch.where(replayed, self._memory.labels[kept], labels)
        classes = torch.arange(self._network.classes, device=labels.device)
        return self._views.change(images), (labels[:, None] == classes).float()  # one_hot would read the labels back

    def finish(self) -> dict[str, float]:
        """Chooses exemplars by the model's predictions."""
        _, probabilities = embed_all(self._network, self._method.setting, self._images)
        return self._method.remember(self._images, probabilities.argmax(dim=1))
