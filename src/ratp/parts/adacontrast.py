"""What AdaContrast (CVPR 2022) computes: labels by neighbours, and contrast between images of different labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.parts.exact import full_precision


def neighbour_mean(queries: Tensor, points: Tensor, probabilities: Tensor, neighbours: int) -> Tensor:
    """Mean prediction of the points nearest to each query, by cosine; shape (n, classes).

    Args:
        queries: Of unit length, shape (n, dim).
        points: Of unit length, shape (m, dim).
        probabilities: Predictions of the points, shape (m, classes).
        neighbours: How many count; at most m do.
    """
    with full_precision(queries.device):
        nearest = (queries @ points.T).topk(min(neighbours, len(points)), dim=1).indices
    # p̂ = (1/k)·Σ p_j over the k nearest j
    return probabilities[nearest].mean(dim=1)


def contrast_logits(
    queries: Tensor, keys: Tensor, labels: Tensor, others: Tensor, other_labels: Tensor, temperature: float
) -> Tensor:
    """Similarities of queries with their own keys, first column, and with other keys: −∞ for those of their label.

    Args:
        queries: Of unit length, shape (n, dim).
        keys: Other views of the same images, shape (n, dim).
        labels: Labels of the images, shape (n,).
        others: Keys of other images, shape (m, dim).
        other_labels: Their labels, shape (m,).
        temperature: τ.
    """
    own = (queries * keys).sum(dim=1, keepdim=True)
    same = labels[:, None] == other_labels[None]
    return torch.cat([own, (queries @ others.T).masked_fill(same, -torch.inf)], dim=1) / temperature


def contrast_loss(logits: Tensor) -> Tensor:
    """−log(e^{s⁺} / (e^{s⁺} + Σ e^{s⁻})), mean over the rows; 0 where a row has no negative left."""
    return -F.log_softmax(logits, dim=1)[:, 0].mean()
