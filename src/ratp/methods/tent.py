"""Tent — "Tent: Fully Test-Time Adaptation by Entropy Minimization", ICLR 2021.

* Source stage: cross-entropy.
* Target stage: one pass. Each batch is normalised by its own statistics and predicted; then one step on the γ and β of
  normalisation layers lowers the mean entropy of these predictions. Everything else is frozen; nothing is reset.
* Replay adds the cross-entropy of a memory batch, which has its own forward pass.

Running statistics remain those of the source, so after adaptation the network is evaluated with the statistics of the
batch (``eval_bn``), from the first target on.

Deviations from the published code: all normalisation layers take part, selected by type: BatchNorm, LayerNorm and
GroupNorm (it selects only two-dimensional BatchNorm, so the bottleneck's would keep tracking the targets); dropout is
off (its training mode turns it on, even for predictions); a batch of one image has no statistics, so it is predicted
with running ones and not learned from. The comparison adds the memory (``replay``). Batches have the recipe's size (200
and 64 in the paper).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ratp.functional.losses import logit_entropy
from ratp.functional.optim import WITH_MOMENTUM
from ratp.methods.shared.online import LARGE_STEPS, AdaptationConfig, AffineMethod, logits_by_batch


class Tent(AffineMethod):
    """Lowers the entropy of its predictions by the γ and β of normalisation layers."""

    name = "tent"
    title = "Tent: test-time entropy minimisation"
    family = "test-time adaptation"
    paper = "Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021"
    needs = "normalisation layers, batch statistics, exemplars for replay, one pass over a target"
    config_type = AdaptationConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_MOMENTUM
    large: ClassVar[Mapping[str, Any]] = LARGE_STEPS

    def learn(self, inputs: Tensor) -> Tensor:
        """Returns logits of a batch by its own statistics, before one step lowers their entropy."""
        logits = logits_by_batch(self.network, inputs)
        self.minimise(logit_entropy(logits).mean())
        return logits
