"""RaTP — "Deja Vu: Continual Model Generalization for Unseen Domains", ICLR 2023.

RandMix augments, T2PL labels, PCA aligns; distillation and an exemplar memory hold on to what was learnt.

* Source stage: loss CE + PCA without old prototypes, on each batch and its RandMix copy.
* Target stage: T2PL labels all images, now and then anew; batches mix target and memory; images the model
  is confident about get a RandMix copy; loss CE + PCA + distillation from the model before the stage.
* After a stage: exemplars go to the memory, the model becomes the old model.

For ablations (section 3.2 of the paper) other labels can take the place of T2PL's, other losses that of PCA, and
RandMix can be left out: switches ``labelling``, ``alignment`` and ``augment``.

The paper and its published code differ in many places. Each that changes behaviour is a switch of
:class:`RaTPConfig`, numbered by its row in ``docs/ratp.md``; the defaults follow the published code
(preset ``official``), preset ``paper`` follows the text. Departures from both, always in force: a class that
no top sample belongs to keeps its soft centroid in T2PL (the code divides by zero), no image enters the
memory twice (the code repeats images of small classes), and images are drawn on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.capture import at_once
from ratp.config import as_dict, switch
from ratp.copies import three_draws
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import RatpError
from ratp.method import Setting, pack, unpack
from ratp.network import Network, Output
from ratp.parts.batch_norm import only_rows, supports_row_masks
from ratp.parts.bmd_labels import bmd_labels
from ratp.parts.distill import distillation
from ratp.parts.herding import Selection
from ratp.parts.losses import cross_entropy, mean_over
from ratp.parts.pca import PCAConfig, prototype_contrastive
from ratp.parts.pcl import proxy_contrastive
from ratp.parts.prototypes import domain_average, prototype_learning
from ratp.parts.randmix import RandMix, RandMixConfig, check_kernels
from ratp.parts.scl import supervised_contrastive
from ratp.parts.sgd import SGDConfig, StageSGD
from ratp.parts.shot_labels import shot_labels
from ratp.parts.t2pl import T2PLConfig, t2pl
from ratp.phase import Phase
from ratp.source_models import SharedTraining
from ratp.training import Batches, NetworkMethod, look, relabel, remember

Labelling = Literal["t2pl", "softmax", "shot", "bmd", "truth"]
Alignment = Literal["pca", "pl", "scl", "pcl"]
# Switches that the network does not depend on until the first target.
TARGETS_ONLY = frozenset({"r_con", "strict", "augment_replay", "labelling", "t2pl", "distill", "memory"})


@dataclass(frozen=True)
class DistillConfig:
    """Switches of the distillation from the model before the stage."""

    weight: float = switch(0.5, "weight of the loss; the paper says 1", row=7, minimum=0)
    on: Literal["logits", "embedding"] = switch("logits", "what is compared: classifier outputs or z", row=8)
    data: Literal["all", "target"] = switch("all", "images it acts on: all, or clean target images only", row=9)
    student: Literal["train", "eval"] = switch("train", "mode of the learning network; 'eval': no dropout", row=10)


@dataclass(frozen=True)
class ExemplarConfig:
    """Switches of the exemplar memory and its replay."""

    selection: Selection = switch("herding", "herding (published code) or nearest to the class centroid", row=26)
    features: Literal["backbone", "embedding"] = switch("backbone", "what the choice goes by: F(x) or z", row=27)
    labels: Literal["last", "final"] = switch("last", "labels stored: last refresh's, or the final model's", row=28)
    replay: Literal["union", "separate", "none"] = switch(
        "union", "batches from target and memory together, a memory batch beside each, or no replay", row=29
    )


@dataclass(frozen=True)
class RaTPConfig:
    """All switches of RaTP. Defaults: the published code."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    refresh: int = switch(2, "epochs between label refreshes; 0: once a stage", row=25, minimum=0)
    r_con: float = switch(0.8, "confidence from which a target image gets a RandMix copy", row=40, minimum=0, maximum=1)
    strict: bool = switch(True, "confidence must exceed r_con; off: reach it", row=19)
    augment: bool = switch(True, "RandMix copies at all; off: an ablation")
    augment_replay: bool = switch(True, "memory images get RandMix copies too", row=19)
    joint_batch: bool = switch(True, "clean images and copies pass in one batch, sharing BatchNorm", row=20)
    randmix: RandMixConfig = switch(RandMixConfig(), "augmentation")
    labelling: Labelling = switch("t2pl", "who labels targets: T2PL, or for ablations others; truth: told the labels")
    t2pl: T2PLConfig = switch(T2PLConfig(), "pseudo labels")
    alignment: Alignment = switch("pca", "PCA, or for ablations prototype learning, SupCon or PCL in its place")
    temperature: float = switch(0.07, "of SupCon", above=0)
    pca: PCAConfig = switch(PCAConfig(), "alignment; weight and scale serve the losses in its place too")
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


