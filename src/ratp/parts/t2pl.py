"""Top² pseudo labelling (T2PL), Deja Vu (ICLR 2023), section 2.3.

Twice the most reliable samples are taken per class: first by confidence, to build class centroids, then by
closeness to these centroids, to fit a k-nearest-neighbour classifier that labels every sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.parts.chunks import in_chunks
from ratp.parts.exact import full_precision
from ratp.parts.knn import knn_vote

# Samples compared with the centroids at once.
ROWS = 2**16


@dataclass(frozen=True)
class T2PLConfig:
    """Switches of T2PL; defaults are the published code's."""

    r_top: int = switch(2, "each class keeps N/(r_top·K) top samples", minimum=1)
    r_knn: int = switch(20, "N/(r_knn·K) neighbours vote; r'_top in the paper", minimum=1)
    normalise: bool = switch(True, "features are scaled to unit length first (published code)", row=21)
    rounds: Literal[1, 2] = switch(2, "1: soft centroids (paper); 2: then once more with hard labels", row=22)
    top_set: Literal["concatenation", "union"] = switch(
        "concatenation", "a sample on top for two classes counts twice (published code) or once (paper)", row=23
    )
    classes: Literal["predicted", "all"] = switch(
        "predicted", "classes that can be assigned: those the model predicts now (published code) or all", row=24
    )


@dataclass(frozen=True)
class PseudoLabels:
    """What T2PL found.

    Attributes:
        labels: Class of every sample, shape (n,).
        soft_centroids: Centroids after the soft round, shape (k, d).
        centroids: Centroids the fit set was chosen by, shape (k, d).
        assignable: Which classes could be assigned, bool of shape (k,).
    """

    labels: Tensor
    soft_centroids: Tensor
    centroids: Tensor
    assignable: Tensor


def t2pl(features: Tensor, probabilities: Tensor, config: T2PLConfig, chunk: int = 8192) -> PseudoLabels:
    """Pseudo labels for all samples of a domain.

    Args:
        features: f, shape (n, d).
        probabilities: Softmax rows g, shape (n, k).
        config: Switches.
        chunk: Samples compared with the fit set at once, at most.
    """
    with full_precision(features.device):
        return _t2pl(features, probabilities, config, chunk)


def _t2pl(features: Tensor, probabilities: Tensor, config: T2PLConfig, chunk: int) -> PseudoLabels:
    count, classes = probabilities.shape
    features = features.float()
    if config.normalise:
        features = F.normalize(features, dim=1)
    per_class = min(max(count // (classes * config.r_top), 1), count)

    # F: per class the samples with the largest softmax
    top = probabilities.topk(per_class, dim=0).indices.T.reshape(-1)
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
        # A class that no top sample is nearest to keeps its soft centroid: its mean would be empty.
        centroids = torch.where(members.any(dim=0)[:, None], _centroids(top_features, members), soft)
    del top_features

    # F′: per assignable class the samples closest to its centroid
    kept = assignable.nonzero().squeeze(1)
    fit = _cosine(features, centroids)[:, kept].topk(per_class, dim=0).indices.T.reshape(-1)
    labels = knn_vote(
        features,
        features[fit],
        kept.repeat_interleave(per_class),
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
