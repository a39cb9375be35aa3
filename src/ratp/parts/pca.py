"""Prototype contrastive alignment (PCA), Deja Vu (ICLR 2023), section 2.4.

The rows of the bias-free classifier are the class prototypes. Each sample is pulled towards the
prototype of its class, in the current and in the old model, and pushed from the other prototypes and from
samples of other classes:

    −log ( [e^{s·f·p_y} + m·e^{s·f·q_y}] / [Σ_c e^{s·f·p_c} + m·Σ_c e^{s·f·q_c} + Σ_{j: y_j≠y_i} e^{s·f_i·f_j}] )

with prototypes p, old prototypes q, old weight m and scale s. On the source domain there is no old model:
every term with q is absent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.parts.scores import scores

# Pairs of samples count as negatives only from this cosine on (published code).
NEGATIVE_THRESHOLD = 1e-6


@dataclass(frozen=True)
class PCAConfig:
    """Switches of the prototype contrastive alignment loss; defaults are the published code's."""

    weight: float = switch(1.0, "weight of the loss; 0 leaves it out", minimum=0)
    similarity: Literal["cosine", "dot"] = switch(
        "cosine", "cosine × scale (published code) or the raw dot product (paper)", row=3
    )
    scale: float = switch(12.0, "factor s on the cosine; unused with 'dot'", row=3, above=0)
    negatives: Literal["positive", "all"] = switch(
        "positive", "samples of other classes that repel: those with positive similarity (published code) or all", row=4
    )
    old_weight: float = switch(1.0, "weight m of the old model's prototypes; published: 0.5 on PACS", row=5, minimum=0)
    form: Literal["stable", "published"] = switch(
        "stable", "log-sum-exp, safe in low precision, or the quotient of sums as printed"
    )


def prototype_contrastive(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    old_prototypes: Tensor | None,
    config: PCAConfig,
    valid: Tensor | None = None,
) -> Tensor:
    """The loss of every sample, shape (n,).

    Args:
        features: f, shape (n, d).
        labels: y, shape (n,).
        prototypes: p, the classifier's rows, shape (k, d).
        old_prototypes: q, constants, or None on the source domain.
        config: Switches.
        valid: Which samples count, bool of shape (n,); None: all. The others repel none and have no loss.
    """
    if config.form == "stable":  # exponentials and their sums stay in single precision
        features, prototypes = features.float(), prototypes.float()
    old = None if old_prototypes is None or config.old_weight == 0 else old_prototypes.detach().to(features.dtype)
    scale = 1.0
    if config.similarity == "cosine":
        scale = config.scale
        features, prototypes = F.normalize(features, dim=1), F.normalize(prototypes, dim=1)
        old = None if old is None else F.normalize(old, dim=1)
    to_prototypes = scale * scores(features, prototypes)
    to_samples = features @ features.T
    repels = labels[:, None] != labels[None, :]
    if config.negatives == "positive":
        repels = repels & (to_samples >= NEGATIVE_THRESHOLD)
    if valid is not None:
        repels = repels & valid[None, :]
    to_samples = (scale * to_samples).masked_fill(~repels, -math.inf)

    near = [to_prototypes.gather(1, labels[:, None])]
    everything = [to_prototypes, to_samples]
    if old is not None:
        # m·e^a = e^{a + log m}
        to_old = scale * features @ old.T + math.log(config.old_weight)
        near.append(to_old.gather(1, labels[:, None]))
        everything.append(to_old)
    numerator, denominator = torch.cat(near, dim=1), torch.cat(everything, dim=1)
    if config.form == "published":
        losses = -(numerator.exp().sum(dim=1) / denominator.exp().sum(dim=1)).log()
    else:
        losses = denominator.logsumexp(dim=1) - numerator.logsumexp(dim=1)
    return losses if valid is None else losses.masked_fill(~valid, 0)
