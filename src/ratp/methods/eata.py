"""EATA — "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022.

* Source stage: cross-entropy; then the Fisher information of BatchNorm's γ and β, from the network's own labels of
  some source images, and the values they have: the anchors.
* Target stage: one pass, as Tent, but a step learns from some images only: those whose entropy H is below
  E₀ = margin · ln K, and among them those whose prediction is unlike the mean of what was learnt from before. They
  weigh exp(E₀ − H). Moving away from the anchors costs α · Σ F (θ − θ⁰)². With no image left there is no step.
* With replay, the cross-entropy of a batch from the memory is added, in a forward pass of its own.

Departures from the published code: all BatchNorm layers take part, found by type; dropout is off; a mean over no
image is never taken; a batch of one image is predicted by running statistics and not learnt from. The Fisher
information comes from training images of the source, the only ones there are, in batches of 64, whatever the recipe's:
as published it squares the gradient of a batch's mean loss, so its scale goes by the batch. The published ε of 0.05 is
for a thousand classes and would reject nearly all images of ten; the default is that of CIFAR-10. The memory is the
comparison's, not EATA's. The mean prediction is kept from target to target, as the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.domain import LabelledDomain
from ratp.method import Setting, Statistics, pack, unpack
from ratp.online import LARGE_STEPS, AffineMethod, StepConfig, in_batches
from ratp.parts.batch_norm import affine_parameters
from ratp.parts.information import logit_entropy
from ratp.parts.sgd import SGDConfig

FISHER_BATCH = 64
MEMORY_OF_MEAN = 0.9


@dataclass(frozen=True)
class EATAConfig:
    """Switches of EATA."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser on the source")
    step: StepConfig = switch(StepConfig(), "steps on targets")
    margin: float = switch(0.4, "images are learnt from below this share of the largest entropy, ln K", minimum=0)
    similarity: float = switch(
        0.4, "images are learnt from below this cosine of their prediction and the mean one; above 1: all", minimum=0
    )
    weighted: bool = switch(True, "an image weighs exp(E₀ − H); off: 1")
    fisher_weight: float = switch(1.0, "weight α of the distance from the source's γ and β", minimum=0)
    fisher_images: int = switch(2000, "source images the Fisher information is taken from, at most", minimum=2)
    replay: Literal["separate", "none"] = switch("separate", "a memory batch beside each batch, or no replay")
    eval_bn: Statistics = switch("batch", "BatchNorm when measured after adaptation: of the images at hand, or running")


def select(logits: Tensor, mean: Tensor | None, threshold: float, similarity: float) -> tuple[Tensor, Tensor | None]:
    """Which images to learn from, and the mean prediction afterwards.

    Args:
        logits: Of a batch, shape (n, classes).
        mean: Mean prediction of the images learnt from so far, shape (classes,); None: there were none.
        threshold: E₀; entropies must be below.
        similarity: ε; |cos| of a prediction and the mean must be below.
    """
    probabilities = logits.detach().softmax(dim=1)
    kept = logit_entropy(logits.detach()) < threshold
    if mean is not None:
        kept = kept & (F.cosine_similarity(mean[None], probabilities, dim=1).abs() < similarity)
    if not bool(kept.any()):
        return kept, mean
    new = probabilities[kept].mean(dim=0)
    # m ← 0.9 m + 0.1 p̄
    return kept, new if mean is None else MEMORY_OF_MEAN * mean + (1 - MEMORY_OF_MEAN) * new


def weighted_entropy(logits: Tensor, threshold: float, *, weighted: bool = True) -> Tensor:
    """Mean of exp(E₀ − H)·H, where the weight is no path for gradients."""
    entropy = logit_entropy(logits)
    return ((threshold - entropy.detach()).exp() * entropy if weighted else entropy).mean()


def distance(
    parameters: Mapping[str, Tensor], anchors: Mapping[str, Tensor], fisher: Mapping[str, Tensor], weight: float
) -> Tensor:
    """α · Σ F (θ − θ⁰)² over all parameters."""
    terms = [(fisher[name] * (parameters[name] - anchors[name]).square()).sum() for name in fisher]
    return weight * torch.stack(terms).sum()


