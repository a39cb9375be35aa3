"""Class-balanced multicentric prototypes and pseudo labels of BMD (ECCV 2022).

Every class, predicted or not, takes as many seeds: the samples most like it. K-means turns the seeds of a class into
a few centres, and a sample is as much like a class as it is like the nearest of its centres.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.parts.exact import full_precision
from ratp.parts.kmeans import kmeans


@dataclass(frozen=True)
class BMDLabels:
    """What BMD found.

    Attributes:
        labels: Static label of every sample, shape (n,).
        centres: Centres of every class, shape (k, c, d).
    """

    labels: Tensor
    centres: Tensor


def bmd_labels(
    features: Tensor, probabilities: Tensor, *, centres: int = 4, share: int = 3, rounds: int = 2, iterations: int = 100
) -> BMDLabels:
    """Static pseudo labels for all samples of a domain.

    Args:
        features: z, shape (n, d).
        probabilities: Softmax rows, shape (n, k).
        centres: Centres a class.
        share: Each class has n/(share·k) seeds, at least one.
        rounds: The first takes seeds by the softmax, each further one by the scores of the one before.
        iterations: Of K-means, at most.
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
    """Seeds a class: n // (share·k), at least one and at most all."""
    return min(max(samples // (share * classes), 1), samples)


def centre_scores(directions: Tensor, centres: Tensor) -> Tensor:
    """Soft labels (n, k): softmax over classes of the largest dot product with a centre of the class.

    Args:
        directions: Features of unit length, shape (n, d).
        centres: Shape (k, c, d).
    """
    return centre_similarities(directions, centres).softmax(dim=1)


def centre_similarities(directions: Tensor, centres: Tensor) -> Tensor:
    """Largest dot product of each sample with a centre of each class, shape (n, k)."""
    classes, each, _ = centres.shape
    return (directions @ centres.flatten(0, 1).T).reshape(-1, classes, each).amax(dim=2)


def moved_centres(centres: Tensor, directions: Tensor, decay: float, counts: Tensor | None = None) -> Tensor:
    """The centres a little closer to a batch: decay·centre + (1 − decay)·mean of the batch as the centre sees it.

    That mean weighs a sample by the softmax, over all centres of all classes, of its dot products. Centres are not
    scaled to unit length.

    Args:
        centres: Shape (k, c, d).
        directions: Features of unit length, shape (n, d).
        decay: 1: they stay.
        counts: Which samples count, bool of shape (n,); None: all. Without any, the centres stay.
    """
    flat = centres.flatten(0, 1)
    weights = (directions @ flat.T).softmax(dim=1)
    if counts is not None:
        weights = weights * counts[:, None]
    totals = weights.sum(dim=0)[:, None]
    means = weights.T @ directions / totals.clamp_min(torch.finfo(weights.dtype).tiny)
    moved = torch.where(totals > 0, decay * flat + (1 - decay) * means, flat)
    return moved.reshape(centres.shape)
