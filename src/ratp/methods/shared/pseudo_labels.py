"""Methods that train on SHOT's pseudo-labels of targets as they do on the true labels of the source."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.functional.optim import StageSGD
from ratp.functional.pseudo_labels import shot_labels
from ratp.networks.network import Network
from ratp.training.phase import Phase
from ratp.training.phases import NetworkMethod, NetworkPhase, embed_all, update_labels_

Finish = Callable[[Tensor, Tensor], dict[str, float]]


class PseudoLabelMethod(NetworkMethod):
    """A method that trains on every domain alike: by true labels on the source, by pseudo-labels on targets."""

    @abstractmethod
    def phases(self, images: Tensor, labels: Tensor | None) -> Sequence[Phase]:
        """Returns the phases of a domain; a target has no labels."""

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns the phases of the source, with true labels."""
        return self.phases(domain.images, domain.labels)

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns the phases of a target, with pseudo-labels and memory."""
        return self.phases(domain.images, None)


class PseudoLabelPhase(NetworkPhase):
    """Trains on one domain; a subclass defines ``step``, which must allow capture.

    On a target, the network labels all images every ``refresh`` epochs, and batches come from target and memory
    together if ``replay`` is union: both are switches of the method. The last labels go to ``finish``, by default into
    the memory.
    """

    captures = True

    def __init__(
        self,
        method: NetworkMethod,
        images: Tensor,
        labels: Tensor | None,
        optimiser: StageSGD | None = None,
        *,
        generators: Sequence[torch.Generator] = (),
        finish: Finish | None = None,
        network: Network | None = None,
    ) -> None:
        union = getattr(method.config, "replay", "none") == "union"
        super().__init__(method, images, labels, optimiser, replay=union, generators=generators, network=network)
        self._refresh, self._finish = getattr(method.config, "refresh", 1), finish or method.remember

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; labels the images of a target when due."""
        rate = super().begin_epoch(epoch)
        if not self.is_target or epoch % self._refresh:
            return rate
        embedding, probabilities = self.predict_all()
        labels = self.label(embedding, probabilities)
        return rate | update_labels_(self.batches.labels, labels, probabilities, first=epoch == 0)

    def predict_all(self) -> tuple[Tensor, Tensor]:
        """Returns embeddings and softmax of all images of the domain."""
        return embed_all(self.network, self.method.setting, self.batches.images)

    def label(self, embedding: Tensor, probabilities: Tensor) -> Tensor:
        """Returns SHOT's labels for all images of the domain."""
        return shot_labels(embedding, probabilities)

    def finish(self) -> dict[str, float]:
        """Puts exemplars into the memory, by the last labels."""
        return self._finish(self.batches.images, self.batches.labels)