class RaTP(NetworkMethod):
    """RandMix, T2PL, PCA, distillation and an exemplar memory."""

    name = "ratp"
    title = "RaTP: RandMix, Top² pseudo labels, prototype contrastive alignment"
    family = "continual domain shift learning"
    paper = "Liu et al., Deja Vu: Continual Model Generalization for Unseen Domains, ICLR 2023"
    needs = "memory, many passes over a target"
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
        self.old: Network | None = None
        self.randmix = RandMix(config.randmix, self.scaling.mean, self.scaling.std, setting.generator("randmix layers"))

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase with true labels and RandMix copies of all images."""
        return [RaTPPhase(self, domain.images, domain.labels)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """One phase with T2PL labels, memory and distillation."""
        if self.uses_target_labels(self.config):
            raise RatpError(f"with labelling=truth, ratp needs the labels of {domain.name!r}.")
        return [RaTPPhase(self, domain.images, None)]

    @classmethod
    def uses_target_labels(cls, config: RaTPConfig) -> bool:
        """Only where they stand in for pseudo labels."""
        return config.labelling == "truth"

    def told_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """As on any target, with the labels it is told, if it was to be told them."""
        if not self.uses_target_labels(self.config):
            return super().told_phases(domain)
        return [RaTPPhase(self, domain.images, None, told=domain.labels)]

    def show(self, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Three RandMix draws of the images."""
        return three_draws(self.randmix, self.scaling, images, generator)

    def state(self) -> dict[str, Tensor]:
        """Network, old network, memory and RandMix's fixed layers."""
        old = {} if self.old is None else {"old": self.old.state_dict()}
        return super().state() | pack({"randmix": self.randmix.state(), **old})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        parts = unpack(state)
        self.randmix.load_state(parts["randmix"])
        self.old = None
        if "old" in parts:
            self.old = self.network.frozen_copy()
            self.old.load_state_dict(parts["old"])


