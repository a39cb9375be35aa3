"""The class proportions of a target, for methods with RandMix and exemplars."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ratp.functional.class_mix import estimate_proportions
from ratp.functional.randmix import RandMix
from ratp.training.phases import NetworkMethod

# Copies of each exemplar on which predictions are calibrated.
CALIBRATING = 4


class ClassMix:
    """Estimates how frequent each class is in a target, from the network's predictions alone.

    They are calibrated on copies of the exemplars: copies look like a domain not seen yet, and have labels.

    Args:
        method: The method; its exemplars are those of earlier domains.
        randmix: What makes the copies.
        kind: How to estimate.
        smoothing: How far the estimate moves towards equal proportions; None: the less sure, the farther.
    """

    def __init__(
        self, method: NetworkMethod, randmix: RandMix, kind: Literal["em", "confusion"], smoothing: float | None
    ) -> None:
        self._method, self._randmix, self._kind, self._smoothing = method, randmix, kind, smoothing
        self.generator = method.setting.generator("class mix", method.stage)

    def estimate(self, probabilities: Tensor) -> Tensor | None:
        """Returns the class proportions of images with these predictions (n, k); None: no exemplars tell."""
        memory = self._method.memory
        if not len(memory):
            return None
        known = self._predict_copies(memory.images)
        logits = probabilities.clamp_min(torch.finfo(torch.float32).tiny).log()
        return estimate_proportions(self._kind, logits, known, memory.labels.repeat(CALIBRATING), self._smoothing)

    @torch.no_grad()
    def _predict_copies(self, images: Tensor) -> Tensor:
        """Returns the logits of several copies of uint8 images, one round after the other."""
        method = self._method
        network, training = method.network, method.network.training
        parts = torch.split(images, method.setting.recipe.batch) * CALIBRATING
        network.eval()
        logits = [network(self._randmix(method.scaling(part), self.generator)).logits for part in parts]
        network.train(training)
        return torch.cat(logits)
