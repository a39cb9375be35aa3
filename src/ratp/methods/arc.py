"""ARC — augment, replay, be consistent: a method of this package, not of a paper.

ARC is RaTP (ICLR 2023) with four additions:

* **Augment** every image differently, for accuracy before adaptation. Half of the copies of a batch come from RandMix,
  the other half from Pro-RandConv (``augmentation``, :mod:`ratp.functional.prorandconv`). RandMix mixes its branches
  with weights drawn per image (``randmix.weights_per``). RaTP's published code draws them once for a batch, so that all
  copies of a batch share their polarity, and one batch in twelve is saturated.
* **Replay**, against forgetting. Exemplars, drawn uniformly from the memory, join every batch of a target: a quarter
  of its size (``replay``), so 16 to a batch of 64. They get copies and are distilled as all other images are. RaTP
  draws batches from target and memory together, which on digits is half an exemplar to a batch; ARC still does, and
  adds these.
* **Be consistent**, for accuracy on the target. A copy should be classified as its image is (``consistency.weight``),
  whatever the label says; the prediction for the clean image is a constant here.
* **Count** the classes, against unbalanced targets. The target's class proportions, estimated without labels
  (``class_mix``, :mod:`ratp.functional.class_mix`), replace equal ones in T2PL's selections and in the number of
  exemplars per class. They are estimated with every refresh of the labels; predictions are calibrated on four copies of
  each exemplar.

The rest is RaTP's published code: network, T2PL labels, prototype contrastive alignment (PCA) on the rows of the
classifier, distillation from the old model, memory, recipe, and the values for single streams. With z an embedding, x̃
the copy of x, the rows w of the classifier W as prototypes, primes for the old model and sg for a constant:

    CE       −log softmax_y(W z)
    PCA      −log (e^{s·z·w_y} + m·e^{s·z·w′_y}) / (Σ_c e^{s·z·w_c} + m·Σ_c e^{s·z·w′_c} + Σ_{j: y_j≠y} e^{s·z·z_j})
    distill  KL(softmax(W′ z′) ‖ softmax(W z))
    consist  KL(sg softmax(W z(x)) ‖ softmax(W z(x̃)))

* Source stage: every image gets a copy with its label. Loss: CE + PCA + consistency.
* Target stage: every few epochs T2PL labels all images of the target. Images that the model is confident about,
  exemplars included, get a copy. Loss: CE + PCA + distillation + consistency, over images and copies; consistency over
  pairs.
* After a stage: exemplars enter the memory, and the model becomes the old model.

These further ingredients are off until measurements speak for them:

* ``consistency.kind=js``: the Jensen-Shannon divergence of three views, the image and two copies, as in AugMix
  (ICLR 2020), which weighs it by 12. Both copies count in every loss, and all views learn from it.
* ``average_old``: after a target's stage, the network becomes the average of the new and the old one, as a whole:
  (1 − a)·θ + a·θ′, BatchNorm's running statistics included.
* ``statistics=reestimated``: these statistics are computed anew after a target's stage, over batches half of which are
  target images and half exemplars, without copies; fifty of them.
* ``trust``: images and copies whose pseudo-label has a lower probability now are left out of the cross-entropy on
  targets, as by SelPL of NLNL (ICCV 2019), which averages the probability over epochs and drops those below ½.

All weights and numbers named here are guesses, but for ``replay``, ``consistency.weight``, ``augmentation`` and
``class_mix``: these were chosen on the fourth and the tenth order of Digits.

With ``augmentation=randmix``, ``class_mix=uniform``, ``replay=0``, ``consistency.weight=0`` and
``randmix.weights_per=batch``, ARC trains as RaTP does, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ratp.config import switch
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.functional.class_mix import Estimate
from ratp.functional.losses import (
    PCAConfig,
    cross_entropy,
    distillation,
    jensen_shannon,
    mean_over,
    prototype_contrastive,
)
from ratp.functional.norm import only_rows, recounting
from ratp.functional.optim import SGDConfig, follow_
from ratp.functional.prorandconv import ProRandConv
from ratp.functional.pseudo_labels import CLASS_MIX, MIX_SMOOTHING, T2PLConfig, announce_if_slow, t2pl
from ratp.functional.randmix import Inputs, RandMix, RandMixConfig, check_kernels, with_copies
from ratp.methods.shared.class_mix import ClassMix
from ratp.networks.network import Network, Output
from ratp.training.method import Setting
from ratp.training.phase import Phase
from ratp.training.phases import OldModelMethod, OldModelPhase, embed_all, update_labels_
from ratp.training.recipe import at_once

# Switches that do not affect training on the source.
LABELLING = frozenset({"refresh", "r_con", "r_top", "r_knn", "class_mix", "mix_smoothing", "trust"})
TARGETS_ONLY = LABELLING | {"replay", "distill", "average_old", "statistics"}
# Batches over which BatchNorm's statistics are estimated anew.
RECOUNTED = 50


@dataclass(frozen=True)
class ConsistencyConfig:
    """Switches of the consistency between an image and its copies."""

    kind: Literal["kl", "js"] = switch("kl", "KL from the image to one copy, or Jensen-Shannon over it and two")
    weight: float = switch(1.0, "weight of the loss; 0 leaves it out", minimum=0)


@dataclass(frozen=True)
class ARCConfig:
    """All switches of ARC. Those that RaTP has, too, have the defaults of its published code, but for RandMix."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    randmix: RandMixConfig = switch(RandMixConfig(weights_per="sample"), "augmentation")
    augmentation: Literal["randmix", "prorandconv", "both"] = switch(
        "both", "how copies are made: by RandMix, by Pro-RandConv, or half of a batch by each"
    )
    replay: float = switch(
        0.25, "exemplars added to every batch of a target, as a share of the batch", minimum=0, maximum=4
    )
    consistency: ConsistencyConfig = switch(ConsistencyConfig(), "consistency between images and copies")
    refresh: int = switch(2, "epochs between label refreshes; 0: once a stage", minimum=0)
    r_con: float = switch(0.8, "confidence above which a target image gets a copy", minimum=0, maximum=1)
    r_top: int = switch(2, "T2PL: each class keeps N/(r_top·K) top samples", minimum=1)
    r_knn: int = switch(20, "T2PL: N/(r_knn·K) neighbours vote", minimum=1)
    class_mix: Estimate = switch("em", f"{CLASS_MIX}; for T2PL and exemplars")
    mix_smoothing: float | None = switch(None, MIX_SMOOTHING, minimum=0, maximum=1)
    pca: PCAConfig = switch(PCAConfig(), "alignment")
    trust: float = switch(
        0.0, "least probability of a pseudo-label that counts in the cross-entropy; 0: all do", minimum=0, below=1
    )
    distill: float = switch(0.5, "weight of the distillation from the old model; 0 leaves it out", minimum=0)
    average_old: float = switch(0.0, "share of the old network in the one that a stage ends with", minimum=0, below=1)
    statistics: Literal["trained", "reestimated"] = switch(
        "trained", "BatchNorm's after a stage: as trained, or estimated anew over target and exemplars"
    )


