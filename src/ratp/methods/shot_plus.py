"""SHOT+ — "Source Data-absent Unsupervised Domain Adaptation through Hypothesis Transfer and Labeling Transfer", 2021.

SHOT and a second task that needs no labels: to tell by how many quarters an image was turned.

* Source stage: cross-entropy with smoothed labels.
* Before a target's stage a linear head R learns the task alone, with the network as it is, for as many steps as the
  stage has; the head of the best epoch stays.
* Target stage: the loss of SHOT plus γ·CE(R([z(x); z(turned x)]), turns). Its gradient passes the turned image, not the
  upright one; feature extractor, bottleneck and R learn.
* After a stage: exemplars go to the memory, with their last labels.

Departures from the original: those of SHOT (``methods/shot.py``); the stage has the recipe's epochs (the original 15);
the upright embedding is the one SHOT's loss uses, not that of another pass, so that turned images weigh half in
BatchNorm's running statistics, where they weigh a third in the original; R is measured after every epoch on all images,
each turned once; it, too, has RaTP's optimiser, by which it learns slowly: on PACS it tells 31 % of the turns of A and
45 of C when the stage begins, a quarter being chance. With γ = 0 there is no such task, and this is SHOT bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ratp.config import switch
from ratp.domain import UnlabelledDomain
from ratp.phase import Phase
from ratp.source_free import RotationPhase, RotationTask, SHOTPhase, SourceFreeConfig, SourceFreeMethod


@dataclass(frozen=True)
class SHOTPlusConfig(SourceFreeConfig):
    """Switches of SHOT+. Defaults: the published ones for digits, but for the optimiser."""

    beta: float = switch(0.1, "β, weight of the cross-entropy with pseudo labels", minimum=0)
    gamma: float = switch(0.2, "γ, weight of the rotation task; 0: SHOT", minimum=0)


class SHOTPlus(SourceFreeMethod):
    """SHOT with a rotation task."""

    name = "shot+"
    title = "SHOT+: SHOT with a rotation task"
    family = "source-free domain adaptation"
    paper = (
        "Liang et al., Source Data-absent Unsupervised Domain Adaptation through Hypothesis Transfer and Labeling "
        "Transfer, TPAMI 2021"
    )
    config_type = SHOTPlusConfig
    large: ClassVar[Mapping[str, Any]] = {"beta": 0.3, "gamma": 0.6, "backbone_rate": 0.1}
    needs = "memory, many passes over a target, square images"
    config: SHOTPlusConfig

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """The rotation head's training, then SHOT's with its task beside."""
        config, images = self.config, domain.images.to(self.setting.device)
        if not config.gamma:
            return [SHOTPhase(self, images, config.beta)]
        task = RotationTask(self.setting, self.stage, config.gamma)
        return [RotationPhase(self, images, task), SHOTPhase(self, images, config.beta, rotation=task)]