class EATA(AffineMethod):
    """Tent on reliable, non-redundant images, held near the source by Fisher information.

    Attributes:
        fisher: F, by parameter; empty before the source.
        anchors: θ⁰, by parameter.
        mean: Mean prediction of the images learnt from; None: there were none.
    """

    name = "eata"
    title = "EATA: efficient test-time adaptation without forgetting"
    family = "test-time adaptation"
    paper = "Niu et al., Efficient Test-Time Model Adaptation without Forgetting, ICML 2022"
    needs = "exemplars for replay, Fisher information of the source, one pass over a target"
    config_type = EATAConfig
    large: ClassVar[Mapping[str, Any]] = {**LARGE_STEPS, "fisher_weight": 2000.0}

    def __init__(self, setting: Setting, config: EATAConfig) -> None:
        super().__init__(setting, config)
        self.threshold = config.margin * math.log(len(setting.classes))
        self.fisher: dict[str, Tensor] = {}
        self.anchors: dict[str, Tensor] = {}
        self.mean: Tensor | None = None
        self._shown = self._learnt = 0

    def begin_stage(self) -> None:
        """A new optimiser; counts from zero."""
        super().begin_stage()
        self._shown = self._learnt = 0

    def learn(self, inputs: Tensor) -> Tensor:
        """Logits of a batch by its own statistics, before one step on the images worth it."""
        logits = self.by_batch(inputs)
        kept, self.mean = select(logits, self.mean, self.threshold, self.config.similarity)
        count = int(kept.sum())
        if count:
            loss = weighted_entropy(logits[kept], self.threshold, weighted=self.config.weighted)
            if self.fisher and self.config.fisher_weight:
                now = affine_parameters(self.network)
                loss = loss + distance(now, self.anchors, self.fisher, self.config.fisher_weight)
            self.minimise(loss)
        self._shown, self._learnt = self._shown + len(inputs), self._learnt + count
        return logits

    def finish_source(self, domain: LabelledDomain) -> dict[str, float]:
        """Takes Fisher information and anchors, then exemplars."""
        self.anchors = {name: p.detach().clone() for name, p in affine_parameters(self.network).items()}
        self.fisher = self.measure_fisher(domain.images)
        return super().finish_source(domain)

    def finish_target(self, images: Tensor) -> dict[str, float]:
        """Takes exemplars; records the share of images learnt from."""
        return {"learnt_from": self._learnt / max(self._shown, 1)} | super().finish_target(images)

    def measure_fisher(self, images: Tensor) -> dict[str, Tensor]:
        """Mean over batches of the squared gradient of their cross-entropy with the network's own labels."""
        order = torch.randperm(len(images), generator=self.setting.randomness.generator("fisher"))
        order = order[: self.config.fisher_images]
        parameters = affine_parameters(self.network)
        fisher = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
        parts = in_batches(order.to(images.device), FISHER_BATCH) if len(order) >= 2 else []
        self.network.eval()
        for part in parts:
            logits = self.by_batch(self.scaling(images[part]))
            loss = F.cross_entropy(logits, logits.argmax(dim=1))
            for total, gradient in zip(
                fisher.values(), torch.autograd.grad(loss, list(parameters.values())), strict=True
            ):
                total += gradient.square() / len(parts)
        return fisher

    def state(self) -> dict[str, Tensor]:
        """Network, memory, Fisher information, anchors and mean prediction."""
        mean = {} if self.mean is None else {"mean": self.mean}
        return super().state() | pack({"fisher": self.fisher, "anchors": self.anchors, "eata": mean})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        parts, device = unpack(state), self.setting.device
        self.fisher = {name: tensor.to(device) for name, tensor in parts.get("fisher", {}).items()}
        self.anchors = {name: tensor.to(device) for name, tensor in parts.get("anchors", {}).items()}
        self.mean = parts["eata"]["mean"].to(device) if "eata" in parts else None
