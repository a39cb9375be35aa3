"""RaTP — "Deja Vu: Continual Model Generalization for Unseen Domains", ICLR 2023.

RandMix augments, T2PL labels and PCA aligns; distillation and an exemplar memory prevent forgetting.

* Source stage: every image of a batch gets a RandMix copy with the same label. Loss: CE + PCA, without old prototypes.
* Target stage: every few epochs T2PL labels all images of the target. A batch mixes target and memory; images that
  the model is confident about get a RandMix copy. Loss: CE + PCA + distillation from the model before the stage.
* After a stage: exemplars of the domain enter the memory, and the model becomes the old model.

With an embedding z, the rows w of the classifier W as prototypes, and primes for the old model:

    CE       −log softmax_y(W z)
    PCA      −log (e^{s·z·w_y} + m·e^{s·z·w′_y}) / (Σ_c e^{s·z·w_c} + m·Σ_c e^{s·z·w′_c} + Σ_{j: y_j≠y} e^{s·z·z_j})
    distill  KL(softmax(W′ z′) ‖ softmax(W z))

For the ablations of section 3.2, other labels can replace those of T2PL and other losses PCA, and RandMix can be left
out: switches ``labelling``, ``alignment`` and ``augment``.

The paper and its published code differ in many places. Each difference that changes behaviour is a switch of
:class:`RaTPConfig`, numbered by its row in ``docs/explanation/paper-and-code.md``. The defaults follow the published
code (preset ``official``), the preset ``paper`` follows the text. Four deviations from both are always in force: in
T2PL, a class without top samples keeps its soft centroid (the code divides by zero), and both rounds have the same
classes (the code drops those that the first one assigns to no image); no image enters the memory twice (the code
repeats images of small classes); and images are drawn on the device.

Beyond paper and code, ``t2pl.class_mix`` lets the sizes of T2PL's selections follow an estimate of the target's class
proportions (:mod:`ratp.functional.class_mix`) instead of being equal.

For one source and one target, the paper leaves out memory, distillation and, in PCA's numerator, the old prototypes;
of its denominator it says nothing. ``pca.old_weight=0`` leaves them out of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import RatpError
from ratp.functional.losses import (
    PCAConfig,
    cross_entropy,
    distillation,
    mean_over,
    prototype_contrastive,
    proxy_contrastive,
    supervised_contrastive,
)
from ratp.functional.norm import only_rows
from ratp.functional.optim import SGDConfig
from ratp.functional.pseudo_labels import (
    T2PLConfig,
    announce_if_slow,
    bmd_labels,
    domain_average,
    prototype_learning,
    shot_labels,
    t2pl,
)
from ratp.functional.randmix import Inputs, RandMix, RandMixConfig, check_kernels, with_copies
from ratp.methods.shared.class_mix import ClassMix
from ratp.networks.network import Output
from ratp.training.memory import Batch, Selection
from ratp.training.method import Setting
from ratp.training.phase import Phase
from ratp.training.phases import OldModelMethod, OldModelPhase, embed_all, update_labels_
from ratp.training.recipe import at_once

Labelling = Literal["t2pl", "softmax", "shot", "bmd", "truth"]
Alignment = Literal["pca", "pl", "scl", "pcl"]


@dataclass(frozen=True)
class DistillConfig:
    """Switches of the distillation from the old model."""

    weight: float = switch(0.5, "weight of the loss; the paper says 1", doc_ref=7, minimum=0)
    on: Literal["logits", "embedding"] = switch("logits", "what is compared: classifier outputs or z", doc_ref=8)
    data: Literal["all", "target"] = switch("all", "distilled images: all, or clean target images only", doc_ref=9)
    student: Literal["train", "eval"] = switch("train", "mode of the learning network; 'eval': no dropout", doc_ref=10)


@dataclass(frozen=True)
class ExemplarConfig:
    """Switches of the exemplar memory and its replay."""

    selection: Selection = switch("herding", "herding (published code) or nearest to the class centroid", doc_ref=26)
    features: Literal["backbone", "embedding"] = switch("backbone", "features that decide: F(x) or z", doc_ref=27)
    labels: Literal["last", "final"] = switch("last", "labels stored: last refresh's, or the final model's", doc_ref=28)
    replay: Literal["union", "separate", "none"] = switch(
        "union", "batches from target and memory together, a memory batch with each, or no replay", doc_ref=29
    )


@dataclass(frozen=True)
class RaTPConfig:
    """All switches of RaTP. Defaults: the published code."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    refresh: int = switch(2, "epochs between label refreshes; 0: once a stage", doc_ref=25, minimum=0)
    r_con: float = switch(
        0.8, "confidence from which a target image gets a RandMix copy", doc_ref=40, minimum=0, maximum=1
    )
    strict: bool = switch(True, "confidence must exceed r_con; off: reach it", doc_ref=19)
    augment: bool = switch(True, "make RandMix copies; off: an ablation")
    augment_replay: bool = switch(True, "memory images get RandMix copies too", doc_ref=19)
    joint_batch: bool = switch(True, "clean images and copies form one batch, sharing BatchNorm", doc_ref=20)
    randmix: RandMixConfig = switch(RandMixConfig(), "augmentation")
    labelling: Labelling = switch("t2pl", "labels of targets: T2PL, or for ablations others; truth: true labels")
    t2pl: T2PLConfig = switch(T2PLConfig(), "pseudo labels")
    alignment: Alignment = switch("pca", "PCA, or for ablations prototype learning, SupCon or PCL")
    temperature: float = switch(0.07, "temperature of SupCon", above=0)
    pca: PCAConfig = switch(PCAConfig(), "alignment; weight and scale also apply to the losses that replace it")
    distill: DistillConfig = switch(DistillConfig(), "distillation")
    memory: ExemplarConfig = switch(ExemplarConfig(), "exemplars")


