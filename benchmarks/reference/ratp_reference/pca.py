"""Prototype contrastive alignment: the quotient of sums of exponentials, as printed."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def prototype_contrastive(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    old_prototypes: Tensor | None = None,
    *,
    similarity: str = "cosine",
    scale: float = 12.0,
    negatives: str = "positive",
    old_weight: float = 1.0,
) -> Tensor:
    """The loss of every sample.

    Args:
        features: f, one row a sample.
        labels: Class of each sample.
        prototypes: p, the classifier's rows.
        old_prototypes: q, those of the old model; None on the source.
        similarity: ``cosine`` times ``scale``, or ``dot``.
        scale: s.
        negatives: Samples of other classes that repel: those of ``positive`` similarity, or ``all``.
        old_weight: m.
    """
    if similarity == "cosine":
        features, prototypes = F.normalize(features, dim=1), F.normalize(prototypes, dim=1)
        old_prototypes = None if old_prototypes is None else F.normalize(old_prototypes, dim=1)
    else:
        scale = 1.0
    rows = torch.arange(len(features), device=features.device)

    # e^{s·f·p_c} for every class c
    to_prototypes = (scale * features @ prototypes.T).exp()
    attraction, everything = to_prototypes[rows, labels], to_prototypes.sum(dim=1)
    if old_prototypes is not None:
        to_old = old_weight * (scale * features @ old_prototypes.T).exp()
        attraction, everything = attraction + to_old[rows, labels], everything + to_old.sum(dim=1)

    # e^{s·f_i·f_j} for every pair of different classes
    products = features @ features.T
    repels = labels[:, None] != labels[None, :]
    if negatives == "positive":
        repels = repels & (products >= 1e-6)
    everything = everything + ((scale * products).exp() * repels).sum(dim=1)
    return -(attraction / everything).log()
