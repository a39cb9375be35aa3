"""AdaContrast — "Contrastive Test-Time Adaptation", CVPR 2022.

* Source stage: cross-entropy with smoothed labels; bottleneck and classifier learn ten times as fast as the feature
  extractor.
* Target stage: embeddings and predictions of the whole target fill a bank, then one training pass follows. A batch
  has a weak view and two strong ones. Its labels ŷ are the argmax of the mean prediction of the 10 images in the bank
  nearest to the weak view; the logarithm of this mean is the method's prediction. One step lowers CE(strong, ŷ) +
  InfoNCE − H(p̄), where p̄ is the mean prediction of the strong view. InfoNCE contrasts both strong views of an image,
  the second embedded by a momentum network, with a queue of earlier ones that have another label. The new keys enter
  the queue; in the bank, the weak views embedded by the momentum network replace the oldest rows.
* Replay adds the cross-entropy of a memory batch, which has its own forward pass.

BatchNorm's running statistics follow the views of the target. The momentum network and exemplars are normalised by the
batch, and so is the network in evaluation (``eval_bn``). Momentum network and queue persist across targets (``reset``:
start over on each). If a program calls ``observe`` itself, there is no domain to fill the bank from: it starts empty,
the first 1,024 images are labelled as predicted, and the rate is constant.

Deviations from the published code:

* One epoch instead of 15, in batches of the recipe's size (128 in the paper). Dropout is off.
* Evaluation uses the statistics of the batch. The published code uses running ones, which follow the last target and
  would give results far from the paper's comparison.
* Keys and labels of the queue are both read before new ones enter; the published code reads labels afterwards. It also
  labels images while it fills the bank; no loss uses these labels, so they are not computed here.
* Bottleneck and classifier are those of the comparison, without weight normalisation, and so is the memory
  (``replay``). The rate on the source is the recipe's, a tenth of it for the feature extractor.
* The crop of an image enlarged to 256 pixels is a crop of the same part of the image itself.
* The paper has no DTN. Its values are ours: rates, a shorter queue, a weak view that shifts by two pixels, and a strong
  one that crops less and neither mirrors nor turns grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp._core.state import Stateful
from ratp.config import switch
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import ConfigError
from ratp.functional.losses import mean_prediction_entropy
from ratp.functional.norm import by_batch
from ratp.functional.numerics import full_precision
from ratp.functional.optim import SGDConfig, StageSGD, cosine_multiplier, follow_
from ratp.functional.transforms import OBJECTS
from ratp.functional.views import View, ViewConfig
from ratp.methods.shared.online import BatchStatistics, SinglePass, tracking
from ratp.methods.shared.source_free import all_groups
from ratp.networks.network import Network, Output
from ratp.training.method import Setting, Statistics, pack, unpack
from ratp.training.phase import Phase
from ratp.training.phases import SupervisedPhase, embed_all


def neighbour_mean(queries: Tensor, points: Tensor, probabilities: Tensor, neighbours: int) -> Tensor:
    """Averages the predictions (m, classes) of the points (m, dim) nearest to each query (n, dim) by cosine.

    All vectors have unit length; the result has shape (n, classes).
    """
    with full_precision(queries.device):
        nearest = (queries @ points.T).topk(min(neighbours, len(points)), dim=1).indices
    # p̂ = (1/k)·Σ p_j over the k nearest j
    return probabilities[nearest].mean(dim=1)


def contrast_logits(
    queries: Tensor, keys: Tensor, labels: Tensor, others: Tensor, other_labels: Tensor, temperature: float
) -> Tensor:
    """Computes similarities of queries with their own keys (first column) and those of other images, over τ.

    Queries and keys (n, dim) are views of the same images. Other keys (m, dim) with the same label get −∞.
    """
    own = (queries * keys).sum(dim=1, keepdim=True)
    same = labels[:, None] == other_labels[None]
    return torch.cat([own, (queries @ others.T).masked_fill(same, -torch.inf)], dim=1) / temperature


def contrast_loss(logits: Tensor) -> Tensor:
    """Computes −log(e^{s⁺} / (e^{s⁺} + Σ e^{s⁻})), averaged over rows; a row without negatives counts 0."""
    return -F.log_softmax(logits, dim=1)[:, 0].mean()


class Ring(Stateful):
    """A ring buffer of columns with equally many rows."""

    saved = "columns filled pointer"

    def __init__(self, *columns: Tensor, filled: int | None = None, pointer: int = 0) -> None:
        self.columns = columns  # tensors of shape (capacity, …), written in place
        self.filled = len(columns[0]) if filled is None else filled  # number of rows in use
        self.pointer = pointer  # the next row to write

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Returns the rows in use of every column."""
        return tuple(column[: self.filled] for column in self.columns)

    @torch.no_grad()
    def put(self, *rows: Tensor) -> None:
        """Writes a batch over the oldest rows; of a batch larger than the buffer, its last rows."""
        capacity, count = len(self.columns[0]), len(rows[0])
        skipped = max(count - capacity, 0)
        places = (torch.arange(skipped, count, device=rows[0].device) + self.pointer) % max(capacity, 1)
        for column, new in zip(self.columns, rows, strict=True):
            column[places] = new[skipped:].to(column.dtype)
        self.pointer = (self.pointer + count) % max(capacity, 1)
        self.filled = min(self.filled + count, capacity)


