"""DeYO — "Entropy is not Enough for Test-Time Adaptation", ICLR 2024.

Tent, on images that are recognised with certainty and by their shape. Cutting an image into 4 × 4 patches in random
order destroys its shape; PLPD is the probability that its label loses:

    PLPD = p_ŷ(image) − p_ŷ(shuffled image),   ŷ = argmax p(image)

* Source stage: cross-entropy.
* Target stage: one pass as in Tent, but a step learns from selected images only: those whose entropy H is below
  margin · ln K and whose PLPD exceeds ``plpd``. Each weighs exp(E₀ − H) + exp(PLPD), with E₀ = 0.4 · ln K
  (``weight_margin``); the loss is the mean of weight · H. If no image is selected, there is no step.
* γ and β of normalisation layers learn, but those of the last quarter of the blocks and of all that follows do not
  (``freeze_top``). That quarter is layer4 of a ResNet, the last three of a transformer's twelve blocks, and DTN's third
  layer; final normalisation layers and the bottleneck follow it.
* Replay adds the cross-entropy of a memory batch, which has its own forward pass.

Deviations from the published code: normalisation layers are selected by type and place (it goes by names of ResNets and
transformers, and so leaves nothing out of other networks: ``freeze_top=false``); dropout is off; a batch of one image
has no statistics, so it is predicted with running ones and not learned from, and the same holds for a single image
below the entropy's limit; where the side of an image is no multiple of four, the last rows and columns stay in place
(it resizes). SGD has Nesterov's momentum (``nesterov``), as in the benchmark of the authors of ROID. The comparison
adds the memory (``replay``). Batches have the recipe's size (64 in the paper).

A guess: the paper has no DTN, which has the values of this benchmark for CIFAR-10, Adam at 0.001 (``step``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ratp.config import switch
from ratp.errors import ConfigError
from ratp.functional.losses import logit_entropy
from ratp.functional.optim import WITH_MOMENTUM
from ratp.methods.shared.online import (
    LARGE_STEPS,
    AdaptationConfig,
    SelectiveMethod,
    logits_by_batch,
    lower_affine_parameters,
)
from ratp.training.method import Setting


@dataclass(frozen=True)
class DeYOConfig(AdaptationConfig):
    """Switches of DeYO."""

    nesterov: bool = switch(True, "Nesterov's momentum, if step.optimiser is sgd")
    margin: float = switch(0.5, "select images with entropy below this share of ln K, the largest", minimum=0)
    plpd: float = switch(0.2, "select images whose confidence falls by more than this if they are shuffled", minimum=-1)
    patches: int = switch(4, "patches in each row and column of a shuffled image", minimum=1)
    weight_margin: float = switch(0.4, "E₀ of the weight exp(E₀ − H), as a share of ln K", minimum=0)
    weighted: bool = switch(True, "an image weighs exp(E₀ − H) + exp(PLPD); off: 1")
    freeze_top: bool = switch(True, "leave out the last quarter of the blocks and all that follows")


def shuffle_patches(images: Tensor, order: Tensor) -> Tensor:
    """Rearranges the patches of each image: position i, row by row, gets patch ``order[:, i]``, for p² patches.

    Rows and columns beyond p whole patches stay in place.
    """
    count, channels = images.shape[:2]
    side = math.isqrt(order.shape[1])
    height, width = (length // side for length in images.shape[2:])
    shuffled = images.clone()
    inner = shuffled[:, :, : side * height, : side * width]
    grid = inner.reshape(count, channels, side, height, side, width).permute(0, 2, 4, 1, 3, 5)
    patches = grid.flatten(1, 2)[torch.arange(count, device=images.device)[:, None], order]
    inner.copy_(patches.view(grid.shape).permute(0, 3, 1, 4, 2, 5).reshape(inner.shape))
    return shuffled


def label_probability_fall(logits: Tensor, shuffled: Tensor) -> Tensor:
    """Computes PLPD of each row: by how much the probability of the predicted label falls for the shuffled image."""
    label = logits.argmax(dim=1, keepdim=True)
    return (logits.softmax(dim=1).gather(1, label) - shuffled.softmax(dim=1).gather(1, label)).squeeze(1)


class DeYO(SelectiveMethod):
    """Tent on images that are recognised with certainty and by their shape."""

    name = "deyo"
    title = "DeYO: test-time adaptation to what depends on shape"
    family = "test-time adaptation"
    paper = "Lee et al., Entropy is not Enough for Test-Time Adaptation, ICLR 2024"
    needs = "normalisation layers, batch statistics, exemplars for replay, one pass over a target"
    config_type = DeYOConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_MOMENTUM
    saved = "_order"
    large: ClassVar[Mapping[str, Any]] = LARGE_STEPS

    def __init__(self, setting: Setting, config: DeYOConfig) -> None:
        super().__init__(setting, config)
        if config.patches > min(setting.image_size):
            height, width = setting.image_size
            raise ConfigError(
                f"patches must be at most the side of the images, {height}×{width}; got {config.patches}."
            )
        self._most_entropy = math.log(len(setting.classes))

    def adapted(self) -> dict[str, nn.Parameter]:
        """Returns γ and β below the last blocks, or all."""
        return lower_affine_parameters(self.network) if self.config.freeze_top else super().adapted()

    def begin_stage(self) -> None:
        """Creates optimiser, replay and the generator of patch orders."""
        super().begin_stage()
        self._order = self.setting.generator("patches", self.stage)

    def learn(self, inputs: Tensor) -> Tensor:
        """Returns logits of a batch by its own statistics, then takes one step on the selected images."""
        config = self.config
        logits = logits_by_batch(self.network, inputs)
        entropy = logit_entropy(logits)
        kept = entropy.detach() < config.margin * self._most_entropy
        fall = torch.full_like(entropy, -torch.inf)  # not selected unless measured
        if int(kept.sum()) >= self.smallest:
            fall[kept] = self._fall(inputs[kept], logits[kept])
        kept = kept & (fall > config.plpd)
        if count := int(kept.sum()):
            certainty = config.weight_margin * self._most_entropy - entropy.detach()
            weight = certainty.exp() + fall.exp() if config.weighted else torch.ones_like(fall)
            self.minimise((weight * entropy)[kept].mean())
        self.count(len(inputs), count)
        return logits

    @torch.no_grad()
    def _fall(self, inputs: Tensor, logits: Tensor) -> Tensor:
        """Computes PLPD of images, normalised together once they are shuffled."""
        shape = len(inputs), self.config.patches**2
        order = torch.rand(shape, generator=self._order, device=inputs.device).argsort(dim=1)
        return label_probability_fall(logits, logits_by_batch(self.network, shuffle_patches(inputs, order)))