class RaTPPhase(Phase):
    """The training of RaTP on one domain.

    How many images of a batch get a copy depends on the data. A step can take it in two ways, with the same result:
    *compact*, where only these are copied; *static*, where all are, and the copies nobody asked for are left out of
    BatchNorm and losses. The second costs more work, has the same shapes every time and can be captured.
    """

    def __init__(self, method: RaTP, images: Tensor, labels: Tensor | None, told: Tensor | None = None) -> None:
        """Prepares a stage.

        Args:
            method: Whose network, old network and memory to train with.
            images: All training images of the domain, uint8.
            labels: True labels on the source; None on a target, where T2PL gives them.
            told: The true labels of a target, in place of pseudo labels.
        """
        recipe, config = method.setting.recipe, method.config
        self.name: Literal["source", "target"] = "target" if labels is None else "source"
        self.epochs, self.steps = recipe.epochs, recipe.steps
        self._method, self._config, self._recipe = method, config, recipe
        self._network, self._old, self._memory = method.network, method.old, method.memory
        self._is_target = labels is None
        stage = self._memory.seen
        setting = method.setting
        self._device = setting.device
        replayed = self._memory if self._is_target and config.memory.replay == "union" else None
        given = torch.zeros(len(images), dtype=torch.int64) if labels is None else labels
        self._batches = Batches(setting, self.name, stage, images, given, replayed)
        self._images, self._labels = self._batches.images, self._batches.labels
        self._told = None if told is None else told.to(setting.device)
        self._prototypes = torch.zeros(len(setting.classes), recipe.network.dim, device=setting.device)
        self._has_prototype = torch.zeros(len(setting.classes), dtype=torch.bool, device=setting.device)
        self._augmentation = setting.generator("randmix", stage)
        self._dropout = setting.generator("dropout", stage)
        self.generators = *self._batches.generators, self._augmentation, self._dropout
        can_leave_out = not self._is_target or supports_row_masks(self._network)
        self._static = self.captures = setting.device.type == "cuda" and can_leave_out
        self._optimiser = StageSGD(self._network.parameters(), recipe.lr, recipe.epochs, config.sgd, recipe.steps)
        self._shared = SharedTraining(None if self._is_target else setting.models, self._describe(), self._network)
        if self._shared.is_done:
            self.epochs = 0

    def _describe(self) -> dict[str, Any]:
        """What the network trained on the source depends on, beside recipe, seed and source."""
        switches = {n: value for n, value in as_dict(self._config).items() if n.split(".")[0] not in TARGETS_ONLY}
        return {"kind": type(self).__qualname__, "images": len(self._images), "switches": switches}

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Sets the learning rate; refreshes the pseudo labels when they are due."""
        if epoch == 0:
            self._network.use_generator(self._dropout)
        lr = self._optimiser.begin_epoch(epoch)
        refresh = self._config.refresh
        due = epoch % refresh == 0 if refresh else epoch == 0
        record = {"lr": lr} | (self._label(first=epoch == 0) if self._is_target and due else {})
        if due and self._config.alignment == "pl":
            self._average()
        return record

    def _label(self, *, first: bool) -> dict[str, float]:
        embedding, probabilities = look(self._network, self._method.setting, self._images)
        return relabel(self._labels, self._assign(embedding, probabilities), probabilities, first=first)

    def _assign(self, embedding: Tensor, probabilities: Tensor) -> Tensor:
        """The labels of all images."""
        if self._told is not None:
            return self._told
        kind = self._config.labelling
        if kind == "softmax":
            return probabilities.argmax(dim=1)
        if kind == "shot":
            return shot_labels(embedding, probabilities)
        if kind == "bmd":
            return bmd_labels(embedding, probabilities).labels
        return t2pl(embedding, probabilities, self._config.t2pl).labels

    def _average(self) -> None:
        """Takes the prototypes of prototype learning anew, in their place: a captured step reads them there."""
        memory = self._memory
        images, labels, domains = self._images, self._labels, torch.full_like(self._labels, memory.seen)
        if len(memory):
            images, labels = torch.cat([images, memory.images]), torch.cat([labels, memory.labels])
            domains = torch.cat([domains, memory.domains])
        embedding, _ = look(self._network, self._method.setting, images)
        means, there = domain_average(embedding, labels, domains, len(self._prototypes))
        self._prototypes.copy_(means)
        self._has_prototype.copy_(there)

    def step(self) -> dict[str, Tensor]:
        """One update on a batch and the RandMix copies of its confident images."""
        config = self._config
        clean, labels, replayed, _ = self._batches.draw(self._recipe.batch)
        images, labels, selected, valid = self._augment(clean, labels, replayed)
        teacher, output = at_once(
            self._device, lambda: self._teach(images, replayed, valid), lambda: self._forward(images, valid)
        )

        terms = {"ce": cross_entropy(output.logits, labels, valid)}
        if config.pca.weight:
            terms["pca"] = config.pca.weight * mean_over(self._align(output.embedding, labels, valid), valid)
        if teacher is not None:
            terms["distill"] = config.distill.weight * self._distil(images, output, teacher, replayed, valid)
        if self._is_target and config.memory.replay == "separate" and len(self._memory):
            terms["replay"] = self._replay()
        total = torch.stack(list(terms.values())).sum()
        self._optimiser.minimise(total)
        return {"total": total, **terms} | ({} if selected is None else {"confident": selected.float().mean()})

    def _align(self, embedding: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor:
        """The alignment loss of every sample."""
        config, prototypes = self._config, self._network.prototypes
        if config.alignment == "pl":
            return prototype_learning(embedding, labels, self._prototypes, self._has_prototype, config.pca.scale)
        if config.alignment == "scl":
            return supervised_contrastive(embedding, labels, config.temperature, valid)
        if config.alignment == "pcl":
            return proxy_contrastive(embedding, labels, prototypes, config.pca.scale, valid)
        old = None if self._old is None else self._old.prototypes
        return prototype_contrastive(embedding, labels, prototypes, old, config.pca, valid)

    def _select(self, images: Tensor, replayed: Tensor) -> Tensor:
        """Which images of a target get a RandMix copy: the confident ones."""
        self._network.eval()
        with torch.no_grad():
            confidence = self._network(images).logits.softmax(dim=1).amax(dim=1)
        selected = confidence > self._config.r_con if self._config.strict else confidence >= self._config.r_con
        if not self._config.augment_replay:
            selected = selected & ~replayed
        if not self._config.joint_batch:
            selected = selected & (selected.sum() >= 2)  # BatchNorm needs two images
        return selected

    def _augment(
        self, clean: Tensor, labels: Tensor, replayed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Images and their copies, the labels of all, which got a copy, and which of them count; None: all of them."""
        if not self._config.augment:
            return clean, labels, None, None

        def copy(rows: Tensor | None = None) -> Tensor:
            return self._method.randmix(clean, self._augmentation, rows)

        if not self._is_target:
            return torch.cat([clean, copy()]), torch.cat([labels, labels]), None, None
        valid, more_labels = None, labels
        if self._static:
            selected, copies = at_once(self._device, lambda: self._select(clean, replayed), copy)
            # What does not count is at least an image: no number of it can spoil the others.
            copies = torch.where(selected[:, None, None, None], copies, clean)
            valid = torch.cat([torch.ones_like(selected), selected])
        else:
            selected = self._select(clean, replayed)
            copies, more_labels = copy(selected), labels[selected]
        return torch.cat([clean, copies]), torch.cat([labels, more_labels]), selected, valid

    def _forward(self, images: Tensor, valid: Tensor | None) -> Output:
        self._network.train()
        count = self._recipe.batch
        if self._config.joint_batch or len(images) == count:
            return self._pass(images, valid)
        parts = self._network(images[:count]), self._pass(images[count:], None if valid is None else valid[count:])
        return Output(*(torch.cat(pair) for pair in zip(*parts, strict=True)))

    def _pass(self, images: Tensor, valid: Tensor | None) -> Output:
        with only_rows(self._network, valid):
            return self._network(images)

    def _teach(self, images: Tensor, replayed: Tensor, valid: Tensor | None) -> Output | None:
        """What the model before the stage makes of the images that are distilled; None: nothing is."""
        if self._old is None or not self._config.distill.weight:
            return None
        with torch.no_grad():
            (distilled,), _ = self._distilled(replayed, valid, images)
            return self._old(distilled)

    def _distil(
        self, images: Tensor, output: Output, teacher: Output, replayed: Tensor, valid: Tensor | None
    ) -> Tensor:
        config = self._config.distill
        (images, *given), rows = self._distilled(replayed, valid, images, *output)
        student = Output(*given)
        if config.student == "eval":
            self._network.eval()
            student = self._network(images)
            self._network.train()
        if config.on == "embedding":
            return distillation(student.embedding, teacher.embedding, rows)
        return distillation(student.logits, teacher.logits, rows)

    def _distilled(
        self, replayed: Tensor, valid: Tensor | None, *tensors: Tensor
    ) -> tuple[list[Tensor], Tensor | None]:
        """The rows of some tensors that distillation acts on, and which of these count; None: all of them."""
        chosen, rows = list(tensors), valid
        if self._config.distill.data == "target":
            chosen, rows = [tensor[: len(replayed)] for tensor in chosen], ~replayed
        if rows is not None and not self._static:
            chosen, rows = [tensor[rows] for tensor in chosen], None
        return chosen, rows

    def _replay(self) -> Tensor:
        batch = self._batches.draw_memory(self._memory, self._recipe.batch)
        return F.cross_entropy(self._network(batch.images).logits, batch.labels)

    def finish(self) -> dict[str, float]:
        """Chooses exemplars and makes the trained model the old one."""
        record = self._shared.finish()
        if self._is_target and self._config.memory.labels == "final":
            record |= {f"final_{name}": value for name, value in self._label(first=False).items()}
        record |= remember(
            self._method.setting,
            self._memory,
            self._network,
            self._images,
            self._labels,
            self._config.memory.selection,
            self._config.memory.features,
        )
        self._method.old = self._network.frozen_copy()
        return record
