"""Source-only: trains on the source domain by cross-entropy and ignores targets (empirical risk minimisation).

The floor that every method must beat, and a check that the training loop itself changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ratp.config import switch
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.functional.optim import WITH_MOMENTUM, SGDConfig
from ratp.training.method import pack, unpack
from ratp.training.phase import Phase
from ratp.training.phases import NetworkMethod, SupervisedPhase


@dataclass(frozen=True)
class SourceOnlyConfig:
    """Switches of source-only training."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")


class SourceOnly(NetworkMethod):
    """Trains on the source and leaves the network alone on every target."""

    name = "source-only"
    title = "Source-only training (ERM)"
    family = "control"
    paper = "Vapnik, Principles of Risk Minimization for Learning Theory, NeurIPS 1991"
    config_type = SourceOnlyConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_MOMENTUM
    ignores_targets = True
    source_free = True

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase of cross-entropy."""
        return [SupervisedPhase(self.setting, self.network, domain, self.config.sgd)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns no phase."""
        del domain
        return []

    def state(self) -> dict[str, Tensor]:
        """Returns the network."""
        return pack({"network": self.network.state_dict()})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        self.network.load_state_dict(unpack(state)["network"])