# Without ``first_look``, neighbours label images only after this many.
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
# Area of a crop of 224 from 256 pixels.
PART = (224 / 256) ** 2


@dataclass(frozen=True)
class AdaContrastConfig:
    """Switches of AdaContrast."""

    sgd: SGDConfig = switch(
        SGDConfig(0.9, 1e-4, "inverse", nesterov=True), "optimiser; the schedule applies to the source only"
    )
    smoothing: float = switch(0.1, "ε of label smoothing on the source", minimum=0, below=1)
    backbone_rate: float = switch(0.1, "factor on the rate of the feature extractor", minimum=0)
    rate: float = switch(2e-2, "initial rate on targets", minimum=0, below=3.4e38)
    decay: Literal["cosine", "constant"] = switch("cosine", "rate over the pass: down to 0, or constant")
    neighbours: int = switch(10, "nearest images of the bank that vote on a label", minimum=1)
    bank: int = switch(16384, "images in the bank, at most", minimum=1)
    queue: int = switch(4096, "keys in the queue", minimum=1)
    momentum: float = switch(0.999, "share of the momentum network kept per step", minimum=0, maximum=1)
    temperature: float = switch(0.07, "τ of the contrast", above=0)
    label_weight: float = switch(1.0, "weight of the cross-entropy with labels", minimum=0)
    contrast_weight: float = switch(1.0, "weight of the contrast", minimum=0)
    diversity_weight: float = switch(1.0, "weight of the entropy of the mean prediction", minimum=0)
    weak: ViewConfig = switch(WEAK, "view that labels come from")
    strong: ViewConfig = switch(STRONG, "views that the losses see")
    first_look: bool = switch(True, "fill the bank from the target before the pass; off: during it")
    reset: bool = switch(False, "start every target with a new momentum network and queue")
    replay: Literal["separate", "none"] = switch("separate", "a memory batch with each batch, or no replay")
    eval_bn: Statistics = switch("batch", "BatchNorm statistics in evaluations after adaptation: batch or running")


