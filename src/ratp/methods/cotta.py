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

A view changes, in this order: brightness, contrast, saturation, hue and gamma, in random order; rotation, shift and
scale about the centre; a slight blur; mirroring; noise. Values are clipped to [0, 1]. The published code pads images by
half their side, transforms all of it and cuts out the centre. Here only the pixels of that centre are computed, and
positions outside the image take the colour of its edge, as in the padding.

Deviations from the published code: dropout is off (its training mode turns it on in all networks); the classifier's
weights are restored too (it selects layers' parameters named weight and bias); views are drawn per image (it draws them
per batch) and from images in [0, 1]; digits are not mirrored (``flip``); a batch of one image has no statistics, so it
is predicted with running ones and not learned from. The published threshold for ResNet-50, 0.1, is for
a thousand classes: with ten, the highest probability is never below it, so there would be no views; large networks keep
the 0.92 of CIFAR-10. The comparison adds the memory (``replay``). Batches have the recipe's size (200 and 64 in
the paper).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.functional.colour import blend_, blur_inside, rotate_hue_
from ratp.functional.norm import supports_row_masks
from ratp.functional.optim import WITH_MOMENTUM, follow_
from ratp.methods.shared.online import AdaptationConfig, BatchStatistics, logits_by_batch
from ratp.networks.network import Network
from ratp.training.method import Setting, pack, unpack
from ratp.training.recipe import chunk_size


