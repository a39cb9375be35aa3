"""Source-only: cross-entropy on the source domain, then nothing (empirical risk minimisation).

The floor every method must beat, and the check that the harness adds nothing of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.inference import classify
from ratp.method import Method, Phase, Setting, pack, unpack
from ratp.parts.sgd import SGDConfig, StageSGD


@dataclass(frozen=True)
class SourceOnlyConfig:
    """Switches of source-only training."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")


class SourceOnly(Method):
    """Trains on the source, leaves the model alone on every target."""

    name = "source-only"
    title = "Source-only training (ERM)"
    family = "control"
    paper = "Vapnik, Principles of Risk Minimization for Learning Theory, NeurIPS 1991"
    config_type = SourceOnlyConfig

    def __init__(self, setting: Setting, config: SourceOnlyConfig) -> None:
        self.setting = setting
        self.config = config
        self.scaling = setting.scaling()
        self.network = setting.network()

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase of cross-entropy."""
        return [SourcePhase(self, domain)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Nothing."""
        del domain
        return []

    def predict(self, images: Tensor) -> Tensor:
        """Logits of uint8 images."""
        return classify(self.network, images, self.scaling)

    def state(self) -> dict[str, Tensor]:
        """The network."""
        return pack({"network": self.network.state_dict()})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        self.network.load_state_dict(unpack(state)["network"])


class SourcePhase(Phase):
    """Cross-entropy with SGD."""

    name = "source"
    captures = True

    def __init__(self, method: SourceOnly, domain: LabelledDomain) -> None:
        setting = method.setting
        self.epochs, self.steps = setting.recipe.epochs, setting.recipe.steps
        self._method = method
        self._domain = domain.to(setting.device)
        self._batches = setting.generator("batches", 0)
        dropout = setting.generator("dropout", 0)
        method.network.use_generator(dropout)
        self._inputs, self._changes = setting.training_inputs("source"), setting.generator("transforms", 0)
        self.generators = self._batches, dropout, self._changes
        self._optimiser = StageSGD(method.network.parameters(), setting.recipe.lr, self.epochs, method.config.sgd)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate."""
        return {"lr": self._optimiser.begin_epoch(epoch)}

    def step(self) -> dict[str, Tensor]:
        """One update on a batch drawn with replacement."""
        count, device = len(self._domain), self._domain.images.device
        index = torch.randint(count, (self._method.setting.recipe.batch,), generator=self._batches, device=device)
        network = self._method.network.train()
        logits = network(self._inputs(self._domain.images[index], self._changes)).logits
        loss = F.cross_entropy(logits, self._domain.labels[index])
        self._optimiser.minimise(loss)
        return {"total": loss}

    def finish(self) -> dict[str, float]:
        """Nothing is left to do."""
        return {}
