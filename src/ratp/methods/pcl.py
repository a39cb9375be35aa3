"""PCL — "PCL: Proxy-based Contrastive Learning for Domain Generalization", CVPR 2022.

Learns from several labelled domains: cross-entropy, and a contrastive loss between samples and class proxies, which
are the classifier's rows; both are projected first, samples by a linear layer, proxies by a matrix.

* Source stage: cross-entropy + proxy contrastive loss.
* Target stage: the same with SHOT's pseudo labels, anew every epoch; batches mix target and memory, whose domains
  stand for the several sources. All parameters train.
* ``augment`` adds RandMix, as RaTP's ablation does, on digits (``r_con`` is its value there): copies of all source
  images, and of target images the model is confident about.

Departures from the published code, all because the methods compared share one recipe: SGD of the harness instead of
Adam, BatchNorm that trains instead of frozen statistics, no dropout in the bottleneck, no averaging of weights (SWAD),
batches from the union of the domains instead of equal parts of each. Both projections start uniform in ±1/√d. They
take no part in predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ratp.config import switch
from ratp.copies import CopiesConfig, CopyingMethod
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.method import Setting, pack, unpack
from ratp.network import Output
from ratp.parts.losses import cross_entropy, mean_over
from ratp.parts.pcl import proxy_contrastive
from ratp.parts.sgd import SGDConfig, StageSGD
from ratp.phase import Phase
from ratp.pseudo_labels import PseudoLabelPhase


@dataclass(frozen=True)
class PCLConfig(CopiesConfig):
    """Switches of PCL."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    weight: float = switch(1.0, "weight of the proxy contrastive loss", minimum=0)
    scale: float = switch(12.0, "factor on its cosines", above=0)
    projection: bool = switch(True, "samples and proxies are projected for the loss (published code)")
    refresh: int = switch(1, "epochs between labellings of a target", minimum=1)
    replay: Literal["union", "none"] = switch("union", "batches from target and memory together, or no replay")


class Projections(nn.Module):
    """What the loss sees of embeddings and of the classifier's rows.

    Attributes:
        samples: P, a linear layer.
        proxies: V, a square matrix.
    """

    def __init__(self, dim: int) -> None:
        """Makes both with random numbers, drawn from torch's generator."""
        super().__init__()
        bound = 1 / math.sqrt(dim)
        self.samples = nn.Linear(dim, dim)  # uniform in ±1/√d by itself
        self.proxies = nn.Parameter(torch.empty(dim, dim).uniform_(-bound, bound))

    def forward(self, embedding: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        """P(z) and W·Vᵀ."""
        return self.samples(embedding), prototypes @ self.proxies.T


class PCL(CopyingMethod):
    """Cross-entropy and proxy contrastive loss, by SHOT's labels on targets."""

    name = "pcl"
    title = "PCL: proxy-based contrastive learning"
    family = "multiple domain generalisation"
    paper = "Yao et al., PCL: Proxy-based Contrastive Learning for Domain Generalization, CVPR 2022"
    needs = "source labels, memory, pseudo labels of targets"
    config_type = PCLConfig
    config: PCLConfig

    def __init__(self, setting: Setting, config: PCLConfig) -> None:
        super().__init__(setting, config)
        self.projections: Projections | None = None
        if config.projection:
            with setting.randomness.scope("projections"):
                self.projections = Projections(setting.recipe.network.dim).to(setting.device)

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase with true labels."""
        return [PCLPhase(self, domain.images, domain.labels)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """One phase with pseudo labels and memory."""
        return [PCLPhase(self, domain.images, None)]

    def parameters(self) -> list[nn.Parameter]:
        """All that trains."""
        modules = [self.network] if self.projections is None else [self.network, self.projections]
        return [parameter for module in modules for parameter in module.parameters()]

    def loss(self, embedding: Tensor, labels: Tensor, valid: Tensor | None = None) -> Tensor:
        """The proxy contrastive loss of a batch, over the rows that count."""
        proxies = self.network.prototypes
        if self.projections is not None:
            embedding, proxies = self.projections(embedding, proxies)
        return mean_over(proxy_contrastive(embedding, labels, proxies, self.config.scale, valid), valid)

    def state(self) -> dict[str, Tensor]:
        """Network, memory and projections."""
        projections = {} if self.projections is None else pack({"projections": self.projections.state_dict()})
        return super().state() | projections

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        if self.projections is not None:
            self.projections.load_state_dict(unpack(state)["projections"])


class PCLPhase(PseudoLabelPhase):
    """One stage of PCL."""

    def __init__(self, method: PCL, images: Tensor, labels: Tensor | None) -> None:
        recipe, config = method.setting.recipe, method.config
        optimiser = StageSGD(method.parameters(), recipe.lr, recipe.epochs, config.sgd, recipe.steps)
        super().__init__(method, images, labels, optimiser, union=config.replay == "union", refresh=config.refresh)
        self._loss, self._weight, self._copies = method.loss, config.weight, method.copies()
        if self._copies is not None:
            self.generators = *self.generators, *self._copies.generators

    def step(self) -> dict[str, Tensor]:
        """One update on a batch."""
        batch = self.batches.draw(self.batch)
        output, valid = self._learn(batch.images)
        labels = batch.labels.repeat(len(output.logits) // len(batch.labels))
        terms = {"ce": cross_entropy(output.logits, labels, valid)}
        if self._weight:
            terms["pcl"] = self._weight * self._loss(output.embedding, labels, valid)
        total = torch.stack(list(terms.values())).sum()
        self.optimiser.minimise(total)
        return {"total": total, **terms}

    def _learn(self, images: Tensor) -> tuple[Output, Tensor | None]:
        """What the network makes of images and copies, and which of them count; None: all do."""
        if self._copies is None:
            return self.network.train()(images), None
        return self._copies.learn_confident(images) if self.is_target else (self._copies.learn_all(images), None)
