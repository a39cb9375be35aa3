"""The exemplar memory: a few images of every domain seen, how they are chosen, and batches that replay them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ratp._core.state import Stateful
from ratp.data.streamed import StreamedImages
from ratp.functional.class_mix import allocate
from ratp.functional.numerics import drawn, full_precision, in_chunks, ranks_within
from ratp.training.feed import Feed
from ratp.training.finite import log_draw
from ratp.training.method import Setting

Selection = Literal["herding", "nearest"]

# From this many images on, herding compares a shortlist only.
MANY = 1024
SHORTLIST = 32
# Numbers per chunk of features.
ROOM = 2**24


def choose_exemplars(features: Tensor, count: int, selection: Selection) -> Tensor:
    """Returns positions of at most ``count`` exemplars, most representative first, each once."""
    features = features.float()
    count = min(count, len(features))
    mean = features.mean(dim=0)
    if selection == "nearest":
        return _distances(features, mean).argsort(stable=True)[:count]
    if len(features) >= MANY:
        with full_precision(features.device):
            picks, sure = _herd_by_shortlist(features, mean, count)
        if bool(sure):
            return picks
    return _herd(features, mean, count)


def _herd(features: Tensor, mean: Tensor, count: int) -> Tensor:
    """Compares all images for each pick."""
    taken = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    total = torch.zeros_like(mean)
    picks = torch.zeros(count, dtype=torch.int64, device=features.device)
    for step in range(1, count + 1):
        # argmin_i ‖ μ − (Σ_taken f + f_i)/step ‖
        pick = _distances(features, mean, total, step).masked_fill(taken, torch.inf).argmin(dim=0, keepdim=True)
        taken.index_fill_(0, pick, True)
        total = total + features[pick][0]
        picks[step - 1 : step] = pick
    return picks


def _herd_by_shortlist(features: Tensor, mean: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the picks of :func:`_herd`, at one matrix-vector product each, and whether they are certainly the same.

    With v = step·μ − Σ_taken f, distances are ordered as ‖f_i‖² − 2 v·f_i. The best by this are compared exactly, as
    rounding may have changed their order; images that no rounding could have made best are not.
    """
    taken = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    total = torch.zeros_like(mean)
    picks = torch.zeros(count, dtype=torch.int64, device=features.device)
    sure = torch.ones((), dtype=torch.bool, device=features.device)
    norms = torch.linalg.vector_norm(features, dim=1)
    squares, longest = norms.square(), norms.amax()
    for step in range(1, count + 1):
        v = step * mean - total
        score = torch.addmv(squares, features, v, alpha=-2).masked_fill_(taken, torch.inf)
        best = score.topk(SHORTLIST + 1, largest=False)
        # Both scores err by less than (d + 16·step + 8)·ε·(‖v‖ + max ‖f‖)², so they differ by at most twice that.
        error = torch.finfo(features.dtype).eps * (features.shape[1] + 16 * step + 8) * (v.norm() + longest).square()
        sure &= best.values[-1] > best.values[0] + 2 * error
        shortlist = best.indices[:SHORTLIST].sort().values
        distance = _distances(features[shortlist], mean, total, step).masked_fill(taken[shortlist], torch.inf)
        pick = shortlist[distance.argmin(dim=0, keepdim=True)]
        taken.index_fill_(0, pick, True)
        total = total + features[pick][0]
        picks[step - 1 : step] = pick
    return picks, sure


