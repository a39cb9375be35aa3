"""CoDAG — "Complementary Domain Adaptation and Generalization for Unsupervised Continual Domain Shift Learning", 2023.

One network cannot both fit the latest domain and generalise to all, so there are two. The *keeper* learns every domain
and lives for ever. For each target, an *adapter* begins as a copy of it, fits the target alone, and labels it.

* Source stage: the keeper learns by cross-entropy, on images and a RandMix copy of each.
* Target stage, first phase: the adapter is trained as by SHOT (``methods/shot.py``): its classifier is frozen, labels
  are updated every epoch, and the loss is β·CE + H̄ − H(p̄).
* Target stage, second phase: the adapter's labels are fixed, and the keeper learns from images with RandMix copies:
  SelNLPL with these labels (:mod:`ratp.functional.negative_learning`) + cross-entropy of exemplars with their labels +
  λ·KL(keeper before the stage ‖ keeper) on exemplars.
* After a stage: exemplars enter the memory with the labels; a class without labelled images gives none.

A target stage has two phases of the recipe's length, so twice the steps of other methods.

The paper does not say which network its accuracies are those of. The keeper predicts here; with ``predicts=adapter``,
the latest adapter does once there is one. Training is the same. The journal's ``accuracy_as_told`` has the adapter's
accuracy on the domain of its own stage in either case.

There is no public code, and we know the paper from its abstract and from summaries. These are guesses:

* The adapter: SHOT with β 0.1, 0.3 for large networks (``beta``), without exemplars (``replay``) and RandMix copies
  (``adapter_r_con``); the optimiser is RaTP's (``sgd``), and a large feature extractor learns at a tenth of the rate
  in both networks, as in SHOT (``backbone_rate``).
* The labels: the adapter's predictions in the end (``labelling``), the same for the whole second phase.
* The keeper: as many epochs as the adapter (``length``), and as many exemplars in a batch as target images
  (``replay_memory.batch``), all in one pass; λ 1 (``replay_memory.distill``); herding (``replay_memory.selection``).
* SelNLPL: its three kinds of learning for a third of the epochs each (``selnlpl.order``); predictions averaged over 3
  epochs (``selnlpl.history``; published: 10), those of all images at the start of each; γ 0.5 (``selnlpl.threshold``).
  The loss on a copy is that on its image. Other switches are those of NLNL's published code.
* A collapsed adapter does not label (``collapse``). The number of classes that a network predicts is exp(H), with H
  the entropy of the classes' shares, so that a class counts by its share. If the adapter's number is less than half of
  that of the keeper before the phase, the keeper labels. On a domain with few classes, this may refuse a good adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ratp.config import switch
from ratp.data.domain import UnlabelledDomain
from ratp.methods.shared.randmix_copies import Copies
from ratp.methods.shared.selnlpl import NoisyLabelConfig, NoisyLabelMethod, SelNLPLPhase, labels_from
from ratp.methods.shared.source_free import SHOTPhase, all_groups
from ratp.networks.network import Network, Output
from ratp.training.method import Setting, pack, unpack
from ratp.training.phase import Phase
from ratp.training.phases import embed_all
from ratp.training.recipe import classify, embed


def effective_classes(labels: Tensor, classes: int) -> Tensor:
    """Computes exp(H) of the classes' shares in labels (n,): k if k classes are equally frequent."""
    shares = labels.bincount(minlength=classes) / len(labels)
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy.exp()


@dataclass(frozen=True)
class CoDAGConfig(NoisyLabelConfig):
    """Switches of CoDAG. Defaults: guesses where the paper's values are unknown."""

    predicts: Literal["keeper", "adapter"] = switch("keeper", "the network that predicts after a target")
    replay: Literal["none", "union", "separate"] = switch(
        "none", "exemplars for the adapter: none, in its batches, or a memory batch with each"
    )
    adapter_r_con: float = switch(
        1.0, "confidence above which an image of the adapter gets a RandMix copy; 1: none", minimum=0, maximum=1
    )
    collapse: float = switch(
        0.5, "share of the keeper's classes that an adapter must predict to label; 0: any", minimum=0, maximum=1
    )


