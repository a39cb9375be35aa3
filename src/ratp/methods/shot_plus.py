"""SHOT+ — "Source Data-absent Unsupervised Domain Adaptation through Hypothesis Transfer and Labeling Transfer", 2021.

SHOT with a second task that needs no labels: predicting by how many quarter turns an image was rotated.

* Source stage: as in SHOT.
* Target stage, first phase: a linear head R learns the task alone, with the network frozen, for as many steps as the
  stage has; the head of the best epoch is kept.
* Target stage, second phase: SHOT's loss + γ·CE(R([z(x); z(rotated x)]), turns). The gradient passes through the
  rotated image only; feature extractor, bottleneck and R learn.
* After a stage: exemplars enter the memory with their last labels.

Deviations from the original, besides those of SHOT (``methods/shot.py``); the preset ``own-head`` is SHOT's:

* The stage has the recipe's epochs (15 in the original).
* The upright embedding is that of SHOT's loss, not of a separate pass, so rotated images make up half of BatchNorm's
  running statistics (a third in the original).
* R is measured after every epoch on all images, each rotated once. It learns slowly with RaTP's optimiser: on PACS it
  recognises 31 % of the turns of A and 45 % of C when the second phase begins (chance: 25 %).
* With γ = 0 the task is left out, and the method equals SHOT bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ratp.data.domain import UnlabelledDomain
from ratp.methods.shared.source_free import OWN_HEAD, RotationConfig, SourceFreeMethod, rotation_phases
from ratp.training.phase import Phase


class SHOTPlus(SourceFreeMethod):
    """SHOT with a rotation task."""

    name = "shot+"
    title = "SHOT+: SHOT with a rotation task"
    family = "source-free domain adaptation"
    paper = (
        "Liang et al., Source Data-absent Unsupervised Domain Adaptation through Hypothesis Transfer and Labeling "
        "Transfer, TPAMI 2021"
    )
    config_type = RotationConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"own-head": OWN_HEAD}
    large: ClassVar[Mapping[str, Any]] = {"beta": 0.3, "gamma": 0.6, "backbone_rate": 0.1}
    needs = "exemplars, many passes over a target, square images"
    config: RotationConfig

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns the training of the rotation head, then SHOT's phase with the rotation task."""
        return rotation_phases(self, domain.images.to(self.setting.device), self.config)
