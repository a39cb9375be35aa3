"""Prototype learning without the classifier: class means of features, averaged over domains.

RaTP's ablation (Deja Vu, ICLR 2023, section 3.2) names it "PL"; the form is the plain one. Every domain that has a
class gives the mean of its features of unit length, and the prototype is the mean of these means.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.parts.exact import full_precision


def domain_average(features: Tensor, labels: Tensor, domains: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The prototype of every class, shape (k, d), and which classes have one, bool of shape (k,).

    Args:
        features: z, of any length, shape (n, d).
        labels: y, shape (n,).
        domains: Number of the domain of each, shape (n,).
        classes: k.
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
    """−log softmax_y(s·cos(z, p̄)) of every sample, shape (n,); 0 where its class has no prototype.

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
