"""AdaBN — "Revisiting Batch Normalization For Practical Domain Adaptation", 2017; here a control.

Source model with BatchNorm statistics of the target, and not a single gradient step: what is left of Tent, EATA and
CoTTA at rate zero. A method that normalises by the batch has to beat this, not source-only training.

* ``eval_bn`` batch (default): nothing is learnt on a target; once there was one, every measurement takes the
  statistics of the images at hand, as those methods do.
* ``eval_bn`` running: the pass over a target replaces the running statistics by the mean of its batches' statistics,
  as in the paper, and measurements use these. Looking back at earlier domains is then done with the last one's.

The paper keeps the statistics of each domain and is told which one an image is from; nobody tells here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratp.config import switch
from ratp.method import Setting, Statistics
from ratp.online import BatchStatistics
from ratp.parts.batch_norm import batch_norms, by_batch
from ratp.parts.sgd import SGDConfig


@dataclass(frozen=True)
class AdaBNConfig:
    """Switches of AdaBN."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser on the source")
    eval_bn: Statistics = switch("batch", "statistics after adaptation: of the images at hand, or of the last target")


class AdaBN(BatchStatistics):
    """Takes BatchNorm's statistics from the target and learns nothing."""

    name = "adabn"
    title = "AdaBN: statistics of the target, no gradient step"
    family = "control"
    paper = "Li et al., Revisiting Batch Normalization For Practical Domain Adaptation, ICLR workshop 2017"
    needs = "no memory, one pass over a target"
    config_type = AdaBNConfig

    def __init__(self, setting: Setting, config: AdaBNConfig) -> None:
        super().__init__(setting, config)
        self._batches = 0

    def begin_stage(self) -> None:
        """Statistics start anew."""
        self._batches = 0

    @torch.no_grad()
    def learn(self, inputs: Tensor) -> Tensor:
        """Logits of a batch by its own statistics, which go into the running ones if these are used."""
        if self.config.eval_bn == "running":
            return self._track(inputs)
        with by_batch(self.network):
            return self.network(inputs).logits

    def _track(self, inputs: Tensor) -> Tensor:
        """Normalises by the batch; the i-th batch of a stage enters the running mean with weight 1/i."""
        layers = list(batch_norms(self.network).values())
        usual = [layer.momentum for layer in layers]
        self._batches += 1
        for layer in layers:
            layer.train()
            layer.momentum = 1 / self._batches
        try:
            return self.network(inputs).logits
        finally:
            for layer, momentum in zip(layers, usual, strict=True):
                layer.eval()
                layer.momentum = momentum
