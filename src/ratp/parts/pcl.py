"""Proxy-based contrastive learning (PCL), CVPR 2022, section 3.

Each class has a proxy. A sample is pulled towards the proxy of its class and pushed from samples of other classes:

    −log ( e^{s·f·w_y} / [e^{s·f·w_y} + Σ_{j: y_j≠y_i} e^{s·f_i·f_j}] )

with unit features f, unit proxies w and scale s. Other classes' proxies do not repel and samples of the same class do
not attract: RaTP's loss (:mod:`ratp.parts.pca`) has the former, the supervised contrastive loss the latter. As in the
published code, only pairs with a positive cosine repel. Exponentials and their sums are in single precision at least.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.parts.pca import NEGATIVE_THRESHOLD

SCALE = 12.0


def proxy_contrastive(
    features: Tensor, labels: Tensor, proxies: Tensor, scale: float = SCALE, valid: Tensor | None = None
) -> Tensor:
    """The loss of every sample, shape (n,); 0 where no sample of another class is near.

    Args:
        features: f, of any length, shape (n, d).
        labels: y, shape (n,).
        proxies: w, of any length, one a class, shape (k, d).
        scale: s.
        valid: Which samples count, bool of shape (n,); None: all. The others repel none and have no loss.
    """
    dtype = torch.promote_types(features.dtype, torch.float32)
    features, proxies = F.normalize(features.to(dtype), dim=1), F.normalize(proxies.to(dtype), dim=1)
    to_own = (features * proxies[labels]).sum(dim=1, keepdim=True)
    to_samples = features @ features.T
    repels = (labels[:, None] != labels[None, :]) & (to_samples >= NEGATIVE_THRESHOLD)
    if valid is not None:
        repels = repels & valid[None, :]
    to_samples = (scale * to_samples).masked_fill(~repels, -math.inf)
    losses = torch.cat([scale * to_own, to_samples], dim=1).logsumexp(dim=1) - scale * to_own.squeeze(1)
    return losses if valid is None else losses.masked_fill(~valid, 0)
