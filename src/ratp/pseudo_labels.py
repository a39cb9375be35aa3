"""A phase for methods that learn a target by SHOT's pseudo labels, and the source by its labels, in the same way."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ratp.parts.sgd import StageSGD
from ratp.parts.shot_labels import shot_labels
from ratp.phase import Phase
from ratp.training import Batches, NetworkMethod, look, relabel


class PseudoLabelPhase(Phase):
    """One stage: batches, dropout, rate, labels and exemplars; a subclass says what a step is.

    On a target all images are labelled at the beginning of every ``refresh`` epochs by the network as it then is, and
    the last labels go to the memory. The step may be captured.

    Args:
        method: Whose network and memory.
        images: All training images of the domain, uint8.
        labels: True labels on the source; None on a target.
        optimiser: Of the stage.
        union: Whether batches of a target are drawn from target and memory together.
        refresh: Epochs between labellings.
    """

    captures = True

    def __init__(
        self,
        method: NetworkMethod,
        images: Tensor,
        labels: Tensor | None,
        optimiser: StageSGD,
        *,
        union: bool = True,
        refresh: int = 1,
    ) -> None:
        recipe, setting, stage = method.setting.recipe, method.setting, method.stage
        self.name: Literal["source", "target"] = "target" if labels is None else "source"
        self.epochs, self.steps = recipe.epochs, recipe.steps
        self.is_target, self.batch = labels is None, recipe.batch
        self.method, self.network, self.optimiser = method, method.network, optimiser
        given = torch.zeros(len(images), dtype=torch.int64) if labels is None else labels
        self.batches = Batches(
            setting, self.name, stage, images, given, method.memory if self.is_target and union else None
        )
        self._dropout = setting.generator("dropout", stage)
        self.generators = (*self.batches.generators, self._dropout)
        self._refresh = refresh

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; labels the images of a target when it is time."""
        if epoch == 0:
            self.network.use_generator(self._dropout)
        rate = {"lr": self.optimiser.begin_epoch(epoch)}
        if not self.is_target or epoch % self._refresh:
            return rate
        embedding, probabilities = look(self.network, self.method.setting, self.batches.images)
        labels = shot_labels(embedding, probabilities)
        return rate | relabel(self.batches.labels, labels, probabilities, first=epoch == 0)

    def finish(self) -> dict[str, float]:
        """Chooses exemplars."""
        return self.method.remember(self.batches.images, self.batches.labels)
