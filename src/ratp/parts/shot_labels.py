"""Pseudo labels of SHOT (ICML 2020): the nearest class centroid, twice.

Centroids are first weighted by the softmax, then made anew from the samples nearest to them. This is the version for
objects: a class can be assigned only if the model predicts it for some sample. The version for digits has no such
filter; a class that nobody predicts then has a centroid of no length, the cosine to it is no number, and numpy
assigns *all* samples to it. The same happens in both versions to a class that loses its samples in the first round;
here it keeps its first centroid.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.parts.exact import full_precision


def shot_labels(features: Tensor, probabilities: Tensor) -> Tensor:
    """Class of every sample, shape (n,).

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
        soft = _centroids(directions, probabilities)
        nearest = _nearest(directions, soft, predicted)
        members = F.one_hot(nearest, classes).float()
        hard = torch.where(members.any(dim=0)[:, None], _centroids(directions, members), soft)
        return _nearest(directions, hard, predicted)


def _centroids(directions: Tensor, weights: Tensor) -> Tensor:
    """c_k = Σ w_k·v / (Σ w_k + 10⁻⁸)."""
    return (weights.T @ directions) / (weights.sum(dim=0) + 1e-8)[:, None]


def _nearest(directions: Tensor, centroids: Tensor, assignable: Tensor) -> Tensor:
    cosines = directions @ F.normalize(centroids, dim=1).T
    return cosines.masked_fill(~assignable, -torch.inf).argmax(dim=1)
