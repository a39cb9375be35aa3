"""AdaBN — "Revisiting Batch Normalization For Practical Domain Adaptation", 2017; used here as a control.

The source model with BatchNorm statistics of the target and no gradient step: what Tent, EATA and CoTTA reduce to at
rate zero. A method that normalises by the batch must beat this, not source-only training.

* ``eval_bn`` batch (default): nothing is learned on a target. After the first target, every evaluation normalises by
  the batch, as those methods do.
* ``eval_bn`` running: the pass over a target replaces the running statistics by the mean over its batches, as in the
  paper, and evaluations use them; earlier domains are then evaluated with the last target's statistics.

A feature extractor without BatchNorm, such as a vision transformer, has no such statistics: only those of the
bottleneck change then, and a note says so before training.

Deviation: the paper keeps statistics per domain and knows the domain of every image; here it is unknown.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ratp.config import switch
from ratp.data.domain import LabelledDomain
from ratp.functional.norm import batch_norms
from ratp.functional.optim import WITH_MOMENTUM, SGDConfig
from ratp.methods.shared.online import BatchStatistics, FewLayersWarning, logits_by_batch, tracking
from ratp.training.method import Setting, Statistics
from ratp.training.phase import Phase


@dataclass(frozen=True)
class AdaBNConfig:
    """Switches of AdaBN."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser on the source")
    eval_bn: Statistics = switch("batch", "BatchNorm statistics after adaptation: of the batch, or of the last target")


class AdaBN(BatchStatistics):
    """Takes BatchNorm's statistics from the target and learns nothing."""

    name = "adabn"
    title = "AdaBN: statistics of the target, no gradient step"
    family = "control"
    paper = "Li et al., Revisiting Batch Normalization For Practical Domain Adaptation, ICLR workshop 2017"
    needs = "BatchNorm, batch statistics, no exemplars, one pass over a target"
    config_type = AdaBNConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_MOMENTUM
    saved = "_batches"

    def __init__(self, setting: Setting, config: AdaBNConfig) -> None:
        super().__init__(setting, config)
        self._batches = 0

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase of cross-entropy; says so first if the feature extractor has no BatchNorm."""
        if not batch_norms(self.network.backbone):
            text = f"adabn takes BatchNorm's statistics, and {self.setting.recipe.network.backbone} has no BatchNorm"
            warnings.warn(f"{text}: only those of the bottleneck will change", FewLayersWarning, stacklevel=2)
        return super().source_phases(domain)

    def begin_stage(self) -> None:
        """Restarts the running mean."""
        self._batches = 0

    @torch.no_grad()
    def learn(self, inputs: Tensor) -> Tensor:
        """Returns logits of a batch by its own statistics; ``eval_bn`` running averages these over the pass."""
        if self.config.eval_bn == "batch":
            return logits_by_batch(self.network, inputs)
        # The i-th batch of a stage enters the running mean with weight 1/i.
        layers = batch_norms(self.network).values()
        usual = [layer.momentum for layer in layers]
        self._batches += 1
        for layer in layers:
            layer.momentum = 1 / self._batches
        try:
            with tracking(self.network):
                return self.network(inputs).logits
        finally:
            for layer, momentum in zip(layers, usual, strict=True):
                layer.momentum = momentum
