"""Supervised contrastive learning, Khosla et al., NeurIPS 2020: samples of a class attract, all others repel.

    −mean_{p: y_p=y_i, p≠i} log ( e^{f_i·f_p/τ} / Σ_{a≠i} e^{f_i·f_a/τ} )

with features f of unit length and temperature τ. A sample alone in its class has no loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def supervised_contrastive(
    features: Tensor, labels: Tensor, temperature: float = 0.07, valid: Tensor | None = None
) -> Tensor:
    """The loss of every sample, shape (n,).

    Args:
        features: f, of any length, shape (n, d).
        labels: y, shape (n,).
        temperature: τ.
        valid: Which samples count, bool of shape (n,); None: all. The others neither attract nor repel.
    """
    dtype = torch.promote_types(features.dtype, torch.float32)
    directions = F.normalize(features.to(dtype), dim=1)
    # A number instead of −∞: a sample without others must not turn the gradient into none.
    similar = (directions @ directions.T / temperature).fill_diagonal_(torch.finfo(dtype).min / 2)
    attracts = (labels[:, None] == labels[None, :]).fill_diagonal_(False)
    if valid is not None:
        both = valid[None, :] & valid[:, None]
        similar, attracts = similar.masked_fill(~both, torch.finfo(dtype).min / 2), attracts & both
    count = attracts.sum(dim=1)
    # log Σ_a e^{s_ia} − mean_p s_ip, if there is a p
    return similar.logsumexp(dim=1) * (count > 0) - (similar * (attracts / count.clamp_min(1)[:, None])).sum(dim=1)
