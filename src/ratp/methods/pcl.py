"""PCL — "PCL: Proxy-based Contrastive Learning for Domain Generalization", CVPR 2022.

Learns from several labelled domains by cross-entropy and a contrastive loss between samples and class proxies, the
classifier's rows. Both are projected first, samples by a linear layer, proxies by a matrix.

* Source stage: cross-entropy + proxy contrastive loss.
* Target stage: the same with SHOT's pseudo-labels, updated every epoch. Batches mix target and memory, whose domains
  take the place of the several sources. All parameters learn.
* ``augment`` adds RandMix, as RaTP's ablation on digits does (``r_con`` has its value there): copies of all source
  images, and of target images that the model is confident about.

Deviations from the published code, all because the compared methods share one recipe: RaTP's SGD instead of Adam,
trained BatchNorm instead of frozen statistics, no dropout in the bottleneck, no weight averaging (SWAD), and batches
from the union of the domains instead of equal parts of each. Both projections start uniform in ±1/√d and take no part
in predictions.

Another deviation: each sample has the proxy of its own class and the samples of other classes in one term, as in the
paper. The published code lists the cosines to own proxies class by class and the rest in the order of the batch, so a
batch that is not sorted by label joins the cosine of one sample with the negatives of another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ratp.config import switch
from ratp.functional.losses import cross_entropy, mean_over, proxy_contrastive
from ratp.functional.optim import SGDConfig
from ratp.methods.shared.pseudo_labels import PseudoLabelMethod, PseudoLabelPhase
from ratp.methods.shared.randmix_copies import CopiesConfig, CopyingMethod
from ratp.training.method import Setting
from ratp.training.phase import Phase


@dataclass(frozen=True)
class PCLConfig(CopiesConfig):
    """Switches of PCL."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    weight: float = switch(1.0, "weight of the proxy contrastive loss", minimum=0)
    scale: float = switch(12.0, "factor on its cosines", above=0)
    projection: bool = switch(True, "project samples and proxies for the loss (published code)")
    refresh: int = switch(1, "epochs between labellings of a target", minimum=1)
    replay: Literal["union", "none"] = switch("union", "batches from target and memory together, or no replay")


class Projections(nn.Module):
    """Projects embeddings and the rows of the classifier for the loss."""

    def __init__(self, dim: int) -> None:
        """Initialises both at random, from torch's generator."""
        super().__init__()
        bound = 1 / math.sqrt(dim)
        self.samples = nn.Linear(dim, dim)  # P, by default uniform in ±1/√d
        self.proxies = nn.Parameter(torch.empty(dim, dim).uniform_(-bound, bound))  # V

    def forward(self, embedding: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        """Computes P(z) and W·Vᵀ."""
        return self.samples(embedding), prototypes @ self.proxies.T


class PCL(CopyingMethod, PseudoLabelMethod):
    """Cross-entropy and proxy contrastive loss, by SHOT's labels on targets."""

    name = "pcl"
    title = "PCL: proxy-based contrastive learning"
    family = "multiple domain generalisation"
    paper = "Yao et al., PCL: Proxy-based Contrastive Learning for Domain Generalization, CVPR 2022"
    needs = "its own source training, exemplars, many passes over a target"
    config_type = PCLConfig
    config: PCLConfig

    def __init__(self, setting: Setting, config: PCLConfig) -> None:
        super().__init__(setting, config)
        self.projections: Projections | None = None
        if config.projection:
            with setting.randomness.scope("projections"):
                self.projections = Projections(setting.recipe.network.dim).to(setting.device)
            self.extras = {"projections": self.projections, **self.extras}

    def phases(self, images: Tensor, labels: Tensor | None) -> Sequence[Phase]:
        """Returns one phase."""
        return [PCLPhase(self, images, labels)]

    def parameters(self) -> list[nn.Parameter]:
        """Returns all parameters to train."""
        modules = [self.network] if self.projections is None else [self.network, self.projections]
        return [parameter for module in modules for parameter in module.parameters()]

    def loss(self, embedding: Tensor, labels: Tensor, valid: Tensor | None = None) -> Tensor:
        """Computes the proxy contrastive loss of a batch, over the rows that count."""
        proxies = self.network.prototypes
        if self.projections is not None:
            embedding, proxies = self.projections(embedding, proxies)
        return mean_over(proxy_contrastive(embedding, labels, proxies, self.config.scale, valid), valid)


class PCLPhase(PseudoLabelPhase):
    """Trains PCL on one domain."""

    def __init__(self, method: PCL, images: Tensor, labels: Tensor | None) -> None:
        config, optimiser = method.config, method.optimiser(method.parameters())
        super().__init__(method, images, labels, optimiser)
        self._loss, self._weight, self._copies = method.loss, config.weight, method.copies()
        self.generators = *self.generators, *self._copies.generators

    def step(self) -> dict[str, Tensor]:
        """Updates the network once on a batch."""
        batch = self.batches.draw(self.batch)
        if self.is_target:
            output, valid = self._copies.learn_confident(batch.images)
        else:
            output, valid = self._copies.learn_all(batch.images), None
        labels = batch.labels.repeat(len(output.logits) // len(batch.labels))
        terms = {"ce": cross_entropy(output.logits, labels, valid)}
        if self._weight:
            terms["pcl"] = self._weight * self._loss(output.embedding, labels, valid)
        return self.minimise(terms)
