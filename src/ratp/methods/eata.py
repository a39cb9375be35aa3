"""EATA — "Efficient Test-Time Model Adaptation without Forgetting", ICML 2022.

* Source stage: cross-entropy. Then the Fisher information F of γ and β of normalisation layers is estimated on source
  images with the network's own labels, and the values of γ and β become the anchors θ⁰.
* Target stage: one pass as in Tent, but a step learns from selected images only: those whose entropy H is below
  E₀ = margin · ln K and whose prediction differs from the mean of earlier ones. Each weighs exp(E₀ − H). The loss adds
  α · Σ F (θ − θ⁰)², the distance from the anchors. If no image is selected, there is no step.
* Replay adds the cross-entropy of a memory batch, which has its own forward pass.

Deviations from the published code: all normalisation layers take part (BatchNorm, LayerNorm, GroupNorm), selected by
type; dropout is off; a batch of one image is predicted with running statistics and not learned from. The Fisher
information comes from training images, in batches of 64: as published, it squares the gradient of a batch's mean loss,
so its scale depends on the batch size. The published ε of 0.05 is for a thousand classes and would reject nearly all
images of ten; the default is that of CIFAR-10. The comparison adds the memory (``replay``). The mean prediction
persists across targets, like the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.data.domain import LabelledDomain
from ratp.functional.losses import logit_entropy
from ratp.functional.norm import affine_parameters
from ratp.functional.optim import WITH_MOMENTUM
from ratp.methods.shared.online import LARGE_STEPS, AdaptationConfig, SelectiveMethod, in_batches, logits_by_batch
from ratp.training.method import Setting, pack, unpack

FISHER_BATCH = 64
MEMORY_OF_MEAN = 0.9
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class EATAConfig(AdaptationConfig):
    """Switches of EATA."""

    margin: float = switch(0.4, "select images with entropy below this share of ln K, the largest", minimum=0)
    similarity: float = switch(0.4, "select images with a lower cosine of prediction and mean; above 1: all", minimum=0)
    weighted: bool = switch(True, "an image weighs exp(E₀ − H); off: 1")
    fisher_weight: float = switch(1.0, "weight α of the distance from the source's γ and β", minimum=0)
    fisher_images: int = switch(2000, "largest number of source images for the Fisher information", minimum=2)


def select(logits: Tensor, mean: Tensor | None, threshold: float, similarity: float) -> tuple[Tensor, Tensor | None]:
    """Selects images of a batch by their logits (n, classes); also returns the updated mean prediction.

    Entropies must be below ``threshold``, E₀, and |cos| with the mean prediction (classes,) below ``similarity``, ε.
    """
    logits = logits.detach()
    probabilities, kept = logits.softmax(dim=1), logit_entropy(logits) < threshold
    if mean is not None:
        kept = kept & (F.cosine_similarity(mean[None], probabilities, dim=1).abs() < similarity)
    if not bool(kept.any()):
        return kept, mean
    new = probabilities[kept].mean(dim=0)
    return kept, new if mean is None else MEMORY_OF_MEAN * mean + (1 - MEMORY_OF_MEAN) * new


def weighted_entropy(logits: Tensor, threshold: float, *, weighted: bool = True) -> Tensor:
    """Computes the mean of exp(E₀ − H)·H, with a constant weight."""
    entropy = logit_entropy(logits)
    return ((threshold - entropy.detach()).exp() * entropy if weighted else entropy).mean()


def distance(parameters: Tensors, anchors: Tensors, fisher: Tensors, weight: float) -> Tensor:
    """Computes α · Σ F (θ − θ⁰)² over all parameters."""
    return weight * torch.stack([(f * (parameters[n] - anchors[n]).square()).sum() for n, f in fisher.items()]).sum()


class EATA(SelectiveMethod):
    """Tent on reliable, non-redundant images, held near the source by Fisher information."""

    name = "eata"
    title = "EATA: efficient test-time adaptation without forgetting"
    family = "test-time adaptation"
    paper = "Niu et al., Efficient Test-Time Model Adaptation without Forgetting, ICML 2022"
    needs = (
        "normalisation layers, batch statistics, exemplars for replay, Fisher information of the source, "
        "one pass over a target"
    )
    config_type = EATAConfig
    source_free = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_MOMENTUM
    large: ClassVar[Mapping[str, Any]] = {**LARGE_STEPS, "fisher_weight": 2000.0}

    def __init__(self, setting: Setting, config: EATAConfig) -> None:
        super().__init__(setting, config)
        self.threshold = config.margin * math.log(len(setting.classes))
        self.fisher: dict[str, Tensor] = {}  # F by parameter; empty before the source stage
        self.anchors: dict[str, Tensor] = {}  # θ⁰ by parameter
        self.mean: Tensor | None = None  # mean prediction of the images learned from; None: no image yet

    def learn(self, inputs: Tensor) -> Tensor:
        """Returns logits of a batch by its own statistics, then takes one step on the selected images."""
        logits = logits_by_batch(self.network, inputs)
        kept, self.mean = select(logits, self.mean, self.threshold, self.config.similarity)
        if count := int(kept.sum()):
            loss = weighted_entropy(logits[kept], self.threshold, weighted=self.config.weighted)
            if self.fisher and (weight := self.config.fisher_weight):
                loss = loss + distance(affine_parameters(self.network), self.anchors, self.fisher, weight)
            self.minimise(loss)
        self.count(len(inputs), count)
        return logits

    def finish_source(self, domain: LabelledDomain) -> dict[str, float]:
        """Measures the Fisher information and stores the anchors, then takes exemplars."""
        self.anchors = {name: p.detach().clone() for name, p in affine_parameters(self.network).items()}
        self.fisher = self.measure_fisher(domain.images)
        return super().finish_source(domain)

    def measure_fisher(self, images: Tensor) -> dict[str, Tensor]:
        """Averages over batches the squared gradient of the cross-entropy with the network's own labels."""
        order = torch.randperm(len(images), generator=self.setting.randomness.generator("fisher"))
        order = order[: self.config.fisher_images]
        parameters = affine_parameters(self.network)
        fisher = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
        parts = in_batches(order.to(images.device), FISHER_BATCH) if len(order) >= 2 else []
        self.network.eval()
        for part in parts:
            logits = logits_by_batch(self.network, self.scaling(images[part]))
            loss = F.cross_entropy(logits, logits.argmax(dim=1))
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            for total, gradient in zip(fisher.values(), gradients, strict=True):
                total += gradient.square() / len(parts)
        return fisher

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory, Fisher information, anchors and mean prediction."""
        mean = {} if self.mean is None else {"mean": self.mean}
        return super().state() | pack({"fisher": self.fisher, "anchors": self.anchors, "eata": mean})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        parts, device = unpack(state), self.setting.device
        kept = ({name: p.to(device) for name, p in parts.get(part, {}).items()} for part in ("fisher", "anchors"))
        self.fisher, self.anchors = kept
        self.mean = parts["eata"]["mean"].to(device) if "eata" in parts else None