def _distances(features: Tensor, mean: Tensor, total: Tensor | None = None, step: int = 1) -> Tensor:
    """Squared distances of the class mean from every image, or from the mean of those taken and that image."""

    def of(rows: slice) -> tuple[Tensor]:
        if total is None:
            return ((features[rows] - mean).square().sum(dim=1),)
        return ((mean - (total + features[rows]) / step).square().sum(dim=1),)

    return in_chunks(of, len(features), max(ROOM // max(features.shape[1], 1), 1))[0]


class Memory:
    """At most ``capacity`` images over all domains, shared equally among domains and classes.

    After ``t`` domains each keeps ⌊capacity / (classes · t)⌋ images per class; earlier domains are cut back to their
    first, most representative ones.

    Attributes:
        images: uint8, shape (m, 3, height, width).
        labels: Class of each image as known when it was stored, shape (m,).
        domains: Index of the domain each image came from, shape (m,).
        seen: Number of domains added so far.
    """

    def __init__(self, capacity: int, classes: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.classes = classes
        self.images = torch.zeros(0, 3, 1, 1, dtype=torch.uint8, device=device)
        self.labels = torch.zeros(0, dtype=torch.int64, device=device)
        self.domains = torch.zeros(0, dtype=torch.int64, device=device)
        self.seen = 0

    def __len__(self) -> int:
        return len(self.images)

    def quota(self, domains: int) -> int:
        """Returns images per class and domain when ``domains`` domains share the memory."""
        return self.capacity // (self.classes * domains)

    def add(
        self, images: Tensor, labels: Tensor, features: Tensor, selection: Selection, mix: Tensor | None = None
    ) -> None:
        """Adds the exemplars of one more domain.

        Args:
            images: All images of the domain, uint8.
            labels: Their labels or pseudo-labels.
            features: Features that the choice is based on, shape (n, d).
            selection: How they are chosen.
            mix: Class proportions of the domain, shape (classes,), by which its share is divided among classes; each
                earlier domain then keeps its own proportions. None: the share is divided equally.
        """
        groups = self.domains * self.classes + self.labels
        quotas = [self.quota(self.seen + 1)] * self.classes
        limits = torch.tensor(quotas * self.seen, dtype=torch.int64, device=self.labels.device)
        if mix is not None:
            share = self.capacity // (self.seen + 1)
            quotas = allocate(share, mix)
            stored = groups.bincount(minlength=len(limits)).reshape(self.seen, self.classes)
            kept_of = [number for counts in stored for number in allocate(share, counts)]
            limits = torch.tensor(kept_of, dtype=torch.int64, device=self.labels.device)
        by_class = labels.argsort(stable=True).split_with_sizes(labels.bincount(minlength=self.classes).tolist())
        chosen = [
            own[choose_exemplars(features[own], quota, selection)]
            for own, quota in zip(by_class, quotas, strict=True)
            if len(own)
        ]
        picks = torch.cat(chosen)
        # The first, most representative images of every stored domain and class stay.
        kept = (ranks_within(groups) < limits[groups]).nonzero().squeeze(1)
        new = images[picks]
        self.images = torch.cat([self.images[kept], new]) if len(kept) else new
        self.labels = torch.cat([self.labels[kept], labels[picks]])
        self.domains = torch.cat([self.domains[kept], torch.full_like(picks, self.seen)])
        self.seen += 1

    def state(self) -> dict[str, Tensor]:
        """Returns everything stored, as tensors."""
        return {"images": self.images, "labels": self.labels, "domains": self.domains, "seen": torch.tensor(self.seen)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        device = self.labels.device
        self.images = state["images"].to(device)
        self.labels = state["labels"].to(device)
        self.domains = state["domains"].to(device)
        self.seen = int(state["seen"])


class Batch(NamedTuple):
    """A batch of images.

    Attributes:
        images: Normalised and augmented as the recipe says.
        labels: Current labels of the domain's images, stored labels of replayed ones.
        replayed: Which images come from the memory.
        places: Their indices in the domain; arbitrary for replayed images.
    """

    images: Tensor
    labels: Tensor
    replayed: Tensor
    places: Tensor


class Batches(Stateful):
    """Draws batches with replacement from a domain, or from the union of a domain and the memory.

    Args:
        setting: Recipe, randomness and device.
        kind: Selects the augmentation.
        stage: Number of the stage; it seeds the generators.
        images: All training images of the domain, uint8.
        labels: Their labels, which may change in place between epochs.
        memory: Exemplars to replay; None: no replay.
    """

    saved = "labels generators"

    def __init__(
        self,
        setting: Setting,
        kind: Literal["source", "target"],
        stage: int,
        images: Tensor,
        labels: Tensor,
        memory: Memory | None = None,
    ) -> None:
        self.images = images.to(setting.device)
        self.labels = labels.to(setting.device)
        self._memory = memory
        self._inputs = setting.training_inputs(kind)
        self._places = setting.generator("batches", stage)
        self._changes = setting.generator("transforms", stage)
        self.generators = self._places, self._changes
        self._feed = Feed(self.images, self._places) if isinstance(self.images, StreamedImages) else None

    def draw(self, count: int, exemplars: int = 0) -> Batch:
        """Draws a batch of ``count`` images, and ``exemplars`` more from the memory, at most as many as it holds."""
        own, stored = len(self.images), len(self._memory) if self._memory is not None else 0
        draws = [(own + stored, count), *([(stored, min(exemplars, stored))] if exemplars and stored else [])]
        if self._feed is not None:
            place, images = self._feed.take(draws, own)
            index = place.clamp(max=own - 1)
        else:
            place = drawn(draws, own, self._places)
            index = place.clamp(max=own - 1)
            images = self.images[index]
        replayed = place >= own
        log_draw(place, own)
        labels = self.labels[index]
        if self._memory is not None and stored:
            kept = (place - own).clamp(min=0)
            images = torch.where(replayed[:, None, None, None], self._memory.images[kept], images)
            labels = torch.where(replayed, self._memory.labels[kept], labels)
        return Batch(self._inputs(images, self._changes), labels, replayed, index)

    def draw_memory(self, memory: Memory, count: int) -> Batch:
        """Draws a batch of exemplars only, at most as many as there are."""
        draw = len(memory), min(count, len(memory))
        if self._feed is not None:
            self._feed.skip(draw)
        index = drawn([draw], 0, self._places)
        log_draw(index, 0)
        images = self._inputs(memory.images[index], self._changes)
        return Batch(images, memory.labels[index], torch.ones_like(index, dtype=torch.bool), index)


class Views:
    """Draws images with replacement and transforms them, with generators named after the phase."""

    def __init__(self, setting: Setting, name: str, stage: int) -> None:
        self._inputs = setting.training_inputs("target")
        self._places = setting.generator(f"{name} batches", stage)
        self._changes = setting.generator(f"{name} transforms", stage)
        self.generators = self._places, self._changes
        self._feed: Feed | None = None

    def draw(self, images: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Draws ``count`` of all images of a domain; returns their indices and the images."""
        if isinstance(images, StreamedImages):
            self._feed = self._feed or Feed(images, self._places)
            return self._feed.take([(len(images), count)], len(images))
        place = self.places(len(images), count)
        return place, images[place]

    def places(self, population: int, count: int) -> Tensor:
        """Draws ``count`` indices into a population."""
        if self._feed is not None:
            self._feed.skip((population, count))
        return drawn([(population, count)], 0, self._places)

    def change(self, images: Tensor) -> Tensor:
        """Returns uint8 images transformed and normalised as for training on a target."""
        return self._inputs(images, self._changes)
