"""Pseudo-labels for all samples of a domain: T2PL (RaTP), SHOT, BMD; class prototypes; an exact k-NN vote.

All of them compute in full single precision, regardless of the settings of the process.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.errors import Note
from ratp.functional.class_mix import Estimate
from ratp.functional.numerics import full_precision, in_chunks, kmeans


def domain_average(features: Tensor, labels: Tensor, domains: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Averages unit-length features per class and domain, then over the domains that have the class.

    These are the prototypes of RaTP's ablation "PL" (Deja Vu, ICLR 2023, section 3.2), which has no classifier.

    Args:
        features: z, of any length, shape (n, d).
        labels: y, shape (n,).
        domains: Domain index of each sample, shape (n,).
        classes: k.

    Returns:
        The prototypes, shape (k, d), and which classes have one, bool of shape (k,).
    """
    known = int(domains.max()) + 1
    with full_precision(features.device):
        directions = F.normalize(features.float(), dim=1)
        members = F.one_hot(domains * classes + labels, known * classes).float()
        counts = members.sum(dim=0)
        # p_dk: mean over the samples of class k in domain d
        means = (members.T @ directions) / counts.clamp_min(1)[:, None]
    there = (counts > 0).reshape(known, classes)
    # p̄_k = mean of p_dk over the domains that have class k
    return means.reshape(known, classes, -1).sum(dim=0) / there.sum(dim=0).clamp_min(1)[:, None], there.any(dim=0)


def prototype_learning(features: Tensor, labels: Tensor, prototypes: Tensor, there: Tensor, scale: float) -> Tensor:
    """Computes −log softmax_y(s·cos(z, p̄)) of every sample, shape (n,); 0 where its class has no prototype.

    Args:
        features: z, of any length, shape (n, d).
        labels: y, shape (n,).
        prototypes: p̄, constants of any length, shape (k, d).
        there: Which classes have one, bool of shape (k,).
        scale: s.
    """
    cosines = F.normalize(features.float(), dim=1) @ F.normalize(prototypes.float(), dim=1).T
    logits = (scale * cosines).masked_fill(~there, torch.finfo(torch.float32).min)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses.masked_fill(~there[labels], 0)


# Points examined beyond the nearest k, enough to resolve most ties for the last place exactly.
SPARE = 16
# Points per group; the search first compares the best point of each group.
GROUP = 8
# Bytes per chunk.
CPU_ROOM, GPU_ROOM = 2**28, 2**31
# Chunks are a multiple of this many rows, because matrix products are tiled.
TILE = 128


def knn_vote(
    queries: Tensor, points: Tensor, point_labels: Tensor, neighbours: int, classes: int, chunk: int = 8192
) -> Tensor:
    """Labels queries by majority vote of the nearest points (Euclidean); ties go to the smallest class index.

    Of equally distant points at the last place, those of the smallest class vote. Only the vote counts, so nothing is
    sorted: the products, 2·n·m·d operations, are most of the work.
    """
    if not len(points):
        return torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    with full_precision(queries.device):
        search = _Search(points, point_labels, min(neighbours, len(points)), classes)
        labels, settled = in_chunks(lambda rows: search.vote(queries[rows]), len(queries), min(chunk, search.rows))
        doubtful = (~settled).nonzero().squeeze(1)  # the only place where the host waits for the device
        if len(doubtful):
            (labels[doubtful],) = in_chunks(
                lambda rows: (search.vote_with_all_ties(queries[doubtful[rows]]),),
                len(doubtful),
                min(chunk, search.rows_with_all_ties),
            )
    return labels