class CoDAG(NoisyLabelMethod):
    """Adapts a copy of the network to each target, and trains the network on the copy's labels."""

    name = "codag"
    title = "CoDAG: complementary domain adaptation and generalisation"
    family = "continual domain shift learning"
    paper = (
        "Cho et al., Complementary Domain Adaptation and Generalization for Unsupervised Continual Domain Shift "
        "Learning, ICCV 2023"
    )
    config_type = CoDAGConfig
    large: ClassVar[Mapping[str, Any]] = {"beta": 0.3, "backbone_rate": 0.1}
    needs = "its own source training, exemplars, two networks, many passes over a target, further phases"
    config: CoDAGConfig

    def __init__(self, setting: Setting, config: CoDAGConfig) -> None:
        super().__init__(setting, config)
        self.adapter: Network | None = None  # the network of the latest target; None before the first

    @classmethod
    def masks_copies(cls, config: Any) -> bool:
        """Whether only confident images of the adapter get a copy."""
        return bool(config.adapter_r_con < 1)

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns the adapter's phase, then the keeper's."""
        self.adapter = self._copy()
        randmix, r_con = self.randmix, self.config.adapter_r_con
        copies = Copies(self, randmix if r_con < 1 else None, r_con, network=self.adapter)
        images = domain.images.to(self.setting.device)
        # Exemplars wait for the second phase.
        adapts = SHOTPhase(self, images, self.config.beta, network=self.adapter, copies=copies, finish=lambda *_: {})
        adapts.name = "adapter"
        return [adapts, KeeperPhase(self, images, self.adapter)]

    @property
    def predictor(self) -> Network:
        """The network that predicts."""
        return self.adapter if self.config.predicts == "adapter" and self.adapter is not None else self.network

    def predict(self, images: Tensor) -> Tensor:
        """Returns logits of uint8 images."""
        return classify(self.predictor, images, self.scaling)

    def compute_logits(self, inputs: Tensor) -> Tensor:
        """Computes logits of normalised images by the network that predicts."""
        return self.predictor(inputs).logits

    def embed(self, images: Tensor) -> Tensor:
        """Returns embeddings of uint8 images."""
        return embed(self.predictor, images, self.scaling)

    def predict_for_domain(self, images: Tensor, stage: int) -> Tensor | None:
        """Returns the adapter's logits of uint8 images known to be from its domain, that of the latest stage."""
        if self.adapter is None or stage != self.stage - 1:
            return None
        return classify(self.adapter, images, self.scaling)

    def _copy(self) -> Network:
        return self.network.frozen_copy().requires_grad_(True)

    def state(self) -> dict[str, Tensor]:
        """Returns keeper, memory, the fixed layers of RandMix and the adapter."""
        return super().state() | ({} if self.adapter is None else pack({"adapter": self.adapter.state_dict()}))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        parts = unpack(state)
        if "adapter" not in parts:
            self.adapter = None
        else:
            if self.adapter is None:  # else in place: an optimiser may hold its parameters
                self.adapter = self._copy()
            self.adapter.load_state_dict(parts["adapter"])


class KeeperPhase(SelNLPLPhase):
    """Trains the keeper on the labels of the adapter."""

    def __init__(self, method: CoDAG, images: Tensor, adapter: Network) -> None:
        super().__init__(method, images, all_groups(method.network, method.config.backbone_rate), "keeper")
        self._adapter, self._old = adapter, method.network.frozen_copy().folded()

    def label(self) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Returns the adapter's labels, or the keeper's if the adapter has collapsed."""
        labels, probabilities = self._labels_of(self._adapter)
        kept, others = self._labels_of(self.network)
        least = self.config.collapse * effective_classes(kept, self._classes)
        collapsed = (effective_classes(labels, self._classes) < least).item()
        record = {"adapter_collapsed": float(collapsed), "agreement": (labels == kept).float().mean().item()}
        return (kept, others, record) if collapsed else (labels, probabilities, record)

    def _labels_of(self, network: Network) -> tuple[Tensor, Tensor]:
        embedding, probabilities = embed_all(network, self.method.setting, self.images)
        return labels_from(embedding, probabilities, self.config.labelling), probabilities

    def probabilities(self) -> Tensor:
        """Returns the keeper's predictions."""
        return embed_all(self.network, self.method.setting, self.images)[1]

    def target_logits(self, output: Output) -> Tensor:
        """Returns the keeper's logits."""
        return output.logits

    def memory_logits(self, output: Output, domains: Tensor) -> Tensor:
        """Returns the keeper's logits."""
        del domains
        return output.logits

    def student(self, output: Output) -> Tensor:
        """Returns the keeper's logits."""
        return output.logits

    def teacher(self, images: Tensor) -> Tensor:
        """Returns the logits of the keeper before the stage."""
        return self._old(images).logits