def teacher_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Computes −Σ softmax(target)·log softmax(logits) of logits (n, classes), averaged over rows."""
    return -(target.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1).mean()


def teacher_loss(student: Tensor, teacher: Tensor, *, symmetric: bool = False) -> Tensor:
    """Computes the loss of a student against its teacher, from logits (n, classes).

    That is CE(teacher → student), or if ``symmetric`` ½·CE(teacher → student) + ½·CE(student → teacher).
    """
    teacher = teacher.detach()
    forth = teacher_cross_entropy(student, teacher)
    return 0.5 * forth + 0.5 * teacher_cross_entropy(teacher, student) if symmetric else forth


@torch.no_grad()
def restore_(
    parameters: Iterable[Tensor], originals: Iterable[Tensor], probability: float, generator: torch.Generator
) -> None:
    """Resets every weight to its original with the given probability, independently and in place."""
    for parameter, original in zip(parameters, originals, strict=True):
        chance = torch.rand(parameter.shape, generator=generator, device=generator.device)
        # θ ← b·θ⁰ + (1 − b)·θ,  b ~ Bernoulli(p)
        parameter.copy_(torch.where(chance < probability, original, parameter))


# Factors of brightness, contrast and saturation; rotation of the hue, in full circles; exponents of gamma.
RANGES = (0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3)
BRIGHTNESS, CONTRAST, SATURATION, HUE, GAMMA = range(len(RANGES))
ANGLE = math.radians(15)
SHIFT = 1 / 16  # of the padded side
SCALES = 0.9, 1.1
BLUR_RADIUS, BLUR_WIDTHS = 2, (0.001, 0.5)
NOISE = 0.005


@dataclass(frozen=True)
class CoTTADraw:
    """All random numbers of one call, a row per image."""

    order: Tensor  # the colour operation at each of five positions (n, 5)
    factors: Tensor  # the parameter of each colour operation (n, 5), in the order of ``RANGES``
    angles: Tensor  # rotations in radians (n,)
    shifts: Tensor  # to the right and down, whole pixels (n, 2)
    scales: Tensor  # magnifications (n,)
    widths: Tensor  # of the blur (n,)
    flip: Tensor  # which images are mirrored left to right (n,)
    noise: Tensor  # added at the end (n, 3, height, width)


class CoTTAView:
    """Random views of images, mirrored left to right with probability ``flip``."""

    def __init__(self, flip: float) -> None:
        self.flip = flip

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Returns a view of each image; images and views are floats in [0, 1]."""
        return self.apply(images, self.draw(images.shape, generator))

    def draw(self, shape: torch.Size, generator: torch.Generator) -> CoTTADraw:
        """Draws all random numbers for images of ``shape``."""
        count, device = shape[0], generator.device
        order = torch.rand(count, len(RANGES), generator=generator, device=device).argsort(dim=1)
        uniform = torch.rand(count, len(RANGES) + 6, generator=generator, device=device)
        colours, (angle, right, down, scale, width, flip) = uniform[:, :5], uniform[:, 5:].unbind(dim=1)
        low, high = torch.tensor(RANGES, device=device).unbind(dim=1)
        farthest = [SHIFT * (side + 2 * (side // 2)) for side in (shape[3], shape[2])]
        shifts = [(most * (2 * u - 1)).round() for most, u in zip(farthest, (right, down), strict=True)]
        return CoTTADraw(
            order=order,
            factors=low + (high - low) * colours,
            angles=ANGLE * (2 * angle - 1),
            shifts=torch.stack(shifts, dim=1),
            scales=SCALES[0] + (SCALES[1] - SCALES[0]) * scale,
            widths=BLUR_WIDTHS[0] + (BLUR_WIDTHS[1] - BLUR_WIDTHS[0]) * width,
            flip=flip < self.flip,
            noise=NOISE * torch.randn(shape, generator=generator, device=device),
        )

    @torch.no_grad()
    def apply(self, images: Tensor, draw: CoTTADraw) -> Tensor:
        """Returns views of images for the given random numbers."""
        views = recolour(images.clamp(0, 1), draw.order, draw.factors)
        views = blur_inside(warp(views, draw, BLUR_RADIUS), draw.widths, BLUR_RADIUS)
        views = torch.where(draw.flip[:, None, None, None], views.flip(3), views)
        return views.add_(draw.noise).clamp_(0, 1)


def recolour(images: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Applies the five colour operations to each image in its own order.

    Blends and gamma are neutral for images whose turn it is not. The costly hue rotation runs once, between the
    operations that precede it and those that follow.
    """
    images = images.clone()
    hue_at = (order == HUE).int().argmax(dim=1)
    last = order.shape[1] - 1
    for position in range(last):  # nothing precedes the hue from the last position
        _step_(images, order[:, position], factors, hue_at > position)
    rotate_hue_(images, factors[:, HUE])
    for position in range(1, last + 1):
        _step_(images, order[:, position], factors, hue_at < position)
    return images


def _step_(images: Tensor, operation: Tensor, factors: Tensor, active: Tensor) -> None:
    """Applies one operation to each ``active`` image: a blend with its grey version or its mean, or gamma."""
    factor = factors.gather(1, operation[:, None])[:, 0]
    blends = active & (operation <= SATURATION)
    own = torch.where(blends, factor, 1)
    grey = torch.where(blends & (operation == SATURATION), 1 - factor, 0)
    mean = torch.where(blends & (operation == CONTRAST), 1 - factor, 0)
    blend_(images, torch.stack((own, grey, mean), dim=1))
    # x ← x^γ
    images.pow_(torch.where(active & (operation == GAMMA), factor, 1)[:, None, None, None])


def warp(images: Tensor, draw: CoTTADraw, margin: int) -> Tensor:
    """Rotates, shifts and scales images about their centres; the result is larger by ``margin`` on each side."""
    height, width = images.shape[2:]
    x = torch.arange(-margin, width + margin, device=images.device) - (width - 1) / 2
    y = torch.arange(-margin, height + margin, device=images.device) - (height - 1) / 2
    right, down = draw.shifts[:, :, None, None].unbind(dim=1)
    across, along = x[None, None, :] - right, y[None, :, None] - down
    # u = R(φ)ᵀ·(v − t)/s: the position in the image that pixel v of the result comes from
    cosine = (draw.angles.cos() / draw.scales)[:, None, None]
    sine = (draw.angles.sin() / draw.scales)[:, None, None]
    grid = torch.stack(
        ((cosine * across + sine * along) * (2 / width), (cosine * along - sine * across) * (2 / height)), dim=3
    )
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


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
    needs = "exemplars for replay, three networks, one pass over a target"
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
