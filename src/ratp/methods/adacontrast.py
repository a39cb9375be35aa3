"""AdaContrast — "Contrastive Test-Time Adaptation", CVPR 2022.

* Source stage: cross-entropy with smoothed labels; bottleneck and classifier learn ten times as fast as the feature
  extractor.
* Target stage: first one look at the target: embeddings and predictions fill a bank. Then one pass. A batch has a weak
  view and two strong ones. Its labels ŷ are those of the mean prediction of the 10 images of the bank nearest to its
  weak view. One step lowers CE(strong, ŷ) + InfoNCE − H(p̄), where p̄ is the mean prediction of the strong view and
  InfoNCE contrasts both strong views of an image, the second as a momentum network sees it, with a queue of earlier
  ones but those labelled like it. The queue takes the new ones; the bank takes the weak views as the momentum network
  sees them, in place of its oldest. The answer to a batch is the logarithm of the mean prediction its labels are from.
* With replay, the cross-entropy of a batch from the memory is added, in a forward pass of its own.

BatchNorm learns: its running statistics follow the views of the target. The momentum network and exemplars are
normalised by the batch, and so is the network when it is measured (``eval_bn``). The momentum network and the queue go
on from target to target, as the network does (``reset``: begin again on each). Images shown by hand belong to no domain
to look at: the bank then begins empty, the first 1,024 images are labelled as predicted, and the rate is constant.

Departures from the published code: one epoch (15 there); the statistics of the batch when it is measured (there
running ones, which follow the last target: so measured it would be far from the paper's comparison); dropout is off;
keys and labels of the queue are both read before it takes new ones (there labels are read after); the labels made by
the first look, which no loss uses, are not computed; the bottleneck and classifier are the comparison's, without
weight normalisation; the rate on the source is the recipe's, its tenth for the feature extractor. The crop of an image
enlarged to 256 pixels is one of the image itself, of the same part of it. Values for DTN are not the paper's, which
has no such network: rates, a shorter queue, a weak view that moves by two pixels, and a strong one that crops less and
neither mirrors nor turns grey. The memory is the comparison's. Batches are the recipe's (128 in the paper).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import ConfigError
from ratp.method import Setting, Statistics, pack, unpack
from ratp.network import Network, Output
from ratp.online import BatchStatistics
from ratp.parts.adacontrast import contrast_logits, contrast_loss, neighbour_mean
from ratp.parts.batch_norm import batch_norms, by_batch
from ratp.parts.cosine import CosineSGD
from ratp.parts.information import mean_prediction_entropy
from ratp.parts.moving_average import follow_
from ratp.parts.ring import Ring
from ratp.parts.sgd import Group, SGDConfig
from ratp.parts.transforms import OBJECTS
from ratp.parts.views import View, ViewConfig
from ratp.phase import Phase
from ratp.replay import Exemplars
from ratp.source_free import extractor_groups
from ratp.training import SinglePass, SupervisedPhase, look

# Images to see before neighbours are asked, where there was no look at the domain.
UNASKED = 1024
SMALLEST_PROBABILITY = torch.finfo(torch.float32).tiny

WEAK = ViewConfig(shift=2)
STRONG = ViewConfig(
    replace(
        OBJECTS, crop_scale_min=0.6, flip=0.0, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, greyscale=0.0
    ),
    jitter=0.8,
    blur=0.5,
)
# 224 of 256 pixels a side.
PART = (224 / 256) ** 2


@dataclass(frozen=True)
class AdaContrastConfig:
    """Switches of AdaContrast."""

    sgd: SGDConfig = switch(SGDConfig(0.9, 1e-4, "inverse", nesterov=True), "optimiser; its schedule on the source")
    smoothing: float = switch(0.1, "ε of label smoothing on the source", minimum=0, below=1)
    backbone_rate: float = switch(0.1, "factor on the rate of the feature extractor", minimum=0)
    rate: float = switch(2e-2, "initial rate on targets", minimum=0, below=3.4e38)
    decay: Literal["cosine", "constant"] = switch("cosine", "rate over the pass: down to 0, or constant")
    neighbours: int = switch(10, "images of the bank that make a label", minimum=1)
    bank: int = switch(16384, "images in the bank, at most", minimum=1)
    queue: int = switch(4096, "keys in the queue", minimum=1)
    momentum: float = switch(0.999, "share of the momentum network that stays in a step", minimum=0, maximum=1)
    temperature: float = switch(0.07, "τ of the contrast", above=0)
    label_weight: float = switch(1.0, "weight of the cross-entropy with labels", minimum=0)
    contrast_weight: float = switch(1.0, "weight of the contrast", minimum=0)
    diversity_weight: float = switch(1.0, "weight of the entropy of the mean prediction", minimum=0)
    weak: ViewConfig = switch(WEAK, "the view labels are made from")
    strong: ViewConfig = switch(STRONG, "the views that are learnt from")
    first_look: bool = switch(True, "fill the bank from the target before the pass; off: as it goes")
    reset: bool = switch(False, "begin every target with a new momentum network and queue")
    replay: Literal["separate", "none"] = switch("separate", "a memory batch beside each batch, or no replay")
    eval_bn: Statistics = switch("batch", "BatchNorm when measured after adaptation: of the images at hand, or running")


class AdaContrast(BatchStatistics):
    """Learns labels its neighbours agree on, and to tell images of different labels apart.

    Attributes:
        slow: The momentum network; None before the first target.
        queue: Keys and labels to contrast with; None before the first target.
        bank: Embeddings of unit length and predictions of images of the current target.
    """

    name = "adacon"
    title = "AdaContrast: contrastive test-time adaptation"
    family = "test-time adaptation"
    paper = "Chen et al., Contrastive Test-Time Adaptation, CVPR 2022"
    needs = "exemplars for replay, two networks, one look and one pass over a target"
    config_type = AdaContrastConfig
    large: ClassVar[Mapping[str, Any]] = {
        "rate": 2e-3,
        "queue": 16384,
        "weak.shift": 0,
        "weak.transform.crop": True,
        "weak.transform.crop_scale_min": PART,
        "weak.transform.crop_scale_max": PART,
        "weak.transform.crop_ratio_min": 1.0,
        "weak.transform.crop_ratio_max": 1.0,
        "weak.transform.flip": 0.5,
        "strong.transform.crop_scale_min": 0.2,
        "strong.transform.flip": 0.5,
        "strong.transform.greyscale": 0.2,
    }
    # The demo's rate is for SGD without momentum; momentum 0.9 makes a step ten times as long.
    stream_values: ClassVar[Mapping[tuple[str, str], Mapping[str, Any]]] = {("demo", "official"): {"lr": 0.01}}

    def __init__(self, setting: Setting, config: AdaContrastConfig) -> None:
        height, width = setting.image_size
        if height != width:
            raise ConfigError(f"adacon makes square views; images of {height}×{width} must be made square first.")
        self._weak, self._strong = View(config.weak, height), View(config.strong, height)
        super().__init__(setting, config)
        self.slow: Network | None = None
        self.queue: Ring | None = None
        self.bank = self._empty_bank(0)

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase of cross-entropy with smoothed labels."""
        config = self.config
        return [
            SupervisedPhase(
                self.setting,
                self.network,
                domain,
                config.sgd,
                smoothing=config.smoothing,
                groups=self._groups(),
                finish=self.finish_source,
            )
        ]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """A look at the target, then one pass in random order."""
        self._begin()
        return [_LookAndPass(self, domain)]

    def begin_stage(self) -> None:
        """A new optimiser, an empty bank, the memory as it is now; on the first target, momentum network and queue."""
        config, setting = self.config, self.setting
        if self.slow is None or self.queue is None or config.reset:
            self.slow, self.queue = self.network.frozen_copy(), self._noise()
        self.bank = self._empty_bank(config.bank)
        self._optimiser = CosineSGD(self._groups(), config.rate, config.sgd)
        self._exemplars = Exemplars(setting, self.stage, self.memory if self.keeps_exemplars else None)
        self._changes = setting.generator("views", self.stage)
        self._steps: int | None = None
        self._made = self._shown = 0
        self._looked = False

    def look_at(self, images: Tensor, steps: int) -> None:
        """Gets ready for a pass: the rate falls over its steps, and the bank is filled if the switches say so.

        Args:
            images: All training images of the target, uint8.
            steps: Batches of the pass.
        """
        if self.config.decay == "cosine":
            self._steps = steps
        if self.config.first_look:
            order = torch.randperm(len(images), generator=self.setting.randomness.generator("bank", self.stage))
            embedding, probabilities = look(
                self.network, self.setting, images[order[: self.config.bank].to(images.device)]
            )
            self.bank = Ring(F.normalize(embedding, dim=1), probabilities)
            self._looked = True

    def learn(self, inputs: Tensor) -> Tensor:
        """Logarithms of the mean prediction of a batch's neighbours, before one step."""
        assert self.slow is not None and self.queue is not None
        config, images = self.config, self.scaling.invert(inputs)
        weak, query, key = (
            self.scaling.unit(view(images, self._changes)) for view in (self._weak, self._strong, self._strong)
        )
        with torch.no_grad(), _tracking(self.network):
            refined = self._refine(self.network(weak))
        labels = refined.argmax(dim=1)
        follow_(self.slow.parameters(), self.network.parameters(), config.momentum)
        keys = F.normalize(self._seen_slowly(key).embedding, dim=1)
        with _tracking(self.network):
            output = self.network(query)
        queries, (others, other_labels) = F.normalize(output.embedding, dim=1), self.queue.rows
        contrast = contrast_logits(queries, keys, labels, others, other_labels, config.temperature)
        loss = (
            config.label_weight * F.cross_entropy(output.logits, labels)
            + config.contrast_weight * contrast_loss(contrast)
            - config.diversity_weight * mean_prediction_entropy(output.logits)
        )
        exemplars = self._exemplars.draw()
        if exemplars is not None:
            with by_batch(self.network):
                loss = loss + F.cross_entropy(self.network(exemplars.images).logits, exemplars.labels)
        if self._steps is not None:
            self._optimiser.begin_step(self._made, self._steps)
        self._optimiser.minimise(loss)
        self.queue.put(keys, labels)
        slow = self._seen_slowly(weak)
        self.bank.put(F.normalize(slow.embedding, dim=1), slow.logits.softmax(dim=1))
        self._made, self._shown = self._made + 1, self._shown + len(inputs)
        return refined.clamp_min(SMALLEST_PROBABILITY).log()

    def _refine(self, output: Output) -> Tensor:
        """Mean predictions of the neighbours, or the network's own as long as these are too few."""
        if not self._looked and self._shown < UNASKED:
            return output.logits.softmax(dim=1)
        points, predictions = self.bank.rows
        return neighbour_mean(F.normalize(output.embedding, dim=1), points, predictions, self.config.neighbours)

    @torch.no_grad()
    def _seen_slowly(self, inputs: Tensor) -> Output:
        """What the momentum network makes of images, by their own statistics."""
        assert self.slow is not None
        with by_batch(self.slow):
            return self.slow(inputs)

    def _groups(self) -> list[Group]:
        """All parameters, each with the factor on its rate."""
        head = self.network.classifier.parameters(), 1.0
        return [*extractor_groups(self.network, self.config.backbone_rate), head]

    def _noise(self) -> Ring:
        """A queue of random directions with random labels."""
        generator, size = self.setting.generator("queue", self.stage), self.config.queue
        where = generator.device
        keys = torch.randn(size, self.setting.recipe.network.dim, generator=generator, device=where)
        labels = torch.randint(len(self.setting.classes), (size,), generator=generator, device=where)
        return Ring(F.normalize(keys, dim=1), labels)

    def _empty_bank(self, size: int) -> Ring:
        """A bank with room for ``size`` images."""
        widths, device = (self.setting.recipe.network.dim, len(self.setting.classes)), self.setting.device
        return Ring(*(torch.zeros(size, width, device=device) for width in widths), filled=0)

    def state(self) -> dict[str, Tensor]:
        """Network, memory, momentum network and queue."""
        if self.slow is None or self.queue is None:
            return super().state()
        keys, labels = self.queue.columns
        queue = {"keys": keys, "labels": labels, "pointer": torch.tensor(self.queue.pointer)}
        return super().state() | pack({"slow": self.slow.state_dict(), "queue": queue})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        parts, device = unpack(state), self.setting.device
        self.slow = self.queue = None
        if "slow" in parts:
            self.slow, queue = self.network.frozen_copy(), parts["queue"]
            self.slow.load_state_dict(parts["slow"])
            columns = (queue[name].to(device, copy=True) for name in ("keys", "labels"))
            self.queue = Ring(*columns, pointer=int(queue["pointer"]))


class _LookAndPass(SinglePass):
    """One pass that begins with a look at the whole domain."""

    def __init__(self, method: AdaContrast, domain: UnlabelledDomain) -> None:
        super().__init__(method, method.setting, domain, method.stage, method.finish_target)
        self._look = method.look_at

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Looks at the domain."""
        self._look(self._images, self.steps)
        return super().begin_epoch(epoch)


@contextmanager
def _tracking(network: Network) -> Iterator[None]:
    """Within the block, BatchNorm normalises by the batch and its running statistics follow; dropout stays off."""
    layers = batch_norms(network).values()
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer in layers:
            layer.eval()
