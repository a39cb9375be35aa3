"""Several predictions of the same samples become one, weighted by how certain each of them is."""

from __future__ import annotations

import torch
from torch import Tensor


def entropies(logs: Tensor) -> Tensor:
    """Computes the entropy over the last dimension from log-probabilities, which must be finite."""
    return -(logs.exp() * logs).sum(dim=-1)


def certainty_weights(logs: Tensor) -> Tensor:
    """Computes logarithms of the weights ω = softmax_h(−H(p_h)), shape (h, n).

    ``logs`` are the log-probabilities of h predictions, shape (h, n, k).
    """
    return (-entropies(logs)).log_softmax(dim=0)


def fuse(logs: Tensor, log_weights: Tensor | None = None) -> Tensor:
    """Computes log Σ_h ω_h·p_h, shape (n, k), from log-probabilities (h, n, k).

    ``log_weights`` are log ω, shape (h, n), and the weights of a sample sum to 1; None: :func:`certainty_weights`.
    """
    weights = certainty_weights(logs) if log_weights is None else log_weights
    return torch.logsumexp(logs + weights[:, :, None], dim=0)
