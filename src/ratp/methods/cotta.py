"""CoTTA — "Continual Test-Time Domain Adaptation", CVPR 2022.

Three networks start as the source's: a student that learns, a teacher that follows it slowly, and a fixed anchor.

* Source stage: cross-entropy.
* Target stage: one pass; all three normalise by the batch. The student's target is the teacher's logits: their mean
  over 32 random views if the anchor is unsure of the batch (mean confidence below ``threshold``), else those of the
  batch. They are also the method's prediction. One step on all weights of the student lowers its cross-entropy with
  them. The teacher follows: θ_T ← α·θ_T + (1 − α)·θ_S. Then every weight of the student is restored to the source's
  with probability ``restore``. Nothing is reset.
* Replay adds the student's cross-entropy on a memory batch, which has its own forward pass.

The teacher is ``network``: it predicts and chooses exemplars. The number of views depends on the confidence of the
batch, which is read back from the device once per batch.

Views change colours, turn, shift, scale, blur and mirror images and add noise: :mod:`ratp.functional.cotta_views`.

Deviations from the published code: dropout is off (its training mode turns it on in all networks); the classifier's
weights are restored too (it selects layers' parameters named weight and bias); views are drawn per image (it draws them
per batch) and from images in [0, 1]; digits are not mirrored (``flip``); a batch of one image has no statistics, so it
is predicted with running ones and not learned from. The published threshold for ResNet-50, 0.1, is for
a thousand classes: with ten, the highest probability is never below it, so there would be no views; large networks keep
the 0.92 of CIFAR-10. The comparison adds the memory (``replay``). Batches have the recipe's size (200 and 64 in
the paper).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ratp.config import switch
from ratp.functional.cotta_views import CoTTAView
from ratp.functional.losses import logit_cross_entropy
from ratp.functional.norm import supports_row_masks
from ratp.functional.optim import WITH_MOMENTUM, follow_
from ratp.methods.shared.online import AdaptationConfig, BatchStatistics, logits_by_batch
from ratp.networks.network import Network
from ratp.training.method import Setting, pack, unpack
from ratp.training.recipe import chunk_size


def teacher_loss(student: Tensor, teacher: Tensor, *, symmetric: bool = False) -> Tensor:
    """Computes the loss of a student against its teacher, from logits (n, classes).

    That is CE(teacher → student), or if ``symmetric`` ½·CE(teacher → student) + ½·CE(student → teacher).
    """
    teacher = teacher.detach()
    forth = logit_cross_entropy(student, teacher).mean()
    return 0.5 * forth + 0.5 * logit_cross_entropy(teacher, student).mean() if symmetric else forth


@torch.no_grad()
def restore_(
    parameters: Iterable[Tensor], originals: Iterable[Tensor], probability: float, generator: torch.Generator
) -> None:
    """Resets every weight to its original with the given probability, independently and in place."""
    for parameter, original in zip(parameters, originals, strict=True):
        chance = torch.rand(parameter.shape, generator=generator, device=generator.device)
        # θ ← b·θ⁰ + (1 − b)·θ,  b ~ Bernoulli(p)
        parameter.copy_(torch.where(chance < probability, original, parameter))


@dataclass(frozen=True)
class CoTTAConfig(AdaptationConfig):
    """Switches of CoTTA."""

    nesterov: bool = switch(True, "Nesterov's momentum, if step.optimiser is sgd")
    loss: Literal["teacher", "symmetric"] = switch("teacher", "student against teacher, or the mean of both directions")
    teacher: float = switch(0.999, "share α of the teacher kept per step", minimum=0, maximum=1)
    restore: float = switch(0.01, "probability that a student weight is reset to the source's", minimum=0, maximum=1)
    threshold: float = switch(0.92, "mean confidence of the anchor below which views are used", minimum=0, maximum=1)
    views: int = switch(32, "views that the teacher averages over", minimum=1)
    flip: float = switch(0.0, "probability that a view is mirrored left to right", minimum=0, maximum=1)


class CoTTA(BatchStatistics):
    """Trains a student on the predictions of its own slow average, and partly restores it to the source."""

    name = "cotta"
    title = "CoTTA: continual test-time adaptation"
    family = "continual domain adaptation"
    paper = "Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022"
    needs = "batch statistics, exemplars for replay, three networks, one pass over a target"
    config_type = CoTTAConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_MOMENTUM
    saved = "_optimiser _changes _chance _averaged _batches"
    large: ClassVar[Mapping[str, Any]] = {
        "step.optimiser": "sgd",
        "step.rate": 0.01,
        "loss": "symmetric",
        "restore": 0.001,
        "flip": 0.5,
    }

    def __init__(self, setting: Setting, config: CoTTAConfig) -> None:
        super().__init__(setting, config)
        self.student: Network | None = None  # the network that learns; None before the first target
        self.anchor: Network | None = None  # the source's network; None before the first target
        self._view = CoTTAView(config.flip)

    def begin_stage(self) -> None:
        """Creates optimiser and replay; on the first target, student and anchor too."""
        super().begin_stage()
        if self.student is None or self.anchor is None:
            self.student, self.anchor = self._copies()
        self._optimiser = self.config.step.steps_on(self.student.parameters(), nesterov=self.config.nesterov)
        self._changes = self.setting.generator("views", self.stage)
        self._chance = self.setting.generator("restore", self.stage)
        self._averaged, self._batches = 0, 0

    def learn(self, inputs: Tensor) -> Tensor:
        """Returns the teacher's logits of a batch, then moves the student towards them by one step."""
        assert self.student is not None and self.anchor is not None
        student, config = self.student, self.config
        target = self._target(inputs, self.anchor)
        loss = teacher_loss(logits_by_batch(student, inputs), target, symmetric=config.loss == "symmetric")
        self._optimiser.minimise(self.with_replay(loss, student))
        follow_(self.network.parameters(), student.parameters(), config.teacher)
        restore_(student.parameters(), self.anchor.parameters(), config.restore, self._chance)
        return target

    @torch.no_grad()
    def _target(self, inputs: Tensor, anchor: Network) -> Tensor:
        """Computes the teacher's logits of a batch, or their mean over views if the anchor is unsure."""
        self._batches += 1
        confidence = logits_by_batch(anchor, inputs).softmax(dim=1).amax(dim=1).mean()
        if confidence >= self.config.threshold:
            return logits_by_batch(self.network, inputs)
        self._averaged += 1
        images = self.scaling.invert(inputs).float() / 255
        parts = []
        most = self._views_at_once(images)
        for left in range(self.config.views, 0, -most):
            count = min(most, left)
            views = self._view(images.repeat(count, 1, 1, 1), self._changes)
            parts.append(logits_by_batch(self.network, self.scaling.unit(views), count))
        logits = torch.cat(parts)
        return logits.view(self.config.views, -1, logits.shape[1]).mean(dim=0)

    def _views_at_once(self, images: Tensor) -> int:
        """Returns how many views to pass together: as many as fit on a GPU, which one view hardly occupies."""
        if not (images.is_cuda and supports_row_masks(self.network)):
            return 1
        return max(1, chunk_size(images.shape[1:], images.device) // len(images))

    def finish_target(self, images: Tensor) -> dict[str, float]:
        """Takes exemplars; records the share of batches whose target was averaged over views."""
        return {"averaged_batches": self._averaged / max(self._batches, 1)} | super().finish_target(images)

    def _copies(self) -> tuple[Network, Network]:
        """Returns a trainable and a frozen copy of the teacher."""
        return self.network.frozen_copy().requires_grad_(True), self.network.frozen_copy()

    def state(self) -> dict[str, Tensor]:
        """Returns teacher, memory, student and anchor."""
        if self.student is None or self.anchor is None:
            return super().state()
        return super().state() | pack({"student": self.student.state_dict(), "anchor": self.anchor.state_dict()})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        parts = unpack(state)
        if "student" not in parts:
            self.student = self.anchor = None
        else:
            if self.student is None or self.anchor is None:  # else in place: an optimiser may hold its parameters
                self.student, self.anchor = self._copies()
            self.student.load_state_dict(parts["student"])
            self.anchor.load_state_dict(parts["anchor"])
