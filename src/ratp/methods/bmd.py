"""BMD — "BMD: A General Class-balanced Multicentric Dynamic Prototype Strategy for Source-free DA", ECCV 2022.

SHOT with other labels: every class has equally many seeds and several centres, and the centres follow the model.

* Source stage: cross-entropy with smoothed labels, as in SHOT. In RaTP's comparison both start from the same network;
  here they differ by their optimisers on large networks.
* Target stage: at the start of every epoch each image gets a static label, and each class four centres
  (:func:`ratp.functional.pseudo_labels.bmd_labels`). The loss is H̄ − H(p̄) in the first epoch, then
  H̄ + 2·CE(static label) + ½·[CE(dynamic label, p) + CE(p, dynamic label)]. The dynamic label of an image is soft and
  comes from the current centres; after each step these move a ten-thousandth of the way towards the batch. The
  bottleneck and the scale and shift of the feature extractor's normalisation layers learn.
* After a stage: exemplars enter the memory with their last static labels.

Deviations from the original:

* Network, epochs, batches and memory are as for SHOT (``methods/shot.py``). Large networks have SHOT's own optimiser
  and rates: 0.01, and a tenth of it for the feature extractor. Nothing is published for small ones; they have RaTP's.
  The preset ``own-head`` has SHOT's head and optimiser, as the original: on large networks at the original's rate of
  0.001, on small ones at the stream's rate and with all convolutions (``extractor``). With frozen convolutions, it
  wins nothing on digits (MT>MM, seed 2022: 49.3 % of MM before its stage, 53.2 after it).
* Log-softmax replaces the logarithm of a softmax, which is NaN if the model is certain.
* Parameters are selected by layer type. The original selects names that contain "bn", which misses DTN and shortcuts.
  It freezes all convolutions, and no code for small networks is published; ``extractor`` trains the convolutions of
  any network as well, at the rate ``backbone_rate`` of its normalisation layers.
* K-means starts from the most certain seed and then the seeds farthest from those chosen, not at random. With fewer
  than four seeds, some are used twice.
* No gradient flows through the dynamic label; in the published code it does (``dynamic_gradient``).
* Exemplars of earlier domains keep their stored label, have no dynamic one and do not move the centres, which belong to
  the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.data.domain import UnlabelledDomain
from ratp.functional.losses import logit_entropy, mean_over, mean_prediction_entropy
from ratp.functional.norm import affine_parameters
from ratp.functional.pseudo_labels import bmd_labels, centre_similarities, moved_centres
from ratp.methods.shared.source_free import (
    OWN_HEAD,
    SHOT_LARGE,
    SHOT_RATE,
    SHOT_RATES,
    SourceFreeConfig,
    SourceFreeMethod,
    TargetPhase,
)
from ratp.networks.network import Output
from ratp.training.memory import Batch
from ratp.training.phase import Phase


@dataclass(frozen=True)
class BMDConfig(SourceFreeConfig):
    """Switches of BMD. Defaults: the constants of its published code, except for the optimiser of small networks."""

    centres: int = switch(4, "centres per class", minimum=1)
    share: int = switch(3, "each class has N/(share·K) seeds", minimum=1)
    rounds: int = switch(2, "rounds of seeds and centres", minimum=1)
    static_weight: float = switch(2.0, "weight of the cross-entropy with static labels", minimum=0)
    dynamic_weight: float = switch(0.5, "weight of both cross-entropies with dynamic labels", minimum=0)
    decay: float = switch(0.9999, "share of a centre kept per step; 1: centres are fixed", minimum=0, maximum=1)
    extractor: bool = switch(False, "train the whole feature extractor, not only its normalisation layers")
    dynamic_gradient: bool = switch(
        False, "gradient flows through the dynamic label too (published code)", hash_default=False
    )


class BMD(SourceFreeMethod):
    """Trains on class-balanced, multicentric, dynamic prototypes."""

    name = "bmd"
    title = "BMD: class-balanced multicentric dynamic prototypes"
    family = "source-free domain adaptation"
    paper = (
        "Qu et al., BMD: A General Class-balanced Multicentric Dynamic Prototype Strategy for Source-free Domain "
        "Adaptation, ECCV 2022"
    )
    config_type = BMDConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "own-head": {name: value for name, value in OWN_HEAD.items() if name != "lr"} | {"extractor": True}
    }
    large: ClassVar[Mapping[str, Any]] = {**SHOT_LARGE, "extractor": False}
    # its published code runs on VisDA alone, at this rate
    stream_values: ClassVar[Mapping[tuple[str, str], Mapping[str, Any]]] = {
        **SHOT_RATES,
        **{(stream, "own-head"): {"lr": 0.001} for stream, _ in SHOT_RATES},
        ("demo", "own-head"): SHOT_RATE,
    }
    needs = "exemplars, many passes over a target"
    config: BMDConfig

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns one phase with new labels and centres every epoch."""
        return [BMDPhase(self, domain.images)]


class BMDPhase(TargetPhase):
    """BMD's target stage."""

    saved = "_centres _labels_count"

    def __init__(self, method: BMD, images: Tensor) -> None:
        config, network = method.config, method.network
        learning = network.backbone.parameters() if config.extractor else affine_parameters(network.backbone).values()
        super().__init__(method, images, [(learning, config.backbone_rate), (network.bottleneck.parameters(), 1.0)])
        self._config = config
        device = method.setting.device
        self._centres = torch.zeros(network.classes, config.centres, network.config.dim, device=device)
        self._labels_count = torch.zeros((), device=device)  # 0 in the first epoch, then 1

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate, labels all images and computes centres; labels count from the second epoch."""
        self._labels_count.fill_(float(epoch > 0))
        return super().begin_epoch(epoch)

    def label(self, embedding: Tensor, probabilities: Tensor) -> Tensor:
        """Returns static labels; stores the centres they come from."""
        config = self._config
        found = bmd_labels(embedding, probabilities, centres=config.centres, share=config.share, rounds=config.rounds)
        self._centres.copy_(found.centres)
        return found.labels

    def losses(self, batch: Batch, output: Output) -> dict[str, Tensor]:
        """Computes all terms in every epoch; those that do not apply have weight 0."""
        config, on = self._config, self._labels_count
        embedding = output.embedding if config.dynamic_gradient else output.embedding.detach()
        similarities = centre_similarities(F.normalize(embedding, dim=1), self._centres)
        dynamic = dynamic_loss(output.logits, similarities)
        return {
            "entropy": logit_entropy(output.logits).mean(),
            "diversity": (on - 1) * mean_prediction_entropy(output.logits),
            "static": on * config.static_weight * F.cross_entropy(output.logits, batch.labels),
            "dynamic": on * config.dynamic_weight * mean_over(dynamic, ~batch.replayed),
        }

    def after_update(self, batch: Batch, output: Output) -> None:
        """Moves the centres towards the batch's embeddings from before the update."""
        with torch.no_grad():
            directions = F.normalize(output.embedding, dim=1)
            self._centres.copy_(moved_centres(self._centres, directions, self._config.decay, ~batch.replayed))


def dynamic_loss(logits: Tensor, similarities: Tensor) -> Tensor:
    """Computes CE(dynamic, p) + CE(p, dynamic) per row; the softmax of the similarities is the dynamic label."""
    predicted, label = logits.log_softmax(dim=1), similarities.log_softmax(dim=1)
    return -(label.exp() * predicted + predicted.exp() * label).sum(dim=1)