class _Search:
    """Points to search.

    Attributes:
        rows: How many queries fit into a chunk.
        rows_with_all_ties: Likewise for :meth:`vote_with_all_ties`.
    """

    def __init__(self, points: Tensor, point_labels: Tensor, neighbours: int, classes: int) -> None:
        count = len(points)
        self._neighbours, self._classes = neighbours, classes
        self._seen = min(neighbours + SPARE, count)
        self._in_groups = count >= 4 * GROUP * self._seen
        # Distances do not depend on the origin; rounding is smallest near the points.
        self._origin = points.mean(dim=0)
        points = points - self._origin
        half_norms = points.square().sum(dim=1) / 2
        if self._in_groups and count % GROUP:  # fill the last group with points infinitely far away
            missing = -count % GROUP
            points, half_norms = F.pad(points, (0, 0, 0, missing)), F.pad(half_norms, (0, missing), value=torch.inf)
            point_labels = F.pad(point_labels, (0, missing))
        self._points, self._half_norms, self._labels = points, half_norms, point_labels

        room, number = GPU_ROOM if points.is_cuda else CPU_ROOM, points.element_size()
        matrix, choice = number * len(points), (number + 8) * self._seen
        self.rows = _whole_tiles(room // (matrix + matrix // GROUP + (4 + GROUP) * choice))
        self.rows_with_all_ties = _whole_tiles(room // (3 * matrix + choice))

    def vote(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Returns labels, and whether they are final: not if a tie for the last place may extend further."""
        closeness, column = self._closest(self._closeness(queries))
        settled = torch.ones(len(queries), dtype=torch.bool, device=queries.device)
        spare = self._seen - self._neighbours
        last = closeness.topk(spare + 1, dim=1, largest=False, sorted=False).values.amax(dim=1, keepdim=True)
        if self._seen < len(self._points):
            settled = closeness.amin(dim=1) < last.squeeze(1)
        kinds = self._labels[column] + self._classes * (closeness == last)
        counts = torch.zeros(len(kinds), 2 * self._classes, dtype=torch.int32, device=kinds.device)
        counts.scatter_add_(1, kinds, (closeness >= last).to(torch.int32))
        return self._elect(counts[:, : self._classes], counts[:, self._classes :]), settled

    def vote_with_all_ties(self, queries: Tensor) -> Tensor:
        """Returns labels, from all points."""
        closeness = self._closeness(queries)
        last = closeness.topk(self._neighbours, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
        # sums of zeros and ones: exact for up to 2²⁴ points
        above = (closeness > last).to(closeness.dtype) @ self._members
        return self._elect(above.long(), ((closeness == last).to(closeness.dtype) @ self._members).long())

    def _closeness(self, queries: Tensor) -> Tensor:
        """A score that is larger for nearer points, shape (queries, points)."""
        # ‖q − p‖² = ‖q‖² − 2 (q·p − ‖p‖²/2): the nearest are those with the largest bracket
        return ((queries - self._origin) @ self._points.T).sub_(self._half_norms)

    def _closest(self, closeness: Tensor) -> tuple[Tensor, Tensor]:
        """Closeness and columns of the closest points, in any order."""
        if not self._in_groups:
            closest = closeness.topk(self._seen, dim=1, sorted=False)
            return closest.values, closest.indices
        # Fewer than s groups hold a point closer than the s-th closest, so the s groups with the best points hold them.
        grouped = closeness.view(len(closeness), GROUP, -1)
        groups = grouped.amax(dim=1).topk(self._seen, dim=1, sorted=False).indices
        candidates = grouped.gather(2, groups[:, None].expand(-1, GROUP, -1)).flatten(1)
        closest = candidates.topk(self._seen, dim=1, sorted=False)
        group = groups.gather(1, closest.indices % self._seen)
        return closest.values, closest.indices.div_(self._seen, rounding_mode="floor") * grouped.shape[2] + group

    def _elect(self, above: Tensor, tied: Tensor) -> Tensor:
        """Elects the class with most votes, from points above the last place and points tied for it, per class."""
        vacant = self._neighbours - above.sum(dim=1, keepdim=True)
        earlier = tied.cumsum(dim=1) - tied
        votes = above + (vacant - earlier).clamp(min=0).minimum(tied)
        return votes.argmax(dim=1)  # the first maximum

    @cached_property
    def _members(self) -> Tensor:
        """One-hot classes of the points."""
        members = self._points.new_zeros(len(self._points), self._classes)
        return members.scatter_(1, self._labels[:, None], 1)


def _whole_tiles(rows: int) -> int:
    return max(rows // TILE * TILE, min(rows, TILE), 1)


# Samples compared with the centroids at a time.
ROWS = 2**16
CLASS_MIX = "class sizes of a target: equal, or estimated from predictions by EM or by the confusion matrix"
MIX_SMOOTHING = "how far the estimated sizes move towards equal ones, 1: all the way; none: the less sure, the farther"


@dataclass(frozen=True)
class T2PLConfig:
    """Switches of T2PL; defaults are the published code's."""

    r_top: int = switch(2, "each class keeps N/(r_top·K) top samples", minimum=1)
    r_knn: int = switch(20, "N/(r_knn·K) neighbours vote; r'_top in the paper", minimum=1)
    normalise: bool = switch(True, "features are scaled to unit length first (published code)", doc_ref=21)
    rounds: Literal[1, 2] = switch(2, "1: soft centroids (paper); 2: then once more with hard labels", doc_ref=22)
    top_set: Literal["concatenation", "union"] = switch(
        "concatenation", "a sample on top for two classes counts twice (published code) or once (paper)", doc_ref=23
    )
    classes: Literal["predicted", "all"] = switch(
        "predicted", "classes that can be assigned: those the model predicts now (published code) or all", doc_ref=24
    )
    class_mix: Estimate = switch("uniform", CLASS_MIX, hash_default=False)
    mix_smoothing: float | None = switch(None, MIX_SMOOTHING, minimum=0, maximum=1, hash_default=False)


@dataclass(frozen=True)
class PseudoLabels:
    """Result of T2PL.

    Attributes:
        labels: Class of every sample, shape (n,).
        soft_centroids: Centroids after the soft round, shape (k, d).
        centroids: Centroids that selected the fit set, shape (k, d).
        assignable: Which classes can be assigned, bool of shape (k,).
    """

    labels: Tensor
    soft_centroids: Tensor
    centroids: Tensor
    assignable: Tensor


def t2pl(
    features: Tensor, probabilities: Tensor, config: T2PLConfig, chunk: int = 8192, mix: Tensor | None = None
) -> PseudoLabels:
    """Labels all samples of a domain by Top² pseudo-labelling, Deja Vu (ICLR 2023), section 2.3.

    The most reliable samples per class are selected twice: first by confidence, to compute class centroids, then by
    similarity to these centroids, to fit a k-nearest-neighbour classifier that labels every sample.

    In both rounds the same classes can be assigned. In the published code, the second round drops those that the first
    one assigns to no sample, and the first one assigns to top samples only classes predicted for some of them.

    Args:
        features: f, shape (n, d).
        probabilities: Softmax rows g, shape (n, k).
        config: Switches.
        chunk: Most samples compared with the fit set at once.
        mix: Class proportions q, shape (k,): a class keeps q·N/r_top samples; None: equal ones, N/(r_top·K) samples.
    """
    with full_precision(features.device):
        return _t2pl(features, probabilities, config, chunk, mix)


# On a processor, T2PL of this many images takes long enough to say so.
MANY = 50_000


class SlowWarning(Note):
    """Labelling the images of a domain takes long."""


def announce_if_slow(features: Tensor, probabilities: Tensor, config: T2PLConfig) -> None:
    """Warns if :func:`t2pl` will take long on a processor, and says how long.

    That is estimated from a fifth of the samples, because the time grows with the square of their number.
    """
    if features.device.type != "cpu" or len(features) < MANY:
        return
    started = time.perf_counter()
    t2pl(features[::5], probabilities[::5], config)
    seconds = 25 * (time.perf_counter() - started)
    text = f"T2PL of {len(features):,} images takes about {seconds:,.0f} s: it grows with their number squared"
    warnings.warn(f"{text}. --set refresh=0 labels them once a stage", SlowWarning, stacklevel=3)


def _t2pl(features: Tensor, probabilities: Tensor, config: T2PLConfig, chunk: int, mix: Tensor | None) -> PseudoLabels:
    count, classes = probabilities.shape
    features = features.float()
    if config.normalise:
        features = F.normalize(features, dim=1)
    sizes = torch.full((classes,), count // (classes * config.r_top), device=features.device)
    if mix is not None:
        sizes = (count * mix.to(features.device) / config.r_top).long()
    sizes = sizes.clamp(1, max(count, 1))
    most = min(int(sizes.max()), count)
    # which of the samples on top for a class are kept, shape (k, most)
    kept_of = torch.arange(most, device=features.device) < sizes[:, None]

    # F: per class the samples with the largest softmax
    top = probabilities.topk(most, dim=0).indices.T[kept_of]
    if config.top_set == "union":
        top = torch.unique(top)
    top_features = features[top]
    # p_k = Σ_{x∈F} g_k(x) f(x) / Σ_{x∈F} g_k(x)
    soft = _centroids(top_features, probabilities[top].float())

    assignable = torch.ones(classes, dtype=torch.bool, device=features.device)
    if config.classes == "predicted":
        assignable = torch.zeros_like(assignable).index_fill_(0, probabilities.argmax(dim=1), True)
    assignable = assignable & (probabilities > 0).any(dim=0)
    centroids = soft
    if config.rounds == 2:
        nearest = _cosine(top_features, soft).masked_fill(~assignable, -torch.inf).argmax(dim=1)
        members = F.one_hot(nearest, classes).float()
        # A class that is nearest to no top sample keeps its soft centroid: its mean would be empty.
        centroids = torch.where(members.any(dim=0)[:, None], _centroids(top_features, members), soft)
    del top_features

    # F′: per assignable class the samples closest to its centroid
    kept = assignable.nonzero().squeeze(1)
    fit = _cosine(features, centroids)[:, kept].topk(most, dim=0).indices.T[kept_of[kept]]
    labels = knn_vote(
        features,
        features[fit],
        kept.repeat_interleave(kept_of[kept].sum(dim=1)),
        max(count // (classes * config.r_knn), 1),
        classes,
        chunk,
    )
    return PseudoLabels(labels, soft, centroids, assignable)


def _centroids(features: Tensor, weights: Tensor) -> Tensor:
    return (weights.T @ features) / weights.sum(dim=0).clamp_min(torch.finfo(torch.float32).tiny)[:, None]


def _cosine(features: Tensor, centroids: Tensor) -> Tensor:
    directions = F.normalize(centroids, dim=1).T
    return in_chunks(lambda rows: (F.normalize(features[rows], dim=1) @ directions,), len(features), ROWS)[0]


def shot_labels(features: Tensor, probabilities: Tensor) -> Tensor:
    """Labels all samples by the nearest class centroid, twice: SHOT (ICML 2020). Returns shape (n,).

    Centroids are first weighted by the softmax, then recomputed from the samples nearest to them. This is SHOT's
    version for objects: a class can be assigned only if the model predicts it for some sample. The version for digits
    has no such filter; there, a class that nobody predicts has a zero centroid, the cosine to it is NaN, and numpy
    assigns *all* samples to it. In both versions the same happens to a class that loses its samples in the first round;
    here it keeps its first centroid.

    Args:
        features: z, shape (n, d).
        probabilities: Softmax rows p, shape (n, k).
    """
    classes = probabilities.shape[1]
    with full_precision(features.device):
        features, probabilities = features.float(), probabilities.float()
        # v = [z; 1] / ‖[z; 1]‖
        directions = F.normalize(F.pad(features, (0, 1), value=1.0), dim=1)
        predicted = torch.zeros(classes, dtype=torch.bool, device=features.device)
        predicted.index_fill_(0, probabilities.argmax(dim=1), True)
        soft = _soft_centroids(directions, probabilities)
        nearest = _nearest(directions, soft, predicted)
        members = F.one_hot(nearest, classes).float()
        hard = torch.where(members.any(dim=0)[:, None], _soft_centroids(directions, members), soft)
        return _nearest(directions, hard, predicted)


def _soft_centroids(directions: Tensor, weights: Tensor) -> Tensor:
    """c_k = Σ w_k·v / (Σ w_k + 10⁻⁸)."""
    return (weights.T @ directions) / (weights.sum(dim=0) + 1e-8)[:, None]


def _nearest(directions: Tensor, centroids: Tensor, assignable: Tensor) -> Tensor:
    cosines = directions @ F.normalize(centroids, dim=1).T
    return cosines.masked_fill(~assignable, -torch.inf).argmax(dim=1)


@dataclass(frozen=True)
class BMDLabels:
    """Static labels of BMD, shape (n,), and the centres of every class, shape (k, c, d)."""

    labels: Tensor
    centres: Tensor


def bmd_labels(
    features: Tensor, probabilities: Tensor, *, centres: int = 4, share: int = 3, rounds: int = 2, iterations: int = 100
) -> BMDLabels:
    """Labels all samples by class-balanced multicentric prototypes, BMD (ECCV 2022).

    Every class, predicted or not, takes the same number of seeds: the samples that score highest for it. K-means turns
    them into a few centres, and a sample's score for a class is its similarity to the nearest of these.

    Args:
        features: z, shape (n, d).
        probabilities: Softmax rows, shape (n, k).
        centres: Centres per class.
        share: Each class has n/(share·k) seeds, at least one.
        rounds: The first selects seeds by the softmax, each further one by the scores of the one before.
        iterations: Most iterations of k-means.
    """
    with full_precision(features.device):
        directions = F.normalize(features.float(), dim=1)
        samples, classes = probabilities.shape
        seeds = seed_count(samples, classes, share)
        scores = probabilities
        for _ in range(rounds):
            places = scores.topk(seeds, dim=0).indices.T
            found = kmeans(directions[places], centres, iterations)
            scores = centre_scores(directions, found)
        return BMDLabels(scores.argmax(dim=1), found)


def seed_count(samples: int, classes: int, share: int = 3) -> int:
    """Returns the seeds per class: n // (share·k), at least one and at most all."""
    return min(max(samples // (share * classes), 1), samples)


def centre_scores(directions: Tensor, centres: Tensor) -> Tensor:
    """Computes soft labels (n, k): the softmax over classes of :func:`centre_similarities`."""
    return centre_similarities(directions, centres).softmax(dim=1)


def centre_similarities(directions: Tensor, centres: Tensor) -> Tensor:
    """Computes the largest dot product of unit features (n, d) with each class's centres (k, c, d), shape (n, k)."""
    classes, each, _ = centres.shape
    return (directions @ centres.flatten(0, 1).T).reshape(-1, classes, each).amax(dim=2)


def moved_centres(centres: Tensor, directions: Tensor, decay: float, counts: Tensor | None = None) -> Tensor:
    """Moves the centres towards a batch: decay·centre + (1 − decay)·weighted mean of the batch.

    The mean weighs a sample by the softmax of its dot products over all centres of all classes. Centres are not
    scaled to unit length.

    Args:
        centres: Shape (k, c, d).
        directions: Features of unit length, shape (n, d).
        decay: 1 leaves the centres where they are.
        counts: Which samples count, bool of shape (n,); None: all. If none counts, the centres stay.
    """
    flat = centres.flatten(0, 1)
    weights = (directions @ flat.T).softmax(dim=1)
    if counts is not None:
        weights = weights * counts[:, None]
    totals = weights.sum(dim=0)[:, None]
    means = weights.T @ directions / totals.clamp_min(torch.finfo(weights.dtype).tiny)
    moved = torch.where(totals > 0, decay * flat + (1 - decay) * means, flat)
    return moved.reshape(centres.shape)