PAPER: Mapping[str, Any] = {
    "sgd.momentum": 0.9,
    "sgd.schedule": "constant",
    "strict": False,
    "augment_replay": False,
    "randmix.colour_branch": False,
    "randmix.tanh": False,
    "randmix.adain": "affine",
    "randmix.redraw_adain": True,
    "randmix.init": "normal",
    "randmix.input_noise": 0.0,
    "t2pl.normalise": False,
    "t2pl.rounds": 1,
    "t2pl.top_set": "union",
    "t2pl.classes": "all",
    "pca.similarity": "dot",
    "pca.negatives": "all",
    "pca.old_weight": 1.0,
    "distill.weight": 1.0,
    "distill.data": "target",
    "memory.selection": "nearest",
}


class RaTP(OldModelMethod):
    """Trains with RandMix, T2PL, PCA, distillation and an exemplar memory."""

    name = "ratp"
    title = "RaTP: RandMix, Top² pseudo labels, prototype contrastive alignment"
    family = "continual domain shift learning"
    paper = "Liu et al., Deja Vu: Continual Model Generalization for Unseen Domains, ICLR 2023"
    needs = "exemplars, many passes over a target"
    config_type = RaTPConfig
    config: RaTPConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": PAPER}
    # The demo's rate is for SGD without momentum; momentum 0.9 makes a step ten times as long.
    stream_values: ClassVar[Mapping[tuple[str, str], Mapping[str, Any]]] = {
        ("demo", "paper"): {"lr": 0.005},
        ("pacs", "official"): {"r_con": 0.5, "refresh": 1, "pca.old_weight": 0.5},
        ("pacs", "paper"): {"r_con": 0.5, "refresh": 1},
        ("domainnet10", "official"): {"refresh": 1, "t2pl.r_top": 1, "t2pl.r_knn": 10},
        ("domainnet10", "paper"): {"refresh": 1, "t2pl.r_top": 1, "t2pl.r_knn": 10},
        ("folders", "official"): {"r_con": 0.5, "refresh": 1, "pca.old_weight": 0.5},
        ("folders", "paper"): {"r_con": 0.5, "refresh": 1},
    }

    def __init__(self, setting: Setting, config: RaTPConfig) -> None:
        check_kernels(config.randmix, setting.image_size)
        super().__init__(setting, config)
        self.randmix = RandMix(config.randmix, self.scaling.mean, self.scaling.std, setting.generator("randmix layers"))
        self.extras = {"randmix": self.randmix}

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase with true labels and RandMix copies of all images."""
        return [RaTPPhase(self, domain.images, domain.labels)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns one phase with pseudo-labels, memory and distillation."""
        if self.uses_target_labels(self.config):
            raise RatpError(f"with labelling=truth, ratp needs the labels of {domain.name!r}.")
        return [RaTPPhase(self, domain.images, None)]

    @classmethod
    def uses_target_labels(cls, config: RaTPConfig) -> bool:
        """Returns whether true labels replace pseudo-labels."""
        return config.labelling == "truth"

    def labelled_target_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase as on any target, with its true labels; refuses unless ``labelling`` is truth."""
        if not self.uses_target_labels(self.config):
            return super().labelled_target_phases(domain)
        return [RaTPPhase(self, domain.images, None, target_labels=domain.labels)]

    def show(self, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Returns three RandMix copies of the images."""
        inputs = self.scaling(images)
        return {f"RandMix {i}": self.scaling.invert(self.randmix(inputs, generator)) for i in (1, 2, 3)}


