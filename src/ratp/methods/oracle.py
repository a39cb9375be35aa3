"""Oracle: trains on every domain, source and targets, by cross-entropy with its true labels, replaying exemplars.

It uses labels that no method may have, so all its results are marked. It shows what better labels alone could achieve:
nearly everything right after a domain's own stage, but not everything on domains still to come, where RaTP is ahead
without any target labels (``docs/explanation/benchmarks.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ratp.config import switch
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import RatpError
from ratp.functional.optim import SGDConfig
from ratp.training.phase import Phase
from ratp.training.phases import NetworkMethod, SupervisedPhase


@dataclass(frozen=True)
class OracleConfig:
    """Switches of the oracle."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")


class Oracle(NetworkMethod):
    """Trains on every domain with its true labels."""

    name = "oracle"
    title = "Oracle: every domain with its true labels"
    family = "control"
    paper = "none"
    config_type = OracleConfig
    needs = "the labels of targets, exemplars, many passes over a target"

    @classmethod
    def uses_target_labels(cls, config: Any) -> bool:
        """Returns True."""
        del config
        return True

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase of cross-entropy."""
        return [self._learn(domain)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Refuses: the oracle needs labels."""
        raise RatpError(f"the oracle needs the labels of {domain.name!r}.")

    def labelled_target_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase of cross-entropy on the domain and the memory together."""
        return [self._learn(domain)]

    def _learn(self, domain: LabelledDomain) -> Phase:
        return SupervisedPhase(
            self.setting,
            self.network,
            domain,
            self.config.sgd,
            stage=self.stage,
            memory=self.memory if self.stage else None,
            finish=lambda learned: self.remember(learned.images, learned.labels),
        )