class ARC(OldModelMethod):
    """Trains with RandMix per image, replay of exemplars, consistency, T2PL, PCA and distillation."""

    name = "arc"
    title = "ARC: augment, replay, be consistent"
    family = "continual domain shift learning"
    paper = "none; this package"
    needs = "exemplars, many passes over a target"
    config_type = ARCConfig
    config: ARCConfig
    stream_values: ClassVar[Mapping[tuple[str, str], Mapping[str, Any]]] = {
        ("pacs", "official"): {"r_con": 0.5, "refresh": 1, "pca.old_weight": 0.5},
        ("domainnet10", "official"): {"refresh": 1, "r_top": 1, "r_knn": 10},
        ("folders", "official"): {"r_con": 0.5, "refresh": 1, "pca.old_weight": 0.5},
    }

    def __init__(self, setting: Setting, config: ARCConfig) -> None:
        check_kernels(config.randmix, setting.image_size)
        super().__init__(setting, config)
        self.randmix = RandMix(config.randmix, self.scaling.mean, self.scaling.std, setting.generator("randmix layers"))
        self.extras = {"randmix": self.randmix}
        self._prorandconv = ProRandConv(self.scaling.mean, self.scaling.std)

    def copy(self, images: Tensor, generator: torch.Generator, rows: Tensor | None = None) -> Tensor:
        """Returns a copy of each normalised image, or of those that ``rows`` selects, by the switch augmentation."""
        kind = self.config.augmentation
        if kind == "prorandconv":
            return self._prorandconv(images, generator, rows)
        if kind == "randmix":
            return self.randmix(images, generator, rows)
        order = torch.rand(len(images), generator=generator, device=generator.device).argsort()
        copies = images.clone()
        copiers: tuple[RandMix | ProRandConv, ...] = (self.randmix, self._prorandconv)
        for copier, places in zip(copiers, order.tensor_split(2), strict=True):
            chosen = None if rows is None else rows[places]
            copies[places if chosen is None else places[chosen]] = copier(images[places], generator, chosen)
        return copies if rows is None else copies[rows]

    def show(self, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Returns three copies of the images."""
        inputs = self.scaling(images)
        return {f"copy {i}": self.scaling.invert(self.copy(inputs, generator)) for i in (1, 2, 3)}

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase with true labels and copies of all images."""
        return [ARCPhase(self, domain.images, domain.labels)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns one phase with pseudo-labels, replay and distillation."""
        return [ARCPhase(self, domain.images, None)]


class ARCPhase(OldModelPhase):
    """Trains ARC on one domain; a target has no ``labels``."""

    saved = "_mix"
    targets_only = TARGETS_ONLY

    def __init__(self, method: ARC, images: Tensor, labels: Tensor | None) -> None:
        setting, config = method.setting, method.config
        super().__init__(method, images, labels)
        self._method, self._config = method, config
        self._augmentation = setting.generator("randmix", method.stage)
        self.generators = *self.generators, self._augmentation
        self._class_mix: ClassMix | None = None
        self._mix: Tensor | None = None  # the class proportions of a target; None: equal ones
        if config.class_mix != "uniform" and self.is_target:
            self._class_mix = ClassMix(method, method.randmix, config.class_mix, config.mix_smoothing)
            self.generators = *self.generators, self._class_mix.generator
        self._replayed = round(config.replay * self.batch) if self.is_target else 0

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; labels the images of a target when due."""
        record = super().begin_epoch(epoch)
        refresh = self._config.refresh
        if self.is_target and (epoch == 0 or (refresh > 0 and epoch % refresh == 0)):
            record |= self._update_labels(first=epoch == 0)
        return record

    def _update_labels(self, *, first: bool) -> dict[str, float]:
        embedding, probabilities = embed_all(self.network, self._method.setting, self.batches.images)
        config = T2PLConfig(r_top=self._config.r_top, r_knn=self._config.r_knn)
        if first:
            announce_if_slow(embedding, probabilities, config)
        self._mix = self._class_mix.estimate(probabilities) if self._class_mix else None
        labels = t2pl(embedding, probabilities, config, mix=self._mix).labels
        extremes = {} if self._mix is None else {"mix_min": self._mix.min().item(), "mix_max": self._mix.max().item()}
        return extremes | update_labels_(self.batches.labels, labels, probabilities, first=first)

    def step(self) -> dict[str, Tensor]:
        """Updates the network once, on a batch, exemplars and their copies."""
        batch = self.batches.draw(self.batch, self._replayed)
        inputs = self._augment(batch.images, batch.labels)
        old, output = at_once(self._device, lambda: self._old_output(inputs), lambda: self._forward(inputs))
        terms = self._fused(inputs, output, old) or self._terms(inputs, output, old)
        confident = {} if inputs.confident is None else {"confident": inputs.confident.float().mean()}
        return self.minimise(terms) | confident

    def _augment(self, images: Tensor, labels: Tensor) -> Inputs:
        """Adds copies to a batch: of all images on the source, of the confident ones on a target."""
        if not self.is_target:
            return with_copies(images, labels, self._copies(images))
        if self._static:
            chosen, copies = at_once(self._device, lambda: self._confident(images), lambda: self._copies(images))
            return with_copies(images, labels, copies, chosen, static=True)
        chosen = self._confident(images)
        return with_copies(images, labels, self._copies(images, chosen), chosen)

    def _copies(self, images: Tensor, rows: Tensor | None = None) -> list[Tensor]:
        """Copies images, or the rows selected, as often as the consistency needs."""
        consistency = self._config.consistency
        rounds = 2 if consistency.weight and consistency.kind == "js" else 1
        return [self._method.copy(images, self._augmentation, rows) for _ in range(rounds)]

    @torch.no_grad()
    def _confident(self, images: Tensor) -> Tensor:
        """Chooses the images of a target batch that get a copy."""
        confidence = self.network.eval()(images).logits.softmax(dim=1).amax(dim=1)
        return confidence > self._config.r_con

    def _forward(self, inputs: Inputs) -> Output:
        """Passes images and copies through the network as one batch."""
        with only_rows(self.network.train(), inputs.valid):
            return self.network(inputs.images)

    @torch.no_grad()
    def _old_output(self, inputs: Inputs) -> Output | None:
        """Passes them through the old model; None: nothing is distilled."""
        return None if self._teacher is None or not self._config.distill else self._teacher(inputs.images)

    def _fused(self, inputs: Inputs, output: Output, old: Output | None) -> dict[str, Tensor]:
        """Computes the loss terms in a few kernels; empty where there are none for these switches or this device."""
        config = self._config
        if config.consistency.kind == "js" or (self.is_target and config.trust):
            return {}
        return self._fused_terms(inputs, output, old, config.pca, (config.distill, config.consistency.weight))

    def _terms(self, inputs: Inputs, output: Output, old: Output | None) -> dict[str, Tensor]:
        """Computes the loss terms one by one."""
        config = self._config
        labels, valid = inputs.labels, inputs.valid
        terms = {"ce": cross_entropy(output.logits, labels, self._trusted(output.logits, inputs))}
        if config.pca.weight:
            prototypes, olds = self.network.prototypes, self._old_prototypes
            losses = prototype_contrastive(output.embedding, labels, prototypes, olds, config.pca, valid)
            terms["pca"] = config.pca.weight * mean_over(losses, valid)
        if old is not None:
            terms["distill"] = config.distill * distillation(output.logits, old.logits, valid)
        if config.consistency.weight:
            terms["consistency"] = config.consistency.weight * self._consistency(output.logits, inputs)
        return terms

    def _consistency(self, logits: Tensor, inputs: Inputs) -> Tensor:
        """Compares the predictions for images and their copies; those for images are constants, but for JS."""
        views, valid = inputs.views(logits)
        if self._config.consistency.kind == "js":
            return jensen_shannon(views, valid)
        image, copy = views
        return distillation(copy, image, valid)

    def _trusted(self, logits: Tensor, inputs: Inputs) -> Tensor | None:
        """Returns which rows count in the cross-entropy; None: all."""
        if not self.is_target or not self._config.trust:
            return inputs.valid
        trusted = logits.detach().softmax(dim=1).gather(1, inputs.labels[:, None])[:, 0] >= self._config.trust
        return trusted if inputs.valid is None else trusted & inputs.valid

    def finish(self) -> dict[str, float]:
        """Finishes the network, chooses exemplars and makes the network the old one."""
        record = self._shared.finish()
        if self._old is not None and self._config.average_old:
            new, old = (_numbers(network) for network in (self.network, self._old))
            follow_(new, old, 1 - self._config.average_old)
        if self.is_target and self._config.statistics == "reestimated":
            self._reestimate_statistics()
        record |= self._method.remember(self.batches.images, self.batches.labels, mix=self._mix)
        self._method.old = self.network.frozen_copy()
        return record

    @torch.no_grad()
    def _reestimate_statistics(self) -> None:
        """Computes BatchNorm's running statistics over batches of target images and exemplars, half of each."""
        generator = self._method.setting.generator("statistics", self._method.stage)
        sets = [self.batches.images, self.memory.images] if len(self.memory) else [self.batches.images]
        each = -(-self.batch // len(sets))
        with recounting(self.network):
            for _ in range(RECOUNTED):
                places = [
                    torch.randint(len(images), (each,), generator=generator, device=self._device) for images in sets
                ]
                parts = [images[place] for images, place in zip(sets, places, strict=True)]
                self.network(self._method.scaling(torch.cat(parts)))


def _numbers(network: Network) -> list[Tensor]:
    """Returns all parameters and statistics of a network, but no counters."""
    return [tensor for tensor in network.state_dict().values() if tensor.is_floating_point()]
