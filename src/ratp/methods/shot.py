"""SHOT — "Do We Really Need to Access the Source Data?", ICML 2020.

The classifier is a hypothesis to keep: on targets only feature extractor and bottleneck learn, until what they make of
a target fits it.

* Source stage: cross-entropy with smoothed labels.
* Target stage: at the start of every epoch each image gets the label of the nearest class centroid
  (:mod:`ratp.parts.shot_labels`). Loss β·CE + H̄ − H(p̄): each prediction certain, those of a batch diverse.
* After a stage: exemplars go to the memory, with their last labels.
* ``augment`` adds RandMix, as RaTP's ablation does, on digits (``r_con`` is its value there): copies of all source
  images, and of target images the model is confident about, learn by cross-entropy.

Departures from the original:

* It has the network every method has here: bottleneck of two layers, a classifier without bias and weight norm.
* Epochs, steps and batches are the recipe's, and batches are drawn with replacement.
* The optimiser is RaTP's, as its published code runs it: SGD without momentum. A pretrained feature extractor has a
  tenth of the rate, a factor of the original's; without its momentum that is a twentieth of what it learns by there.
  The original's own (momentum 0.9, rate 0.01, decay 0.001) wears this network out on a target: on PACS P>A it ends at
  74.0 % of A, RaTP's at 85.3, the paper's at 85.0. On the source it would serve better: trained on sketches, BMD, which
  has it, knows 95.5 % of them and 48.5 of cartoons, SHOT 89.3 and 15.0 (``docs/benchmarks.md``).
* Digits get their labels by the version for objects. The one for digits puts all images into one class as soon as a
  class is predicted for none of them.
* The exemplar memory, which it has not: images of earlier domains in every batch, with the labels they were stored
  with (``replay``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ratp.config import switch
from ratp.copies import CopiesConfig, CopyingMethod
from ratp.domain import UnlabelledDomain
from ratp.phase import Phase
from ratp.source_free import SHOTPhase, SourceFreeConfig, SourceFreeMethod


@dataclass(frozen=True)
class SHOTConfig(CopiesConfig, SourceFreeConfig):
    """Switches of SHOT. Defaults: the published ones for digits, but for the optimiser."""

    beta: float = switch(0.1, "β, weight of the cross-entropy with pseudo labels", minimum=0)


class SHOT(CopyingMethod, SourceFreeMethod):
    """Pseudo labels by centroids and information maximisation, with a fixed classifier."""

    name = "shot"
    title = "SHOT: source hypothesis transfer"
    family = "source-free domain adaptation"
    paper = "Liang et al., Do We Really Need to Access the Source Data?, ICML 2020"
    config_type = SHOTConfig
    large: ClassVar[Mapping[str, Any]] = {"beta": 0.3, "backbone_rate": 0.1}
    needs = "memory, many passes over a target"
    config: SHOTConfig

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """One phase with labels made anew every epoch."""
        return [SHOTPhase(self, domain.images, self.config.beta)]
