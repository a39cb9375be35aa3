"""Entropies of predictions, and the information-maximisation loss of SHOT (ICML 2020).

Each prediction should be certain, all together should be diverse: the mean entropy of the samples, less the entropy
of their mean. SHOT adds 10⁻⁵ inside every logarithm, and so do :func:`entropy` and :func:`information_maximisation`.
The functions of logits need no such help.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

EPSILON = 1e-5


def entropy(probabilities: Tensor) -> Tensor:
    """−Σ p·log(p + 10⁻⁵) over the last dimension."""
    return -(probabilities * (probabilities + EPSILON).log()).sum(dim=-1)


def information_maximisation(logits: Tensor) -> Tensor:
    """H̄ − H(p̄): mean entropy of the rows of logits (n, k), less the entropy of the mean prediction."""
    probabilities = logits.softmax(dim=1)
    return entropy(probabilities).mean() - entropy(probabilities.mean(dim=0))


def logit_entropy(logits: Tensor) -> Tensor:
    """Entropy of each row of logits (n, k), exact and finite however certain it is."""
    logs = F.log_softmax(logits, dim=1)
    return -(logs.exp() * logs).sum(dim=1)


def mean_prediction_entropy(logits: Tensor) -> Tensor:
    """Entropy of the mean prediction of logits (n, k), exact and finite however certain all are."""
    # log p̄ = logsumexp over rows of log p, less log n
    logs = torch.logsumexp(F.log_softmax(logits, dim=1), dim=0) - math.log(len(logits))
    return -(logs.exp() * logs).sum()
