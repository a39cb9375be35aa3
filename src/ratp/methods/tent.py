"""Tent — "Tent: Fully Test-Time Adaptation by Entropy Minimization", ICLR 2021.

* Source stage: cross-entropy.
* Target stage: one pass. Each batch is normalised by its own statistics and predicted; then one step on BatchNorm's
  γ and β lowers the mean entropy of these predictions. Everything else is frozen; nothing is reset.
* With replay, the cross-entropy of a batch from the memory is added, in a forward pass of its own.

Departures from the published code: all BatchNorm layers take part, found by type (it takes two-dimensional ones only,
so that the bottleneck's would go on tracking the targets); dropout is off (its training mode turns it on, and
predictions with it); a batch of one image, which has no statistics, is predicted by running ones and not learnt from.
The memory is the comparison's, not Tent's. Batches are the recipe's (200 and 64 in the paper).

Running statistics are the source's to the end, so that after adaptation the network is measured with those of the
images at hand (``eval_bn``): rows of the matrix from the first target on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from ratp.config import switch
from ratp.method import Statistics
from ratp.online import LARGE_STEPS, AffineMethod, StepConfig
from ratp.parts.information import logit_entropy
from ratp.parts.sgd import SGDConfig


@dataclass(frozen=True)
class TentConfig:
    """Switches of Tent."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser on the source")
    step: StepConfig = switch(StepConfig(), "steps on targets")
    replay: Literal["separate", "none"] = switch("separate", "a memory batch beside each batch, or no replay")
    eval_bn: Statistics = switch("batch", "BatchNorm when measured after adaptation: of the images at hand, or running")


class Tent(AffineMethod):
    """Lowers the entropy of its predictions by BatchNorm's γ and β."""

    name = "tent"
    title = "Tent: test-time entropy minimisation"
    family = "test-time adaptation"
    paper = "Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021"
    needs = "exemplars for replay, one pass over a target"
    config_type = TentConfig
    large: ClassVar[Mapping[str, Any]] = LARGE_STEPS

    def learn(self, inputs: Tensor) -> Tensor:
        """Logits of a batch by its own statistics, before one step lowers their entropy."""
        logits = self.by_batch(inputs)
        self.minimise(logit_entropy(logits).mean())
        return logits