class RaTPPhase(OldModelPhase):
    """Trains RaTP on one domain; a target has no ``labels``, and ``target_labels`` replace its pseudo-labels."""

    saved = "_prototypes _has_prototype"
    targets_only = frozenset({"r_con", "strict", "augment_replay", "labelling", "t2pl", "distill", "memory"})

    def __init__(
        self, method: RaTP, images: Tensor, labels: Tensor | None, target_labels: Tensor | None = None
    ) -> None:
        setting, config = method.setting, method.config
        super().__init__(method, images, labels, replay=config.memory.replay == "union")
        self._method, self._config = method, config
        self._images, self._labels = self.batches.images, self.batches.labels
        self._target_labels = None if target_labels is None else target_labels.to(self._device)
        self._prototypes = torch.zeros(len(setting.classes), self.network.config.dim, device=self._device)
        self._has_prototype = torch.zeros(len(setting.classes), dtype=torch.bool, device=self._device)
        self._augmentation = setting.generator("randmix", method.stage)
        self.generators = *self.generators, self._augmentation
        self._class_mix: ClassMix | None = None
        if config.t2pl.class_mix != "uniform" and self.is_target:
            self._class_mix = ClassMix(method, method.randmix, config.t2pl.class_mix, config.t2pl.mix_smoothing)
            self.generators = *self.generators, self._class_mix.generator

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; updates pseudo-labels and averaged prototypes when they are due."""
        config = self._config
        record = super().begin_epoch(epoch)
        due = epoch == 0 or (config.refresh > 0 and epoch % config.refresh == 0)
        if due and self.is_target:
            record |= self._update_labels(first=epoch == 0)
        if due and config.alignment == "pl":
            self._update_prototypes()
        return record

    def step(self) -> dict[str, Tensor]:
        """Updates the network once, on a batch and its RandMix copies."""
        config = self._config
        batch = self.batches.draw(self.batch)
        inputs = self._augment(batch)
        old, output = at_once(
            self._device, lambda: self._old_output(batch, inputs), lambda: self._forward(inputs.images, inputs.valid)
        )
        terms = self._fused(inputs, output, old) or self._terms(batch, inputs, output, old)
        if self.is_target and config.memory.replay == "separate" and len(self.memory):
            stored = self.batches.draw_memory(self.memory, self.batch)
            terms["replay"] = F.cross_entropy(self.network(stored.images).logits, stored.labels)
        confident = {} if inputs.confident is None else {"confident": inputs.confident.float().mean()}
        return self.minimise(terms) | confident

    def finish(self) -> dict[str, float]:
        """Chooses exemplars and makes the trained model the old one."""
        config = self._config.memory
        record = self._shared.finish()
        if self.is_target and config.labels == "final":
            record |= {f"final_{name}": value for name, value in self._update_labels(first=False).items()}
        record |= self._method.remember(self._images, self._labels, config.selection, config.features)
        self._method.old = self.network.frozen_copy()
        return record

    # Pseudo-labels: T2PL, or what replaces it.

    def _update_labels(self, *, first: bool) -> dict[str, float]:
        embedding, probabilities = embed_all(self.network, self._method.setting, self._images)
        if first and self._config.labelling == "t2pl":
            announce_if_slow(embedding, probabilities, self._config.t2pl)
        return update_labels_(self._labels, self._pseudo_labels(embedding, probabilities), probabilities, first=first)

    def _pseudo_labels(self, embedding: Tensor, probabilities: Tensor) -> Tensor:
        kind = self._config.labelling
        if self._target_labels is not None:
            return self._target_labels
        if kind == "softmax":
            return probabilities.argmax(dim=1)
        if kind == "shot":
            return shot_labels(embedding, probabilities)
        if kind == "bmd":
            return bmd_labels(embedding, probabilities).labels
        mix = self._class_mix.estimate(probabilities) if self._class_mix else None
        return t2pl(embedding, probabilities, self._config.t2pl, mix=mix).labels

    # RandMix.

    def _augment(self, batch: Batch) -> Inputs:
        """Adds copies to a batch: of all images on the source, of the confident ones on a target."""
        clean, labels = batch.images, batch.labels
        if not self._config.augment:
            return Inputs(clean, labels)
        if not self.is_target:
            return with_copies(clean, labels, [self._copy(clean)])
        if self._static:
            chosen, copies = at_once(self._device, lambda: self._confident(batch), lambda: self._copy(clean))
            return with_copies(clean, labels, [copies], chosen, static=True)
        chosen = self._confident(batch)
        return with_copies(clean, labels, [self._copy(clean, chosen)], chosen)

    def _copy(self, images: Tensor, rows: Tensor | None = None) -> Tensor:
        return self._method.randmix(images, self._augmentation, rows)

    def _confident(self, batch: Batch) -> Tensor:
        """Chooses the images of a target batch that get a copy."""
        config = self._config
        self.network.eval()
        with torch.no_grad():
            confidence = self.network(batch.images).logits.softmax(dim=1).amax(dim=1)
        chosen = confidence > config.r_con if config.strict else confidence >= config.r_con
        if not config.augment_replay:
            chosen = chosen & ~batch.replayed
        if not config.joint_batch:
            chosen = chosen & (chosen.sum() >= 2)  # BatchNorm needs two images
        return chosen

    # Forward passes.

    def _forward(self, images: Tensor, valid: Tensor | None) -> Output:
        """Passes the batch and its copies, together or one after the other; BatchNorm mixes what passes together."""
        network, count = self.network.train(), self.batch
        if self._config.joint_batch or len(images) == count:
            with only_rows(network, valid):
                return network(images)
        clean = network(images[:count])
        with only_rows(network, None if valid is None else valid[count:]):
            copies = network(images[count:])
        return Output(*(torch.cat(pair) for pair in zip(clean, copies, strict=True)))

    def _old_output(self, batch: Batch, inputs: Inputs) -> Output | None:
        """Passes the images to distil from through the old model; None: nothing is distilled."""
        if self._teacher is None or not self._config.distill.weight:
            return None
        pick, _ = self._distilled_rows(batch, inputs)
        with torch.no_grad():
            return self._teacher(pick(inputs.images))

    # Losses.

    def _fused(self, inputs: Inputs, output: Output, old: Output | None) -> dict[str, Tensor]:
        """Computes the loss terms in a few kernels; empty where there are none for these switches or this device."""
        config = self._config
        if config.alignment != "pca" or config.distill != DistillConfig(weight=config.distill.weight):
            return {}
        return self._fused_terms(inputs, output, old, config.pca, (config.distill.weight, 0.0))

    def _terms(self, batch: Batch, inputs: Inputs, output: Output, old: Output | None) -> dict[str, Tensor]:
        """Computes the loss terms one by one."""
        config = self._config
        terms = {"ce": cross_entropy(output.logits, inputs.labels, inputs.valid)}
        if config.pca.weight:
            terms["pca"] = config.pca.weight * mean_over(self._alignment(output.embedding, inputs), inputs.valid)
        if old is not None:
            terms["distill"] = config.distill.weight * self._distillation(batch, inputs, output, old)
        return terms

    def _alignment(self, embedding: Tensor, inputs: Inputs) -> Tensor:
        """Computes PCA, or the loss that replaces it, for every row."""
        config, prototypes, labels, valid = self._config, self.network.prototypes, inputs.labels, inputs.valid
        if config.alignment == "pl":
            return prototype_learning(embedding, labels, self._prototypes, self._has_prototype, config.pca.scale)
        if config.alignment == "scl":
            return supervised_contrastive(embedding, labels, config.temperature, valid)
        if config.alignment == "pcl":
            return proxy_contrastive(embedding, labels, prototypes, config.pca.scale, valid)
        return prototype_contrastive(embedding, labels, prototypes, self._old_prototypes, config.pca, valid)

    def _update_prototypes(self) -> None:
        """Averages the prototypes of prototype learning, in place: a captured step reads them there."""
        memory = self.memory
        images, labels, domains = self._images, self._labels, torch.full_like(self._labels, memory.seen)
        if len(memory):
            images, labels = torch.cat([images, memory.images]), torch.cat([labels, memory.labels])
            domains = torch.cat([domains, memory.domains])
        embedding, _ = embed_all(self.network, self._method.setting, images)
        means, exists = domain_average(embedding, labels, domains, len(self._prototypes))
        self._prototypes.copy_(means)
        self._has_prototype.copy_(exists)

    def _distillation(self, batch: Batch, inputs: Inputs, output: Output, old: Output) -> Tensor:
        config = self._config.distill
        pick, valid = self._distilled_rows(batch, inputs)
        if config.student == "eval":
            output = self.network.eval()(pick(inputs.images))
            self.network.train()
        else:
            output = Output(*map(pick, output))
        if config.on == "embedding":
            return distillation(output.embedding, old.embedding, valid)
        return distillation(output.logits, old.logits, valid)

    def _distilled_rows(self, batch: Batch, inputs: Inputs) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
        """Returns a function that picks the rows to distil, and which of those count; None: all."""
        if self._config.distill.data == "all":
            return lambda tensor: tensor, inputs.valid
        count, fresh = len(batch.images), ~batch.replayed
        if self._static:
            return lambda tensor: tensor[:count], fresh
        return lambda tensor: tensor[:count][fresh], None
