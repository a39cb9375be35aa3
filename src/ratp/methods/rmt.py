"""RMT — "Robust Mean Teacher for Continual and Gradual Test-Time Adaptation", CVPR 2023.

A student learns from a teacher that follows it slowly. Both start as the source's network. With the symmetric
cross-entropy SCE(a, b) = ½·CE(b → a) + ½·CE(a → b), the student's logits x of an image and x̃ of a random view of it,
and the teacher's logits t of the image:

    loss = ½·SCE(x, t) + ½·SCE(x̃, t) + contrast

The contrast takes three vectors of each image: its embedding, that of its view, and the source's prototype nearest to
its embedding by cosine. A projector maps them to unit vectors; those of one image attract each other and all others of
the batch repel, at temperature τ (the supervised contrastive loss, with the image as the class).

* Source stage: cross-entropy. Then the mean embedding of each class becomes its prototype.
* Target stage: one pass; both networks normalise by the batch. One step on all weights of student and projector lowers
  the loss. Then the teacher follows: θ_T ← α·θ_T + (1 − α)·θ_S. The prediction is the mean of both networks' logits.
* Replay adds the cross-entropy of a memory batch, which has its own forward pass.

The student is ``network``. Before the first target, it predicts alone.

Deviations from the published code: the mean of the two networks' logits, where it has their sum, which decides alike;
prototypes come from running statistics, and a class without source images has none; no warm-up, in which student and
teacher see 50,000 more source images after the source stage; dropout is off (its training mode turns it on);
views are CoTTA's, drawn per image and from images in [0, 1], and digits are not mirrored (``flip``); a batch of one
image has no statistics, so it is predicted with running ones and not learned from. Batches have the recipe's size (200
and 64 in the paper).

Guesses: the published loss has the cross-entropy of a batch of source images. They are gone here, so it is that of a
memory batch (``replay``), which holds images of earlier targets too, with the labels they were given. The published
projector starts at the features of the backbone, here at the embedding, which the classifier sees (``projector=0``:
none). The paper has no DTN, which has the values for CIFAR-10, Adam at 0.001 (``step``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.data.domain import LabelledDomain
from ratp.functional.cotta_views import CoTTAView
from ratp.functional.losses import supervised_contrastive, symmetric_cross_entropy
from ratp.functional.norm import by_batch
from ratp.functional.optim import WITH_MOMENTUM, follow_
from ratp.methods.shared.online import AdaptationConfig, BatchStatistics, augmented, logits_by_batch
from ratp.networks.network import Network
from ratp.training.method import Setting, pack, unpack
from ratp.training.phases import embed_all


@dataclass(frozen=True)
class RMTConfig(AdaptationConfig):
    """Switches of RMT."""

    nesterov: bool = switch(True, "Nesterov's momentum, if step.optimiser is sgd")
    teacher: float = switch(0.999, "share α of the teacher kept per step", minimum=0, maximum=1)
    teacher_weight: float = switch(1.0, "weight of the cross-entropy with the teacher", minimum=0)
    contrast_weight: float = switch(1.0, "weight of the contrast", minimum=0)
    temperature: float = switch(0.1, "τ of the contrast", above=0)
    projector: int = switch(128, "units of both layers of the projector; 0: none, the embeddings themselves", minimum=0)
    flip: float = switch(0.0, "probability that a view is mirrored left to right", minimum=0, maximum=1)


def class_means(embeddings: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Averages the embeddings (n, dim) of each class that occurs, in the order of classes."""
    members = F.one_hot(labels, classes).to(embeddings)
    members = members[:, members.any(dim=0)]
    return members.T @ embeddings / members.sum(dim=0)[:, None]


def nearest(embeddings: Tensor, prototypes: Tensor) -> Tensor:
    """Returns the prototype nearest to each embedding (n, dim) by cosine."""
    return prototypes[(F.normalize(embeddings, dim=1) @ F.normalize(prototypes, dim=1).T).argmax(dim=1)]


def image_contrast(views: Tensor, temperature: float) -> Tensor:
    """Contrasts the vectors (views, n, dim) of n images: those of one image attract, all others repel."""
    count, images, _ = views.shape
    return supervised_contrastive(
        views.flatten(0, 1), torch.arange(images, device=views.device).repeat(count), temperature
    ).mean()


