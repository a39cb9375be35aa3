"""What methods for continual domain shift share: RandMix copies of confident images, an old model, slow labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ratp.errors import Note
from ratp.functional.class_mix import Estimate, estimate_proportions
from ratp.functional.pseudo_labels import T2PLConfig, t2pl_seconds
from ratp.functional.randmix import RandMix, check_kernels
from ratp.networks.network import Network
from ratp.training.method import Setting, pack, unpack
from ratp.training.phases import NetworkMethod
from ratp.training.recipe import at_once

# On a processor, T2PL of this many images takes long enough to say so.
MANY = 50_000
# Copies of each exemplar on which predictions are calibrated.
CALIBRATING = 4


class SlowWarning(Note):
    """Labelling the images of a domain takes long."""


def announce_if_slow(embedding: Tensor, probabilities: Tensor, config: T2PLConfig) -> None:
    """Warns before T2PL labels so many images on a processor that it takes long; says how long."""
    if embedding.device.type != "cpu" or len(embedding) < MANY:
        return
    seconds = t2pl_seconds(embedding, probabilities, config)
    text = f"T2PL of {len(embedding):,} images takes about {seconds:,.0f} s: it grows with their number squared"
    warnings.warn(f"{text}. --set refresh=0 labels them once a stage", SlowWarning, stacklevel=3)


class DomainShiftMethod(NetworkMethod):
    """A method with RandMix (switch ``randmix``) and an old model.

    Attributes:
        randmix: The augmentation.
        old: The network as the last stage left it; None on the source.
    """

    def __init__(self, setting: Setting, config: Any) -> None:
        check_kernels(config.randmix, setting.image_size)
        super().__init__(setting, config)
        self.old: Network | None = None
        self.randmix = RandMix(config.randmix, self.scaling.mean, self.scaling.std, setting.generator("randmix layers"))
        self.extras = {"randmix": self.randmix}

    def show(self, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Returns three RandMix copies of the images."""
        inputs = self.scaling(images)
        return {f"RandMix {i}": self.scaling.invert(self.randmix(inputs, generator)) for i in (1, 2, 3)}

    def state(self) -> dict[str, Tensor]:
        """Returns network, old network, memory and the fixed layers of RandMix."""
        return super().state() | (pack({"old": self.old.state_dict()}) if self.old is not None else {})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        parts = unpack(state)
        self.old = None
        if "old" in parts:
            self.old = self.network.frozen_copy()
            self.old.load_state_dict(parts["old"])


class ClassMix:
    """Estimates how frequent each class is in a target, from the network's predictions alone.

    They are calibrated on copies of the exemplars: copies look like a domain not seen yet, and have labels.

    Args:
        method: The method; its exemplars are those of earlier domains.
        kind: How to estimate.
        smoothing: How far the estimate moves towards equal proportions.
    """

    def __init__(self, method: DomainShiftMethod, kind: Estimate, smoothing: float) -> None:
        self._method, self._kind, self._smoothing = method, kind, smoothing
        self.generators = () if kind == "uniform" else (method.setting.generator("class mix", method.stage),)

    def __call__(self, probabilities: Tensor) -> Tensor | None:
        """Returns the class proportions of images with these predictions (n, k); None: take equal ones."""
        memory = self._method.memory
        if self._kind == "uniform" or not len(memory):
            return None
        known = self._predict_copies(memory.images)
        logits = probabilities.clamp_min(torch.finfo(torch.float32).tiny).log()
        return estimate_proportions(self._kind, logits, known, memory.labels.repeat(CALIBRATING), self._smoothing)

    @torch.no_grad()
    def _predict_copies(self, images: Tensor) -> Tensor:
        """Returns the logits of several copies of uint8 images, one round after the other."""
        method = self._method
        network, training = method.network, method.network.training
        parts = torch.split(images, method.setting.recipe.batch) * CALIBRATING
        network.eval()
        logits = [network(method.randmix(method.scaling(part), *self.generators)).logits for part in parts]
        network.train(training)
        return torch.cat(logits)


class Inputs(NamedTuple):
    """The input of one step: the images of a batch, followed by copies of them, one round after the other.

    Attributes:
        images: Shape (n, 3, height, width).
        labels: Shape (n,).
        valid: Which rows count, shape (n,); None: all.
        confident: Which images of the batch have copies; None: the step does not choose them.
        rounds: How many copies these have.
    """

    images: Tensor
    labels: Tensor
    valid: Tensor | None = None
    confident: Tensor | None = None
    rounds: int = 1

    def views(self, rows: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Splits an output of the network into that of images and those of their copies; also returns which count."""
        if self.confident is None:
            return list(rows.chunk(1 + self.rounds)), None
        clean, copies = rows[: len(self.confident)], rows[len(self.confident) :]
        clean = clean if self.valid is not None else clean[self.confident]
        return [clean, *torch.split(copies, [len(clean)] * self.rounds)], None if self.valid is None else self.confident


def with_copies(
    images: Tensor,
    labels: Tensor,
    copy: Callable[[Tensor, Tensor | None], Tensor],
    choose: Callable[[], Tensor] | None = None,
    *,
    static: bool = False,
    rounds: int = 1,
) -> Inputs:
    """Adds copies of each image, or of the chosen ones, to a batch; a copy has the label of its image.

    How many images are chosen depends on the data. A *compact* batch holds copies of these only. A *static* one holds
    copies of all, and a mask leaves the others out: more work for the same result, but its shapes never change, so
    CUDA can capture the step.

    Args:
        images: Normalised images, shape (n, 3, height, width).
        labels: Shape (n,).
        copy: Copies images, of these only the rows that its second argument selects; None: all.
        choose: Returns which images get a copy, bool of shape (n,); None: all do.
        static: Whether shapes must not depend on the choice.
        rounds: Copies of each.
    """
    chosen = valid = None
    if choose is not None and static:
        chosen, copies = at_once(images.device, choose, lambda: [copy(images, None) for _ in range(rounds)])
        # Masked rows hold the clean image, so that a NaN in an unwanted copy cannot poison the others.
        copies = [torch.where(chosen[:, None, None, None], part, images) for part in copies]
        valid = torch.cat([torch.ones_like(chosen), *[chosen] * rounds])
    else:
        chosen = None if choose is None else choose()
        copies = [copy(images, chosen) for _ in range(rounds)]
    copied = labels if chosen is None or static else labels[chosen]
    return Inputs(torch.cat([images, *copies]), torch.cat([labels, *[copied] * rounds]), valid, chosen, rounds)
