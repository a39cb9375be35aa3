"""EFDM — "Exact Feature Distribution Matching for Arbitrary Style Transfer and Domain Generalization", CVPR 2022.

The style of an image is the distribution of values in its feature maps. Matching (section 3) gives a content image the
values of a style image, channel by channel and rank by rank: the smallest where the content has its smallest, and so
on. Mixing goes only part of the way, by a random weight λ that is mostly close to 0 or 1:

    out = x + (1 − λ)·(style values at the ranks of x − sg(x)),   λ ~ Beta(α, α) per image

where sg stops the gradient. Half the batches are mixed, after some blocks of the feature extractor, each block on its
own. Predictions are not affected.

* Source stage: cross-entropy; styles come from other images of the batch.
* Target stage: a batch has as many exemplars as target images, and each exemplar gives its style to one of them.
  Cross-entropy of the target images with SHOT's labels, updated every epoch, and of the unmixed exemplars with their
  stored ones. Without a memory, styles come from the batch.

Deviations: the recipe's SGD and schedule instead of a cosine over 50 epochs; DTN, which the paper lacks, is mixed after
its first two blocks. Equal values, such as the zeros of a ReLU, keep their order when ranked; the published code leaves
it undefined. On Digits it falls to chance, or close to it, on every target after its own stage, as in RaTP's table: its
labels drift away from the classes (``docs/explanation/benchmarks.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.config import switch
from ratp.functional.numerics import beta_numbers
from ratp.functional.optim import SGDConfig
from ratp.methods.shared.insertion import insert_after
from ratp.methods.shared.pseudo_labels import PseudoLabelMethod, PseudoLabelPhase
from ratp.training.finite import log_draw
from ratp.training.method import Setting
from ratp.training.phase import Phase

Styles = Literal["batch", "second half"]


def exact_mixing(content: Tensor, style: Tensor, weight: Tensor) -> Tensor:
    """Moves the value distribution of ``content`` (n, channels, …) towards that of ``style``; λ (n,) keeps content.

    Equal content values are ranked in their order.
    """
    order = content.flatten(2).argsort(dim=2, stable=True)
    # Position order[i] gets the style's i-th smallest value.
    matched = torch.zeros_like(style.flatten(2)).scatter(2, order, style.flatten(2).sort(dim=2).values)
    rest = (1 - weight).to(content.dtype).reshape(-1, *(1,) * (content.ndim - 1))
    return content + rest * (matched.reshape(content.shape) - content.detach())


class ExactMixing(nn.Module):
    """Mixes feature maps with those of other images in a share of the training batches; has no parameters.

    In unmixed batches λ is 1, so every step has the same shapes. Styles come from random images of the batch, or from
    its second half, one to one, which itself stays unmixed.
    """

    def __init__(self, probability: float, alpha: float) -> None:
        """Creates a layer; ``alpha`` is α of the distribution of λ."""
        super().__init__()
        self.probability, self.alpha = probability, alpha
        self.generator: torch.Generator | None = None
        self.styles: Styles = "batch"

    def forward(self, x: Tensor) -> Tensor:
        """Mixes feature maps while training."""
        if not self.training:
            return x
        if self.styles == "batch":
            other = torch.rand(len(x), generator=self.generator, device=x.device).argsort()
            return exact_mixing(x, x[other], self._weights(len(x), x.device))
        content, style = x.chunk(2)
        return torch.cat([exact_mixing(content, style, self._weights(len(content), x.device)), style])

    def _weights(self, count: int, device: torch.device) -> Tensor:
        weights = beta_numbers(self.alpha, self.alpha, count, self.generator, device)
        mixes = torch.rand(1, generator=self.generator, device=device) < self.probability
        return torch.where(mixes, weights, 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactMixing:
        """Copies all but the generator: modules that share one would shift each other's draws."""
        copy = ExactMixing(self.probability, self.alpha).train(self.training)
        copy.styles = self.styles
        return copy


@dataclass(frozen=True)
class EFDMConfig:
    """Switches of EFDM."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser")
    blocks: tuple[int, ...] = switch((1, 2), "blocks of the feature extractor that it follows, from 1", minimum=1)
    probability: float = switch(0.5, "share of batches that are mixed, for each block", minimum=0, maximum=1)
    alpha: float = switch(0.1, "α of the mixing weight's distribution Beta(α, α)", above=0, below=2)
    refresh: int = switch(1, "epochs between updates of pseudo-labels", minimum=1)
    memory_weight: float = switch(1.0, "weight of the exemplars' own cross-entropy", minimum=0)


class EFDM(PseudoLabelMethod):
    """Trains on feature maps of mixed styles, with SHOT's labels on targets."""

    name = "efdm"
    title = "EFDM: exact feature distribution mixing"
    family = "multiple domain generalisation"
    paper = (
        "Zhang et al., Exact Feature Distribution Matching for Arbitrary Style Transfer and Domain Generalization, "
        "CVPR 2022"
    )
    needs = "its own source training, exemplars, many passes over a target"
    config_type = EFDMConfig
    large: ClassVar[Mapping[str, Any]] = {"blocks": (1, 2, 3)}
    config: EFDMConfig

    def __init__(self, setting: Setting, config: EFDMConfig) -> None:
        super().__init__(setting, config)
        made = insert_after(
            self.network, config.blocks, "efdm", lambda _: ExactMixing(config.probability, config.alpha)
        )
        self.layers = list(made.values())

    def phases(self, images: Tensor, labels: Tensor | None) -> Sequence[Phase]:
        """Returns one phase; styles come from the batch or, on targets, from the memory."""
        return [EFDMPhase(self, images, labels)]


class EFDMPhase(PseudoLabelPhase):
    """Trains EFDM on one domain."""

    def __init__(self, method: EFDM, images: Tensor, labels: Tensor | None) -> None:
        setting, config = method.setting, method.config
        super().__init__(method, images, labels)
        self._weight = config.memory_weight
        self._inputs = setting.training_inputs("target" if self.is_target else "source")
        self._exemplars, mixing = (setting.generator(name, method.stage) for name in ("styles", "mixing"))
        self._replays = self.is_target and len(self.memory) > 0
        styles: Styles = "second half" if self._replays else "batch"
        for layer in method.layers:
            layer.generator, layer.styles = mixing, styles
        self.generators = (*self.generators, self._exemplars, mixing)

    def step(self) -> dict[str, Tensor]:
        """Updates the network once on a batch; on a target, with as many exemplars."""
        batch = self.batches.draw(self.batch)
        self.network.train()
        if self._replays:
            images, labels = self._draw_exemplars()
            logits, of_exemplars = self.network(torch.cat([batch.images, images])).logits.chunk(2)
            terms = {
                "ce": F.cross_entropy(logits, batch.labels),
                "replay": self._weight * F.cross_entropy(of_exemplars, labels),
            }
        else:
            terms = {"ce": F.cross_entropy(self.network(batch.images).logits, batch.labels)}
        return self.minimise(terms)

    def _draw_exemplars(self) -> tuple[Tensor, Tensor]:
        """Draws images and labels with replacement, because there may be fewer than a batch."""
        memory, generator = self.memory, self._exemplars
        index = torch.randint(len(memory), (self.batch,), generator=generator, device=memory.images.device)
        log_draw(index, 0)
        return self._inputs(memory.images[index], generator), memory.labels[index]
