"""Mutual information of two variables, from above: CLUB, Cheng et al., ICML 2020.

A network guesses the one, z, from the other as a normal distribution N(μ, σ²), one dimension by itself. It learns to
guess well by :func:`misfit`. The better it guesses z than the z of other samples, the more the two have in common:

    I ≤ ½ · mean_i Σ_d [ (μ_i − z_π(i))²/σ_i² − (μ_i − z_i)²/σ_i² ]

with a random permutation π.
"""

from __future__ import annotations

import torch
from torch import Tensor


def misfit(mean: Tensor, log_variance: Tensor, samples: Tensor) -> Tensor:
    """How badly N(μ, σ²) guesses the samples: the mean of (μ − z)²/σ² + log σ², twice −log p less a constant.

    Args:
        mean: μ, shape (n, d).
        log_variance: log σ², shape (n, d).
        samples: z, shape (n, d).
    """
    return ((mean - samples).square() * (-log_variance).exp() + log_variance).mean()


def information_bound(mean: Tensor, log_variance: Tensor, samples: Tensor, order: Tensor) -> Tensor:
    """The bound; 0 if the order is the samples' own.

    Args:
        mean: μ, shape (n, d).
        log_variance: log σ², shape (n, d).
        samples: z, shape (n, d).
        order: π, shape (n,).
    """
    # by a matrix, because an index's gradient sorts
    rows = (order[:, None] == torch.arange(len(order), device=order.device)).to(samples.dtype)
    own, strange = (mean - samples).square(), (mean - rows @ samples).square()
    return ((strange - own) * (-log_variance).exp()).sum(dim=1).mean() / 2


def random_order(count: int, generator: torch.Generator) -> Tensor:
    """A permutation, drawn where the generator is and not read back."""
    return torch.rand(count, generator=generator, device=generator.device).argsort()
