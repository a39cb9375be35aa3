"""Methods that train on SHOT's pseudo-labels of targets as they do on the true labels of the source."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.functional.optim import StageSGD
from ratp.functional.pseudo_labels import shot_labels
from ratp.training.method import pack, unpack
from ratp.training.phase import Phase
from ratp.training.phases import Batches, NetworkMethod, embed_all, update_labels_

Finish = Callable[[Tensor, Tensor], dict[str, float]]


class PseudoLabelMethod(NetworkMethod):
    """A method that trains on every domain alike: by true labels on the source, by pseudo-labels on targets."""

    extras: Mapping[str, nn.Module] = {}  # modules to save besides the network, by name

    @abstractmethod
    def phases(self, images: Tensor, labels: Tensor | None) -> Sequence[Phase]:
        """Returns the phases of a domain; a target has no labels."""

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns the phases of the source, with true labels."""
        return self.phases(domain.images, domain.labels)

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns the phases of a target, with pseudo-labels and memory."""
        return self.phases(domain.images, None)

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory and extra modules."""
        return super().state() | pack({name: module.state_dict() for name, module in self.extras.items()})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        for name, module in self.extras.items():
            module.load_state_dict(unpack(state)[name])


class PseudoLabelPhase(Phase):
    """Trains on one domain; a subclass defines ``step``, which must allow capture.

    On a target (``labels`` is None), the network labels all images every ``refresh`` epochs. With ``union``, batches
    come from target and memory together. The last labels go to ``finish``, by default into the memory.
    """

    captures = True
    saved = "optimiser batches"

    def __init__(
        self,
        method: NetworkMethod,
        images: Tensor,
        labels: Tensor | None,
        optimiser: StageSGD,
        *,
        union: bool = True,
        refresh: int = 1,
        generators: Sequence[torch.Generator] = (),
        finish: Finish | None = None,
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
        self.generators = *self.batches.generators, self._dropout, *generators
        self._refresh, self._finish = refresh, finish or method.remember

    def begin(self) -> None:
        """Binds dropout to its generator."""
        self.network.use_generator(self._dropout)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; labels the images of a target when due."""
        rate = {"lr": self.optimiser.begin_epoch(epoch)}
        if not self.is_target or epoch % self._refresh:
            return rate
        embedding, probabilities = embed_all(self.network, self.method.setting, self.batches.images)
        labels = self.label(embedding, probabilities)
        return rate | update_labels_(self.batches.labels, labels, probabilities, first=epoch == 0)

    def minimise(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes a step on the sum of some loss terms; returns what to record of them."""
        total = torch.stack(list(terms.values())).sum()
        self.optimiser.minimise(total)
        return {"total": total, **terms}

    def label(self, embedding: Tensor, probabilities: Tensor) -> Tensor:
        """Returns SHOT's labels for all images of the domain."""
        return shot_labels(embedding, probabilities)

    def finish(self) -> dict[str, float]:
        """Puts exemplars into the memory, by the last labels."""
        return self._finish(self.batches.images, self.batches.labels)
