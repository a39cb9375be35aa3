"""Oracle: cross-entropy with the true labels of every domain, source and targets, and replay of exemplars.

It is told what no method may know, and every result of it says so. It shows what better labels alone could give:
right after a domain's own stage, nearly everything. On domains still to come labels are not all: RaTP, which sees none
of targets, is ahead of it there (``docs/benchmarks.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ratp.config import switch
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import RatpError
from ratp.parts.sgd import SGDConfig
from ratp.phase import Phase
from ratp.training import NetworkMethod, SupervisedPhase


@dataclass(frozen=True)
class OracleConfig:
    """Switches of the oracle."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")


class Oracle(NetworkMethod):
    """Learns every domain with its true labels."""

    name = "oracle"
    title = "Oracle: every domain with its true labels"
    family = "control"
    paper = "none"
    config_type = OracleConfig
    needs = "the labels of targets, memory"

    @classmethod
    def uses_target_labels(cls, config: Any) -> bool:
        """It is told them."""
        del config
        return True

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase of cross-entropy."""
        return [self._learn(domain)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Not without labels."""
        raise RatpError(f"the oracle needs the labels of {domain.name!r}.")

    def told_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase of cross-entropy on the domain and the memory together."""
        return [self._learn(domain)]

    def _learn(self, domain: LabelledDomain) -> Phase:
        return SupervisedPhase(
            self.setting,
            self.network,
            domain,
            self.config.sgd,
            stage=self.stage,
            memory=self.memory if self.stage else None,
            finish=lambda told: self.remember(told.images, told.labels),
        )
