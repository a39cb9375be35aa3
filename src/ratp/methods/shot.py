"""SHOT — "Do We Really Need to Access the Source Data?", ICML 2020.

On targets the classifier is frozen; feature extractor and bottleneck learn until their embeddings of a target fit it.

* Source stage: cross-entropy with smoothed labels.
* Target stage: at the start of every epoch each image gets the label of the nearest class centroid
  (:func:`ratp.functional.pseudo_labels.shot_labels`). Loss: β·CE + H̄ − H(p̄), which makes each prediction certain and
  those of a batch diverse.
* After a stage: exemplars enter the memory with their last labels.
* ``augment`` adds RandMix, as RaTP's ablation on digits does (``r_con`` has its value there): copies of all source
  images, and of target images that the model is confident about, learn by cross-entropy.

Deviations from the original:

* Network: the one that all methods share, with a bottleneck of two layers and a classifier without bias or weight norm.
  The preset ``own-head`` has the original's: one linear layer of 256 units with BatchNorm and, on digits, dropout; a
  classifier with bias and weight norm; and its own optimiser.
* Epochs, steps and batches come from the recipe; batches are drawn with replacement.
* Optimiser (``sgd``): RaTP's, which is SGD without momentum in its published code. A pretrained feature extractor
  learns at a tenth of the rate, as in the original. The original's own optimiser (momentum 0.9, rate 0.01, decay 0.001)
  degrades this network on targets: on PACS P>A it ends at 74.0 % of A, RaTP's at 85.3, the paper's at 85.0. On the
  source it would do better: trained on sketches, BMD, which uses it, reaches 95.5 % on them and 48.5 on cartoons, SHOT
  89.3 and 15.0 (``docs/explanation/benchmarks.md``). ``source_sgd`` sets the source stage's alone.
* Labels on digits come from the version for objects. The version for digits puts all images into one class as soon as
  a class is predicted for none of them.
* Replay (``replay``): exemplars of earlier domains join every batch, with their stored labels. The original has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ratp.config import switch
from ratp.data.domain import UnlabelledDomain
from ratp.methods.shared.randmix_copies import CopiesConfig, CopyingMethod
from ratp.methods.shared.source_free import OWN_HEAD, SHOTPhase, SourceFreeConfig, SourceFreeMethod
from ratp.training.phase import Phase


@dataclass(frozen=True)
class SHOTConfig(CopiesConfig, SourceFreeConfig):
    """Switches of SHOT. Defaults: the published ones for digits, except for the optimiser."""

    beta: float = switch(0.1, "β, weight of the cross-entropy with pseudo-labels", minimum=0)


class SHOT(CopyingMethod, SourceFreeMethod):
    """Trains on centroid pseudo-labels and information maximisation, with a frozen classifier."""

    name = "shot"
    title = "SHOT: source hypothesis transfer"
    family = "source-free domain adaptation"
    paper = "Liang et al., Do We Really Need to Access the Source Data?, ICML 2020"
    config_type = SHOTConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"own-head": OWN_HEAD}
    large: ClassVar[Mapping[str, Any]] = {"beta": 0.3, "backbone_rate": 0.1}
    needs = "exemplars, many passes over a target"
    config: SHOTConfig

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns one phase with new labels every epoch."""
        return [SHOTPhase(self, domain.images, self.config.beta)]
