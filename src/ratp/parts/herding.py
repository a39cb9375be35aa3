"""Choosing exemplars of one class from its features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ratp.parts.chunks import in_chunks
from ratp.parts.exact import full_precision

Selection = Literal["herding", "nearest"]

# From so many images on, herding looks closely at a few of them only.
MANY = 1024
SHORTLIST = 32
# Numbers of a chunk of features.
ROOM = 2**24


def choose_exemplars(features: Tensor, count: int, selection: Selection) -> Tensor:
    """Positions of at most ``count`` exemplars, most representative first, each once.

    Args:
        features: Shape (n, d), compared as they are.
        count: How many to take; a class with fewer images gives them all.
        selection: ``herding`` takes the image that brings the mean of those taken closest to the class
            mean; ``nearest`` takes the images closest to the class mean.
    """
    features = features.float()
    count = min(count, len(features))
    mean = features.mean(dim=0)
    if selection == "nearest":
        return _distances(features, mean).argsort(stable=True)[:count]
    if len(features) >= MANY:
        with full_precision(features.device):
            picks, sure = _herd_by_shortlist(features, mean, count)
        if bool(sure):
            return picks
    return _herd(features, mean, count)


def _herd(features: Tensor, mean: Tensor, count: int) -> Tensor:
    """Looks at all images for every pick."""
    taken = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    total = torch.zeros_like(mean)
    picks = torch.zeros(count, dtype=torch.int64, device=features.device)
    for step in range(1, count + 1):
        # argmin_i ‖ μ − (Σ_taken f + f_i)/step ‖
        pick = _distances(features, mean, total, step).masked_fill(taken, torch.inf).argmin(dim=0, keepdim=True)
        taken.index_fill_(0, pick, True)
        total = total + features[pick][0]
        picks[step - 1 : step] = pick
    return picks


def _herd_by_shortlist(features: Tensor, mean: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same picks for one product of a matrix and a vector each, and whether they are surely the same.

    With v = step·μ − Σ_taken f the distances are in the order of ‖f_i‖² − 2 v·f_i. What is best by this is looked at
    again, as rounding may have changed the order; what cannot have been best, however all was rounded, is not.
    """
    taken = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    total = torch.zeros_like(mean)
    picks = torch.zeros(count, dtype=torch.int64, device=features.device)
    sure = torch.ones((), dtype=torch.bool, device=features.device)
    norms = torch.linalg.vector_norm(features, dim=1)
    squares, longest = norms.square(), norms.amax()
    for step in range(1, count + 1):
        v = step * mean - total
        score = torch.addmv(squares, features, v, alpha=-2).masked_fill_(taken, torch.inf)
        best = score.topk(SHORTLIST + 1, largest=False)
        # Both ways err by less than (d + 16·step + 8)·ε·(‖v‖ + max ‖f‖)², and twice that can part them.
        error = torch.finfo(features.dtype).eps * (features.shape[1] + 16 * step + 8) * (v.norm() + longest).square()
        sure &= best.values[-1] > best.values[0] + 2 * error
        shortlist = best.indices[:SHORTLIST].sort().values
        distance = _distances(features[shortlist], mean, total, step).masked_fill(taken[shortlist], torch.inf)
        pick = shortlist[distance.argmin(dim=0, keepdim=True)]
        taken.index_fill_(0, pick, True)
        total = total + features[pick][0]
        picks[step - 1 : step] = pick
    return picks, sure


def _distances(features: Tensor, mean: Tensor, total: Tensor | None = None, step: int = 1) -> Tensor:
    """Squared distances of the class mean from every image, or from the mean of those taken and it."""

    def of(rows: slice) -> tuple[Tensor]:
        if total is None:
            return ((features[rows] - mean).square().sum(dim=1),)
        return ((mean - (total + features[rows]) / step).square().sum(dim=1),)

    return in_chunks(of, len(features), max(ROOM // max(features.shape[1], 1), 1))[0]