class RMT(BatchStatistics):
    """Trains a student on the predictions of its own slow average, and towards prototypes of the source."""

    name = "rmt"
    title = "RMT: robust mean teacher"
    family = "test-time adaptation"
    paper = "Döbler et al., Robust Mean Teacher for Continual and Gradual Test-Time Adaptation, CVPR 2023"
    needs = "batch statistics, exemplars for replay, prototypes of the source, two networks, one pass over a target"
    config_type = RMTConfig
    source_free = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_MOMENTUM
    saved = "_optimiser _changes"
    large: ClassVar[Mapping[str, Any]] = {"step.optimiser": "sgd", "step.rate": 0.01, "flip": 0.5}

    def __init__(self, setting: Setting, config: RMTConfig) -> None:
        super().__init__(setting, config)
        dim, units = setting.recipe.network.dim, config.projector
        with setting.randomness.scope("projector"):
            layers = [nn.Linear(dim, units), nn.ReLU(), nn.Linear(units, units)] if units else []
            self.projector = nn.Sequential(*layers).to(setting.device)
        self.extras = {"projector": self.projector} if units else {}
        self.teacher: Network | None = None  # None before the first target
        self.prototypes: Tensor | None = None  # of the classes of the source; None before the source stage
        self._view = CoTTAView(config.flip)

    def begin_stage(self) -> None:
        """Creates optimiser, replay and the generator of views; on the first target, the teacher too."""
        super().begin_stage()
        if self.teacher is None:
            self.teacher = self.network.frozen_copy()
        learning = [*self.network.parameters(), *self.projector.parameters()]
        self._optimiser = self.config.step.steps_on(learning, nesterov=self.config.nesterov)
        self._changes = self.setting.generator("views", self.stage)

    def learn(self, inputs: Tensor) -> Tensor:
        """Returns the mean logits of student and teacher for a batch, then takes one step."""
        assert self.teacher is not None
        config, network = self.config, self.network
        with torch.no_grad():
            target = logits_by_batch(self.teacher, inputs)
        with by_batch(network):
            plain = network(inputs)
            changed = network(augmented(inputs, self._view, self.scaling, self._changes))
        apart = [symmetric_cross_entropy(output.logits, target).mean() for output in (plain, changed)]
        loss = config.teacher_weight * (0.5 * apart[0] + 0.5 * apart[1])
        if self.prototypes is not None and config.contrast_weight:
            embeddings = plain.embedding, changed.embedding
            views = torch.stack([nearest(plain.embedding.detach(), self.prototypes), *embeddings])
            loss = loss + config.contrast_weight * image_contrast(self.projector(views), config.temperature)
        self._optimiser.minimise(self.with_replay(loss, network))
        follow_(self.teacher.parameters(), network.parameters(), config.teacher)
        return (plain.logits.detach() + target) / 2

    def predict_by(self, network: Network, images: Tensor) -> Tensor:
        """Predicts by a network; by the student, together with the teacher."""
        logits = super().predict_by(network, images)
        if network is not self.network or self.teacher is None:
            return logits
        return (logits + self.predict_by(self.teacher, images)) / 2

    def compute_logits(self, inputs: Tensor) -> Tensor:
        """Computes logits of normalised images by the student, together with the teacher."""
        logits = self.network(inputs).logits
        return logits if self.teacher is None else (logits + self.teacher(inputs).logits) / 2

    def finish_source(self, domain: LabelledDomain) -> dict[str, float]:
        """Computes the prototypes, then takes exemplars."""
        device, classes = self.setting.device, len(self.setting.classes)
        embeddings, _ = embed_all(self.network, self.setting, domain.images.to(device))
        self.prototypes = class_means(embeddings, domain.labels.to(device), classes)
        return super().finish_source(domain)

    def state(self) -> dict[str, Tensor]:
        """Returns student, memory, projector, prototypes and teacher."""
        teacher = {} if self.teacher is None else self.teacher.state_dict()
        prototypes = {} if self.prototypes is None else {"prototypes": self.prototypes}
        return super().state() | pack({"teacher": teacher, "rmt": prototypes})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        parts = unpack(state)
        self.teacher = None
        if "teacher" in parts:
            self.teacher = self.network.frozen_copy()
            self.teacher.load_state_dict(parts["teacher"])
        self.prototypes = parts["rmt"]["prototypes"].to(self.setting.device) if "rmt" in parts else None
