"""Losses over the rows of a batch that count.

A batch of fixed size may hold rows that stand for nothing. A mask ``valid`` says which ones count; the others have
no influence on a loss or its gradient, as if they were not there.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def mean_over(losses: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean of the losses (n,) of the rows that count, 0 if there are none; ``valid`` None: all count."""
    if valid is None:
        return losses.sum() / max(len(losses), 1)
    return losses.masked_fill(~valid, 0).sum() / valid.sum().clamp_min(1)


def cross_entropy(logits: Tensor, labels: Tensor, valid: Tensor | None = None) -> Tensor:
    """Cross-entropy of logits (n, k) and labels (n,), mean over the rows that count."""
    if valid is None:
        return F.cross_entropy(logits, labels)
    return mean_over(F.cross_entropy(logits, labels, reduction="none"), valid)