class AdaContrast(BatchStatistics):
    """Learns from labels that neighbours agree on, and contrasts images of different labels."""

    name = "adacon"
    title = "AdaContrast: contrastive test-time adaptation"
    family = "test-time adaptation"
    paper = "Chen et al., Contrastive Test-Time Adaptation, CVPR 2022"
    needs = "batch statistics, exemplars for replay, two networks, two passes over a target, square images"
    config_type = AdaContrastConfig
    saved = "bank _optimiser _changes _steps _made _shown _looked"
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
            raise ConfigError(f"adacon needs square images, got {height}×{width}: crop or resize them.")
        self._weak, self._strong = View(config.weak, height), View(config.strong, height)
        super().__init__(setting, config)
        self.slow: Network | None = None  # the momentum network; None before the first target
        self.queue: Ring | None = None  # keys and labels to contrast with; None before the first target
        self.bank = self._empty_bank(0)  # embeddings of unit length and predictions of images of the current target

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase of cross-entropy with smoothed labels."""
        config, network = self.config, self.network
        how: dict[str, Any] = {"smoothing": config.smoothing, "groups": all_groups(network, config.backbone_rate)}
        return [SupervisedPhase(self.setting, network, domain, config.sgd, finish=self.finish_source, **how)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns one phase, which fills the bank from the whole target and then passes over it in random order."""
        self._begin()
        return [_LookAndPass(self, domain)]

    def begin_stage(self) -> None:
        """Creates optimiser, bank and replay; on the first target, momentum network and queue too."""
        super().begin_stage()
        config, setting = self.config, self.setting
        if self.slow is None or self.queue is None or config.reset:
            self.slow, self.queue = self.network.frozen_copy(), self._noise()
        self.bank = self._empty_bank(config.bank)
        groups, sgd = all_groups(self.network, config.backbone_rate), replace(config.sgd, schedule="constant")
        self._optimiser = StageSGD(groups, config.rate, 1, sgd)
        self._changes = setting.generator("views", self.stage)
        self._steps: int | None = None
        self._made = self._shown = 0
        self._looked = False

    def look_at(self, images: Tensor, steps: int) -> None:
        """Schedules the rate over a pass of ``steps`` batches, and fills the bank if ``first_look`` is on."""
        if self.config.decay == "cosine":
            self._steps = steps
        if self.config.first_look:
            order = torch.randperm(len(images), generator=self.setting.randomness.generator("bank", self.stage))
            chosen = order[: self.config.bank].to(images.device)
            embedding, probabilities = embed_all(self.network, self.setting, images[chosen])
            self.bank = Ring(F.normalize(embedding, dim=1), probabilities)
            self._looked = True

    def learn(self, inputs: Tensor) -> Tensor:
        """Returns the log of the neighbours' mean prediction for a batch, then takes one step."""
        assert self.slow is not None and self.queue is not None
        config, images = self.config, self.scaling.invert(inputs)
        weak, query, key = (
            self.scaling.unit(view(images, self._changes)) for view in (self._weak, self._strong, self._strong)
        )
        with torch.no_grad(), tracking(self.network):
            refined = self._refine(self.network(weak))
        labels = refined.argmax(dim=1)
        follow_(self.slow.parameters(), self.network.parameters(), config.momentum)
        keys = F.normalize(self._seen_slowly(key).embedding, dim=1)
        with tracking(self.network):
            output = self.network(query)
        queries, (others, other_labels) = F.normalize(output.embedding, dim=1), self.queue.rows
        contrast = contrast_logits(queries, keys, labels, others, other_labels, config.temperature)
        loss = (
            config.label_weight * F.cross_entropy(output.logits, labels)
            + config.contrast_weight * contrast_loss(contrast)
            - config.diversity_weight * mean_prediction_entropy(output.logits)
        )
        loss = self.with_replay(loss, self.network)
        if self._steps is not None:
            self._optimiser.set_rate(config.rate * cosine_multiplier(self._made, self._steps))
        self._optimiser.minimise(loss)
        self.queue.put(keys, labels)
        slow = self._seen_slowly(weak)
        self.bank.put(F.normalize(slow.embedding, dim=1), slow.logits.softmax(dim=1))
        self._made, self._shown = self._made + 1, self._shown + len(inputs)
        return refined.clamp_min(SMALLEST_PROBABILITY).log()

    def _refine(self, output: Output) -> Tensor:
        """Returns the neighbours' mean predictions, or the network's own while the bank is too small."""
        if not self._looked and self._shown < UNASKED:
            return output.logits.softmax(dim=1)
        points, predictions = self.bank.rows
        return neighbour_mean(F.normalize(output.embedding, dim=1), points, predictions, self.config.neighbours)

    @torch.no_grad()
    def _seen_slowly(self, inputs: Tensor) -> Output:
        """Applies the momentum network, normalising by the batch."""
        assert self.slow is not None
        with by_batch(self.slow):
            return self.slow(inputs)

    def _noise(self) -> Ring:
        """Returns a queue of random directions with random labels."""
        generator, size = self.setting.generator("queue", self.stage), self.config.queue
        where = generator.device
        keys = torch.randn(size, self.setting.recipe.network.dim, generator=generator, device=where)
        labels = torch.randint(len(self.setting.classes), (size,), generator=generator, device=where)
        return Ring(F.normalize(keys, dim=1), labels)

    def _empty_bank(self, size: int) -> Ring:
        """Returns an empty bank with room for ``size`` images."""
        widths, device = (self.setting.recipe.network.dim, len(self.setting.classes)), self.setting.device
        return Ring(*(torch.zeros(size, width, device=device) for width in widths), filled=0)

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory, momentum network and queue."""
        if self.slow is None or self.queue is None:
            return super().state()
        keys, labels = self.queue.columns
        queue = {"keys": keys, "labels": labels, "pointer": torch.tensor(self.queue.pointer)}
        return super().state() | pack({"slow": self.slow.state_dict(), "queue": queue})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        parts, device = unpack(state), self.setting.device
        self.slow = self.queue = None
        if "slow" in parts:
            self.slow, queue = self.network.frozen_copy(), parts["queue"]
            self.slow.load_state_dict(parts["slow"])
            columns = (queue[name].to(device, copy=True) for name in ("keys", "labels"))
            self.queue = Ring(*columns, pointer=int(queue["pointer"]))


class _LookAndPass(SinglePass):
    """One pass over a domain, after the method has seen all of it."""

    def __init__(self, method: AdaContrast, domain: UnlabelledDomain) -> None:
        super().__init__(method, method.setting, domain, method.stage, method.finish_target)
        self._look = method.look_at

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Shows the whole domain to the method."""
        self._look(self._images, self.steps)
        return super().begin_epoch(epoch)
