"""Choosing exemplars of one class from its features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Selection = Literal["herding", "nearest"]


def choose_exemplars(features: Tensor, count: int, selection: Selection) -> Tensor:
    """Positions of at most ``count`` exemplars, most representative first, each once.

    Args:
        features: Shape (n, d), compared as they are.
        count: How many to take; a class with fewer images gives them all.
        selection: ``herding`` takes the image that brings the mean of those taken closest to the class
            mean; ``nearest`` takes the images closest to the class mean.
    """
    features = features.float()
    mean = features.mean(dim=0)
    if selection == "nearest":
        return (features - mean).square().sum(dim=1).argsort(stable=True)[:count]
    taken = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    total = torch.zeros_like(mean)
    picks: list[Tensor] = []
    for step in range(1, min(count, len(features)) + 1):
        # argmin_i ‖ μ − (Σ_taken f + f_i)/step ‖
        distance = (mean - (total + features) / step).square().sum(dim=1)
        pick = distance.masked_fill(taken, torch.inf).argmin()
        taken[pick] = True
        total = total + features[pick]
        picks.append(pick)
    return torch.stack(picks) if picks else torch.zeros(0, dtype=torch.int64, device=features.device)
