"""Exact k-nearest-neighbour vote, in chunks of queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def knn_vote(
    queries: Tensor, points: Tensor, point_labels: Tensor, neighbours: int, classes: int, chunk: int = 8192
) -> Tensor:
    """Labels by majority among the nearest points (Euclidean); ties go to the smallest class index.

    Args:
        queries: Shape (n, d).
        points: Shape (m, d).
        point_labels: Shape (m,).
        neighbours: How many points vote; at most m do.
        classes: Number of classes.
        chunk: Queries handled at once: memory grows with ``chunk × m``, not with ``n × m``.
    """
    neighbours = min(neighbours, len(points))
    # Distances do not change with the origin; near the points they are resolved best.
    origin = points.mean(dim=0)
    queries, points = queries - origin, points - origin
    half_norms = points.square().sum(dim=1) / 2
    tie_break = torch.arange(classes, 0, -1, device=queries.device)
    labels = []
    for start in range(0, len(queries), chunk):
        # ‖q − p‖² = ‖q‖² − 2 (q·p − ‖p‖²/2): the nearest are those with the largest bracket
        nearest = (queries[start : start + chunk] @ points.T - half_norms).topk(neighbours, dim=1, sorted=False).indices
        votes = F.one_hot(point_labels[nearest], classes).sum(dim=1)
        labels.append((votes * (classes + 1) + tie_break).argmax(dim=1))
    return torch.cat(labels)
