"""SAR — "Towards Stable Test-Time Adaptation in Dynamic Wild World", ICLR 2023.

* Source stage: cross-entropy.
* Target stage: one pass as in Tent, but a step learns only from images whose entropy H is below margin · ln K, and it
  is sharpness-aware: from the gradient g of their mean entropy at θ, it goes to θ + ρ·g/‖g‖, selects once more among
  these images there, and applies the gradient found there to θ. If no image is selected, the first or the second time,
  there is no step.
* Recovery: if the moving average of the second losses falls below a limit, a sign of collapse, then γ, β and the
  optimiser start again as after the source.
* γ and β of normalisation layers learn, but those of the last quarter of the blocks and of all that follows do not
  (``freeze_top``). That quarter is layer4 of a ResNet, the last three of a transformer's twelve blocks, and DTN's third
  layer; final normalisation layers and the bottleneck follow it.
* Replay adds the cross-entropy of a memory batch to the second loss, at θ + ρ·g/‖g‖. It counts neither for g nor for
  the moving average.

Deviations from the published code: normalisation layers are selected by type and place (it goes by names of ResNets and
transformers, and so leaves nothing out of other networks: ``freeze_top=false``); dropout is off; a batch of one image
has no statistics, so it is predicted with running ones and not learned from. The comparison adds the memory
(``replay``). The moving average persists across targets, like the weights. Batches have the recipe's size (64 in the
paper).

Guesses: the limit 0.2 is for a thousand classes; it is multiplied by ln K / ln 1000 (``recover_scale=none``: not). The
paper has no DTN, which has the values of the benchmark of the authors of ROID for CIFAR-10, Adam at 0.001; for SAR,
that benchmark itself keeps SGD, at this rate (``step.optimiser=sgd``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ratp.config import switch
from ratp.functional.losses import logit_entropy
from ratp.functional.optim import WITH_MOMENTUM
from ratp.methods.shared.online import (
    LARGE_STEPS,
    AdaptationConfig,
    AnchoredMethod,
    logits_by_batch,
    lower_affine_parameters,
)
from ratp.training.method import Setting, pack, unpack

MEMORY_OF_LOSS = 0.9
PUBLISHED_CLASSES = 1000
SMALLEST_NORM = 1e-12


@dataclass(frozen=True)
class SARConfig(AdaptationConfig):
    """Switches of SAR."""

    margin: float = switch(0.4, "select images with entropy below this share of ln K, the largest", minimum=0)
    radius: float = switch(0.05, "ρ, how far a step looks uphill", minimum=0)
    recover_below: float = switch(0.2, "average loss below which the network returns to the source", minimum=0)
    recover_scale: Literal["classes", "none"] = switch("classes", "multiply this limit by ln K / ln 1000, or not")
    freeze_top: bool = switch(True, "leave out the last quarter of the blocks and all that follows")


@contextmanager
def uphill(parameters: Sequence[Tensor], gradients: Sequence[Tensor], radius: float) -> Iterator[None]:
    """Moves parameters to θ + ρ·g/‖g‖ within the block, with the norm over all of them; puts θ back, bit by bit."""
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter += radius / (norm + SMALLEST_NORM) * gradient
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


class SAR(AnchoredMethod):
    """Tent on reliable images, in steps to flat minima, back to the source if it collapses."""

    name = "sar"
    title = "SAR: sharpness-aware and reliable entropy minimisation"
    family = "test-time adaptation"
    paper = "Niu et al., Towards Stable Test-Time Adaptation in Dynamic Wild World, ICLR 2023"
    needs = "normalisation layers, batch statistics, exemplars for replay, one pass over a target"
    config_type = SARConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_MOMENTUM
    saved = "_recoveries"
    large: ClassVar[Mapping[str, Any]] = LARGE_STEPS

    def __init__(self, setting: Setting, config: SARConfig) -> None:
        super().__init__(setting, config)
        most_entropy = math.log(len(setting.classes))
        self.threshold = config.margin * most_entropy
        scale = most_entropy / math.log(PUBLISHED_CLASSES) if config.recover_scale == "classes" else 1.0
        self.limit = config.recover_below * scale
        self.mean_loss: float | None = None  # moving average of the second losses; None: none since the last recovery

    def adapted(self) -> dict[str, nn.Parameter]:
        """Returns γ and β below the last blocks, or all."""
        return lower_affine_parameters(self.network) if self.config.freeze_top else super().adapted()

    def begin_stage(self) -> None:
        """Creates optimiser and replay; resets the counts."""
        super().begin_stage()
        self._recoveries = 0

    def learn(self, inputs: Tensor) -> Tensor:
        """Returns logits of a batch by its own statistics, then takes one sharpness-aware step."""
        logits = logits_by_batch(self.network, inputs)
        parameters, entropy = list(self._trained.values()), logit_entropy(logits)
        kept = entropy.detach() < self.threshold
        count = 0
        if bool(kept.any()):
            slope = _gradients(entropy[kept].mean(), parameters)
            with uphill(parameters, slope, self.config.radius):
                entropy = logit_entropy(logits_by_batch(self.network, inputs)[kept])
                still = entropy.detach() < self.threshold
                if count := int(still.sum()):
                    loss = entropy[still].mean()
                    gradients = _gradients(self.with_replay(loss, self.network), parameters)
            if count and self._optimiser is not None:
                self._optimiser.update(gradients)
                self._watch(loss.item())
        self.count(len(inputs), count)
        return logits

    def _watch(self, loss: float) -> None:
        """Updates the moving average of the loss, and returns to the source if it is below the limit."""
        mean = self.mean_loss
        self.mean_loss = loss if mean is None else MEMORY_OF_LOSS * mean + (1 - MEMORY_OF_LOSS) * loss
        if self.mean_loss >= self.limit:
            return
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(self.anchors[name])
        self._restart_optimiser()
        self.mean_loss = None
        self._recoveries += 1

    def finish_target(self, images: Tensor) -> dict[str, float]:
        """Takes exemplars; records the share of images learned from and the recoveries."""
        return {"recoveries": float(self._recoveries)} | super().finish_target(images)

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory, the source's values and the average loss."""
        mean = {} if self.mean_loss is None else {"mean_loss": torch.tensor(self.mean_loss, dtype=torch.float64)}
        return super().state() | pack({"sar": mean})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        own = unpack(state).get("sar")
        self.mean_loss = float(own["mean_loss"]) if own else None


def _gradients(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Computes the gradient of every parameter; zeros where the loss does not depend on it."""
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
