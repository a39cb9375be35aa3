"""CoTTA — "Continual Test-Time Domain Adaptation", CVPR 2022.

Three networks begin as the source's: a student that learns, a teacher that follows it slowly, an anchor that stays.

* Source stage: cross-entropy.
* Target stage: one pass; all three normalise by the batch. The teacher's logits of a batch are the student's target:
  their mean over 32 random views if the anchor is unsure of the batch (mean confidence below ``threshold``), else
  those of the batch itself. They are the method's answer too. One step on all weights of the student lowers its
  cross-entropy with them. The teacher follows: θ_T ← α·θ_T + (1 − α)·θ_S. Then every weight of the student is put
  back to the source's with probability ``restore``. Nothing is reset.
* With replay, the cross-entropy of the student on a batch from the memory is added, in a forward pass of its own.

The teacher is ``network``: it predicts and chooses exemplars. The anchor is also what weights are put back to. How many
views there are depends on the confidence of the batch, which is read back from the device once a batch.

Departures from the published code: dropout is off (its training mode turns it on in all networks); the classifier's
weights are put back too (it goes by the names weight and bias of layers); views are drawn for each image (it draws one
for a batch); images are taken back to [0, 1] for them; digits are not mirrored; a batch of one image, which has no
statistics, is predicted by running ones and not learnt from. The published threshold for ResNet-50, 0.1, is for a
thousand classes: of ten, the surest always has as much, so that there would be no views. Large networks keep the 0.92
of CIFAR-10. The memory is the comparison's. Batches are the recipe's (200 and 64 in the paper).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.inference import chunk_size
from ratp.method import Setting, Statistics, pack, unpack
from ratp.network import Network
from ratp.online import BatchStatistics, StepConfig
from ratp.parts.batch_norm import by_batch, supports_row_masks
from ratp.parts.cotta import restore_, teacher_loss
from ratp.parts.cotta_views import CoTTAView
from ratp.parts.moving_average import follow_
from ratp.parts.sgd import SGDConfig
from ratp.replay import Exemplars


@dataclass(frozen=True)
class CoTTAConfig:
    """Switches of CoTTA."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser on the source")
    step: StepConfig = switch(StepConfig(), "steps on targets")
    nesterov: bool = switch(True, "Nesterov's momentum, if steps are made by sgd")
    loss: Literal["teacher", "symmetric"] = switch(
        "teacher", "cross-entropy of the student with the teacher, or half of it and half the other way round"
    )
    teacher: float = switch(0.999, "share α of the teacher that stays in a step", minimum=0, maximum=1)
    restore: float = switch(
        0.01, "probability that a weight of the student is put back to the source's", minimum=0, maximum=1
    )
    threshold: float = switch(
        0.92, "mean confidence of the anchor below which views are averaged", minimum=0, maximum=1
    )
    views: int = switch(32, "views the teacher is averaged over", minimum=1)
    flip: float = switch(0.0, "probability that a view is mirrored left and right", minimum=0, maximum=1)
    replay: Literal["separate", "none"] = switch("separate", "a memory batch beside each batch, or no replay")
    eval_bn: Statistics = switch("batch", "BatchNorm when measured after adaptation: of the images at hand, or running")


class CoTTA(BatchStatistics):
    """A student learns from its own slow average, which predicts, and is partly put back to the source.

    Attributes:
        student: What learns; None before the first target.
        anchor: The source's network; None before the first target.
    """

    name = "cotta"
    title = "CoTTA: continual test-time adaptation"
    family = "continual domain adaptation"
    paper = "Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022"
    needs = "exemplars for replay, three networks, one pass over a target"
    config_type = CoTTAConfig
    large: ClassVar[Mapping[str, Any]] = {
        "step.optimiser": "sgd",
        "step.rate": 0.01,
        "loss": "symmetric",
        "restore": 0.001,
        "flip": 0.5,
    }

    def __init__(self, setting: Setting, config: CoTTAConfig) -> None:
        super().__init__(setting, config)
        self.student: Network | None = None
        self.anchor: Network | None = None
        self._view = CoTTAView(config.flip)

    def begin_stage(self) -> None:
        """A new optimiser and the memory as it is now; on the first target, student and anchor."""
        if self.student is None or self.anchor is None:
            self.student, self.anchor = self._copies()
        self._optimiser = self.config.step.steps_on(self.student.parameters(), nesterov=self.config.nesterov)
        self._exemplars = Exemplars(self.setting, self.stage, self.memory if self.keeps_exemplars else None)
        self._changes = self.setting.generator("views", self.stage)
        self._chance = self.setting.generator("restore", self.stage)
        self._averaged, self._batches = 0, 0

    def learn(self, inputs: Tensor) -> Tensor:
        """The teacher's logits of a batch, before one step brings the student closer to them."""
        assert self.student is not None and self.anchor is not None
        student, config = self.student, self.config
        target = self._target(inputs, self.anchor)
        loss = teacher_loss(_by_batch(student, inputs), target, symmetric=config.loss == "symmetric")
        exemplars = self._exemplars.draw()
        if exemplars is not None:
            loss = loss + F.cross_entropy(_by_batch(student, exemplars.images), exemplars.labels)
        self._optimiser.minimise(loss)
        follow_(self.network.parameters(), student.parameters(), config.teacher)
        restore_(student.parameters(), self.anchor.parameters(), config.restore, self._chance)
        return target

    @torch.no_grad()
    def _target(self, inputs: Tensor, anchor: Network) -> Tensor:
        """The teacher's logits: of the batch, or their mean over views if the anchor is unsure."""
        self._batches += 1
        confidence = _by_batch(anchor, inputs).softmax(dim=1).amax(dim=1).mean()
        if confidence >= self.config.threshold:
            return _by_batch(self.network, inputs)
        self._averaged += 1
        images = self.scaling.invert(inputs).float() / 255
        parts = []
        most = self._views_at_once(images)
        for left in range(self.config.views, 0, -most):
            count = min(most, left)
            views = self._view(images.repeat(count, 1, 1, 1), self._changes)
            parts.append(_by_batch(self.network, self.scaling.unit(views), count))
        logits = torch.cat(parts)
        return logits.view(self.config.views, -1, logits.shape[1]).mean(dim=0)

    def _views_at_once(self, images: Tensor) -> int:
        """How many views go through the network together: on a GPU, which one hardly occupies, as many as fit."""
        if not (images.is_cuda and supports_row_masks(self.network)):
            return 1
        return max(1, chunk_size(images.shape[1:], images.device) // len(images))

    def finish_target(self, images: Tensor) -> dict[str, float]:
        """Takes exemplars; records the share of batches whose target was averaged over views."""
        return {"averaged_batches": self._averaged / max(self._batches, 1)} | super().finish_target(images)

    def _copies(self) -> tuple[Network, Network]:
        """A network that can learn and one that cannot, both as the teacher is now."""
        return self.network.frozen_copy().requires_grad_(True), self.network.frozen_copy()

    def state(self) -> dict[str, Tensor]:
        """Teacher, memory, student and anchor."""
        if self.student is None or self.anchor is None:
            return super().state()
        return super().state() | pack({"student": self.student.state_dict(), "anchor": self.anchor.state_dict()})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        parts = unpack(state)
        self.student = self.anchor = None
        if "student" in parts:
            self.student, self.anchor = self._copies()
            self.student.load_state_dict(parts["student"])
            self.anchor.load_state_dict(parts["anchor"])


def _by_batch(network: Network, inputs: Tensor, batches: int = 1) -> Tensor:
    """Logits of normalised images, by the statistics of each of so many batches among them."""
    with by_batch(network, batches):
        return network(inputs).logits
