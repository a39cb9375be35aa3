"""Source-only: cross-entropy on the source domain, then nothing (empirical risk minimisation).

The floor every method must beat, and the check that the harness adds nothing of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ratp.config import switch
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.inference import classify, embed
from ratp.method import Method, Setting, pack, unpack
from ratp.parts.sgd import SGDConfig
from ratp.phase import Phase
from ratp.training import SupervisedPhase


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
    ignores_targets = True

    def __init__(self, setting: Setting, config: SourceOnlyConfig) -> None:
        self.setting = setting
        self.config = config
        self.scaling = setting.scaling()
        self.network = setting.network()

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase of cross-entropy."""
        return [SupervisedPhase(self.setting, self.network, domain, self.config.sgd)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Nothing."""
        del domain
        return []

    def predict(self, images: Tensor) -> Tensor:
        """Logits of uint8 images."""
        return classify(self.network, images, self.scaling)

    def embed(self, images: Tensor) -> Tensor:
        """Embeddings of uint8 images."""
        return embed(self.network, images, self.scaling)

    def state(self) -> dict[str, Tensor]:
        """The network."""
        return pack({"network": self.network.state_dict()})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        self.network.load_state_dict(unpack(state)["network"])
