"""BMD — "BMD: A General Class-balanced Multicentric Dynamic Prototype Strategy for Source-free DA", ECCV 2022.

SHOT with other labels: every class has as many seeds and several centres, and the centres follow the model.

* Source stage: cross-entropy with smoothed labels, as SHOT's. In RaTP's comparison both have the same network after it;
  here large ones differ by their optimisers.
* Target stage: at the start of every epoch each image gets a static label, and each class four centres
  (:mod:`ratp.parts.bmd_labels`). First epoch: loss H̄ − H(p̄). Then H̄ + 2·CE(static label) +
  ½·[CE(dynamic label, p) + CE(p, dynamic label)], where the dynamic label of an image is soft and comes from the
  centres as they are now. After each step the centres move a ten-thousandth of the way to the batch. What learns is the
  scale and shift of the feature extractor's BatchNorm, and the bottleneck.
* After a stage: exemplars go to the memory, with their last static labels.

Departures from the original:

* Network, epochs, batches and memory are as for SHOT (``methods/shot.py``). Large networks have SHOT's own optimiser
  and rates: 0.01, a tenth of it for the feature extractor. For small ones nothing is published; they have RaTP's.
* It takes the logarithm of a softmax, which is no number for a model that is certain; here it is log-softmax.
* It picks parameters by names with "bn" in them, which misses DTN and shortcuts; here it goes by type.
* K-means starts from the surest seed and the seeds farthest from those before, not at random. With fewer than four
  seeds some are used twice.
* The dynamic label is a label: no gradient passes it. Exemplars of earlier domains have the label they were stored
  with and no dynamic one, and do not move the centres, which are the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.domain import UnlabelledDomain
from ratp.network import Output
from ratp.parts.batch_norm import affine_parameters
from ratp.parts.bmd_labels import bmd_labels, centre_similarities, moved_centres
from ratp.parts.information import logit_entropy, mean_prediction_entropy
from ratp.parts.losses import mean_over
from ratp.phase import Phase
from ratp.source_free import SHOT_LARGE, SHOT_RATES, SourceFreeConfig, SourceFreeMethod, TargetPhase
from ratp.training import Batch


@dataclass(frozen=True)
class BMDConfig(SourceFreeConfig):
    """Switches of BMD. Defaults: the constants of its published code, but for the optimiser of small networks."""

    centres: int = switch(4, "centres a class", minimum=1)
    share: int = switch(3, "each class has N/(share·K) seeds", minimum=1)
    rounds: int = switch(2, "rounds of seeds and centres", minimum=1)
    static_weight: float = switch(2.0, "weight of the cross-entropy with static labels", minimum=0)
    dynamic_weight: float = switch(0.5, "weight of both cross-entropies with dynamic labels", minimum=0)
    decay: float = switch(0.9999, "what a centre keeps of itself in a step; 1: it stays", minimum=0, maximum=1)
    extractor: bool = switch(False, "train all of the feature extractor, not its BatchNorm alone")


class BMD(SourceFreeMethod):
    """Class-balanced multicentric dynamic prototypes."""

    name = "bmd"
    title = "BMD: class-balanced multicentric dynamic prototypes"
    family = "source-free domain adaptation"
    paper = (
        "Qu et al., BMD: A General Class-balanced Multicentric Dynamic Prototype Strategy for Source-free Domain "
        "Adaptation, ECCV 2022"
    )
    config_type = BMDConfig
    large = SHOT_LARGE
    stream_values = SHOT_RATES
    needs = "memory, many passes over a target"
    config: BMDConfig

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """One phase with labels and centres made anew every epoch."""
        return [BMDPhase(self, domain.images)]


class BMDPhase(TargetPhase):
    """BMD's target stage.

    Args:
        method: Whose network and memory.
        images: All training images of the domain, uint8.
    """

    def __init__(self, method: BMD, images: Tensor) -> None:
        config, network = method.config, method.network
        learning = network.backbone.parameters() if config.extractor else affine_parameters(network.backbone).values()
        super().__init__(method, images, [(learning, config.backbone_rate), (network.bottleneck.parameters(), 1.0)])
        self._config = config
        device = method.setting.device
        self._centres = torch.zeros(network.classes, config.centres, network.config.dim, device=device)
        self._labels_count = torch.zeros((), device=device)  # 0 in the first epoch, then 1

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate, labels all images and makes the centres; labels count from the second epoch."""
        self._labels_count.fill_(float(epoch > 0))
        return super().begin_epoch(epoch)

    def label(self, embedding: Tensor, probabilities: Tensor) -> Tensor:
        """Static labels; the centres they come from are kept."""
        config = self._config
        found = bmd_labels(embedding, probabilities, centres=config.centres, share=config.share, rounds=config.rounds)
        self._centres.copy_(found.centres)
        return found.labels

    def losses(self, batch: Batch, output: Output) -> dict[str, Tensor]:
        """The terms of all epochs; those of the other epochs count nothing."""
        config, on = self._config, self._labels_count
        # Without gradient, dynamic labels are what they are named.
        similarities = centre_similarities(F.normalize(output.embedding.detach(), dim=1), self._centres)
        dynamic = dynamic_loss(output.logits, similarities)
        return {
            "entropy": logit_entropy(output.logits).mean(),
            "diversity": (on - 1) * mean_prediction_entropy(output.logits),
            "static": on * config.static_weight * F.cross_entropy(output.logits, batch.labels),
            "dynamic": on * config.dynamic_weight * mean_over(dynamic, ~batch.replayed),
        }

    def after_update(self, batch: Batch, output: Output) -> None:
        """Moves the centres towards the batch, as it was seen before the update."""
        with torch.no_grad():
            directions = F.normalize(output.embedding, dim=1)
            self._centres.copy_(moved_centres(self._centres, directions, self._config.decay, ~batch.replayed))


def dynamic_loss(logits: Tensor, similarities: Tensor) -> Tensor:
    """CE(dynamic, p) + CE(p, dynamic) of each row, with the softmax of the similarities as the dynamic label."""
    predicted, label = logits.log_softmax(dim=1), similarities.log_softmax(dim=1)
    return -(label.exp() * predicted + predicted.exp() * label).sum(dim=1)
