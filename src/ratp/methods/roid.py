"""ROID — "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, …", WACV 2024.

A batch of n images with predictions p_i has weights w_i. With H, the entropy, and p̄, the moving average of the mean
predictions of earlier batches:

    w_i = exp(d_i·c_i / temperature),   d_i = 1 − cos(p̄, p_i),   c_i = −H(p_i)

Both d (diversity) and c (certainty) are scaled to [0, 1] within the batch, and images with a d below its mean weigh 0.

    loss = 1/n · Σ_i w_i · (SLR(p_i) + SCE(view_i, image_i))
    SLR(p) = −Σ_k p_k · log(p_k / (1 − p_k) + 10⁻⁵)

In SLR, the soft likelihood ratio, p is at most 0.99; SCE is the symmetric cross-entropy with a random view.

* Source stage: cross-entropy.
* Target stage: one pass, normalised by the batch. One step on γ and β of normalisation layers lowers the loss. Then
  both move towards the source's: θ ← ``keep``·θ + (1 − ``keep``)·θ⁰.
* Predictions: the logits of a batch are multiplied by its smoothed prior (``prior``), K·(q + s)/(1 + s·K), with the
  batch's mean prediction q and s = max(1/n, 1/K) / max q. Evaluations by batch do the same.
* Replay adds the cross-entropy of a memory batch, which has its own forward pass.

Equal values of d or of c scale to 0, so that such images weigh 1. If a single image counts, its view is left out: it
would have no statistics.

Deviations from the published code: the prior is multiplied by K, which changes no decision and leaves the logits as
they are if the prior is uniform (in the original, they then shrink to a K-th, and with them all confidence); losses are
divided by the images of the batch, also in a batch smaller than usual; views are CoTTA's, drawn per image, which repeat
the edge and add blur and noise, and do not mirror digits (``flip``); the bottleneck's BatchNorm uses statistics of the
batch too; a batch of one image is predicted with running statistics and not learned from. The comparison adds the
memory (``replay``). The average p̄ persists across targets, like the weights. Batches have the recipe's size (200 and 64
in the paper).

A guess: the paper has no DTN, which has the values for CIFAR-10, Adam at 0.001 (``step``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.functional.cotta_views import CoTTAView
from ratp.functional.losses import logit_entropy, symmetric_cross_entropy
from ratp.functional.optim import WITH_MOMENTUM, follow_
from ratp.methods.shared.online import LARGE_STEPS, AdaptationConfig, AnchoredMethod, augmented, logits_by_batch
from ratp.training.method import Setting, pack, unpack

LARGEST_PROBABILITY, SMALLEST_RATIO = 0.99, 1e-5


@dataclass(frozen=True)
class ROIDConfig(AdaptationConfig):
    """Switches of ROID."""

    nesterov: bool = switch(True, "Nesterov's momentum, if step.optimiser is sgd")
    weighted: bool = switch(True, "an image weighs by diversity and certainty; off: 1")
    temperature: float = switch(1 / 3, "diversity × certainty is divided by this", above=0)
    average: float = switch(0.9, "share of the mean prediction p̄ kept per batch", minimum=0, maximum=1)
    consistency: bool = switch(True, "symmetric cross-entropy with a view of each image")
    flip: float = switch(0.0, "probability that a view is mirrored left to right", minimum=0, maximum=1)
    keep: float = switch(0.99, "share of γ and β kept per step; the rest is the source's", minimum=0, maximum=1)
    prior: bool = switch(True, "multiply logits by the smoothed prior of their batch")


def soft_likelihood_ratio(logits: Tensor) -> Tensor:
    """Computes SLR of each row of logits (n, k)."""
    p = logits.softmax(dim=1).clamp(max=LARGEST_PROBABILITY)
    # −Σ p·log(p/(1 − p) + ε)
    return -(p * (p / (1 - p) + SMALLEST_RATIO).log()).sum(dim=1)


def scaled(values: Tensor) -> Tensor:
    """Scales values (n,) linearly so that the smallest is 0 and the largest 1; equal values all become 0."""
    above, span = values - values.min(), values.max() - values.min()
    return torch.where(span > 0, above / span, 0)


def image_weights(logits: Tensor, mean: Tensor, temperature: float) -> Tensor:
    """Computes the weight of each row of logits (n, k), given the mean prediction (k,); at least one is not 0."""
    diversity = scaled(1 - F.cosine_similarity(mean[None], logits.softmax(dim=1), dim=1))
    certainty = scaled(-logit_entropy(logits))
    return (diversity * certainty / temperature).exp() * (diversity >= diversity.mean())


def prior_corrected(logits: Tensor) -> Tensor:
    """Multiplies the logits (n, k) of a batch by its smoothed prior, which is 1 for every class if it is uniform."""
    count, classes = logits.shape
    prior = logits.softmax(dim=1).mean(dim=0)
    smooth = max(1 / count, 1 / classes) / prior.max()
    return logits * (classes * (prior + smooth) / (1 + smooth * classes))


class ROID(AnchoredMethod):
    """Learns from diverse and certain images, and keeps the weights near the source's."""

    name = "roid"
    title = "ROID: universal test-time adaptation by weight ensembling"
    family = "test-time adaptation"
    paper = (
        "Marsden et al., Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior "
        "Correction, WACV 2024"
    )
    needs = "normalisation layers, batch statistics, exemplars for replay, one pass over a target"
    config_type = ROIDConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_MOMENTUM
    saved = "_changes"
    large: ClassVar[Mapping[str, Any]] = {**LARGE_STEPS, "flip": 0.5}

    def __init__(self, setting: Setting, config: ROIDConfig) -> None:
        super().__init__(setting, config)
        classes = len(setting.classes)
        self.mean = torch.full((classes,), 1 / classes, device=setting.device)  # p̄
        self._view = CoTTAView(config.flip)

    def begin_stage(self) -> None:
        """Creates optimiser, replay and the generator of views."""
        super().begin_stage()
        self._changes = self.setting.generator("views", self.stage)

    def learn(self, inputs: Tensor) -> Tensor:
        """Returns logits of a batch by its own statistics and prior, then takes one step."""
        config, total = self.config, len(inputs)
        logits = logits_by_batch(self.network, inputs)
        weights = self._weigh(logits.detach())
        loss = (weights * soft_likelihood_ratio(logits)).sum() / total
        kept = weights > 0
        count = int(kept.sum())
        if config.consistency and count >= self.smallest:
            view = augmented(inputs[kept], self._view, self.scaling, self._changes)
            apart = symmetric_cross_entropy(logits_by_batch(self.network, view), logits[kept])
            loss = loss + (weights[kept] * apart).sum() / total
        self.minimise(loss)
        follow_(self._trained.values(), self.anchors.values(), config.keep)
        self.count(total, count)
        return self.correct(logits.detach())

    def _weigh(self, logits: Tensor) -> Tensor:
        """Returns the weights of a batch's images, and updates the mean prediction."""
        config = self.config
        weights = (
            image_weights(logits, self.mean, config.temperature) if config.weighted else torch.ones_like(logits[:, 0])
        )
        self.mean = config.average * self.mean + (1 - config.average) * logits.softmax(dim=1).mean(dim=0)
        return weights

    def correct(self, logits: Tensor) -> Tensor:
        """Returns the logits of a batch, multiplied by its smoothed prior if ``prior`` is on."""
        return prior_corrected(logits) if self.config.prior else logits

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory, the source's values and the mean prediction."""
        return super().state() | pack({"roid": {"mean": self.mean}})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        self.mean = unpack(state)["roid"]["mean"].to(self.setting.device)
