"""MixMatch (NeurIPS 2019), and the split of a domain by certainty it starts from in SHOT++ (TPAMI 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ratp.parts.beta import beta_numbers
from ratp.parts.ranks import ranks_within


def confident_split(entropies: Tensor, predictions: Tensor, classes: int) -> Tensor:
    """Which samples count as labelled with what is predicted for them, bool of shape (n,).

    The share of samples whose entropy is below the mean is the share each predicted class gives: its samples of
    least entropy, rounded down. So a small class may give none.

    Args:
        entropies: e, shape (n,).
        predictions: Predicted class of each sample, shape (n,).
        classes: Number of classes.
    """
    entropies = entropies.double()
    below = (entropies < entropies.mean()).sum()
    sizes = predictions.bincount(minlength=classes)
    quotas = below * sizes // max(len(entropies), 1)  # ⌊PS·n_c⌋ in whole numbers
    return ranks_within(predictions, entropies.argsort(stable=True)) < quotas[predictions]


def sharpen(probabilities: Tensor, temperature: float) -> Tensor:
    """p^(1/T) over its sum, row by row; T = 1 changes nothing."""
    powers = (probabilities / probabilities.amax(dim=-1, keepdim=True)).pow(1 / temperature)
    return powers / powers.sum(dim=-1, keepdim=True)


def draw_ratio(alpha: float, generator: torch.Generator) -> Tensor:
    """λ ~ Beta(α, α), or 1 − λ if that is larger: one number, at least ½."""
    ratio = beta_numbers(alpha, alpha, 1, generator, generator.device)[0]
    return torch.maximum(ratio, 1 - ratio)


def mix(values: Tensor, ratio: Tensor, order: Tensor) -> Tensor:
    """λ·v + (1 − λ)·v in another order; λ = 1 changes nothing."""
    return ratio * values + (1 - ratio) * values[order]


def interleave(parts: Sequence[Tensor]) -> list[Tensor]:
    """Batches of one size with rows exchanged, so that each has some of all; doing it twice changes nothing.

    Row block i of the first batch changes places with row block i of batch i.
    """
    first = parts[0].clone()
    mixed = [first]
    bounds = [len(first) * i // len(parts) for i in range(len(parts) + 1)]
    for i, part in enumerate(parts[1:], start=1):
        block = slice(bounds[i], bounds[i + 1])
        other = part.clone()
        other[block] = parts[0][block]
        first[block] = part[block]
        mixed.append(other)
    return mixed


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ target·log softmax, mean over rows; targets are probabilities."""
    return -(targets * logits.log_softmax(dim=1)).sum(dim=1).mean()


def squared_error(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of probabilities."""
    return (logits.softmax(dim=1) - targets).square().mean()
