"""Soft labels spread over a graph of samples: those of one group share theirs (MPM, CVPR 2025).

A sample i belongs to group k by s_ik, a softmax over its squared distances to the groups' prototypes. Samples that
belong to the same groups are neighbours, with the affinity

    w_ij = Σ_k s_ik·s_jk / Σ_j' s_j'k

whose rows sum to 1. Labels spread by Y ← λ·W·Y + (1 − λ)·S, which converges to Y* = (1 − λ)·(I − λW)⁻¹·S. As
W = S·D·Sᵀ with D = diag(1/Σ_j s_jk), no matrix of samples by samples is needed:

    Y* = (1 − λ)·S·(I − λ·D·Sᵀ·S)⁻¹
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.functional.numerics import full_precision, in_chunks

# Numbers per chunk of matrices, one per sample.
ROOM = 2**24


@dataclass(frozen=True)
class GraphConfig:
    """Switches of the graphs."""

    scale: float = switch(1.0, "factor on the squared distances of features of unit length", above=0)
    spread: float = switch(0.7, "λ, share of a label that comes from neighbours", minimum=0, below=1)
    moves: int = switch(1, "times that the prototypes move towards the samples of a batch", minimum=0)
    keep: float = switch(0.4, "σ, share of a prototype that such a move keeps", minimum=0, maximum=1)


def group_means(features: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Averages features (n, d) by group (n,): means (count, d), and which groups have any, bool (count,)."""
    members = F.one_hot(groups, count).to(features.dtype)
    sizes: Tensor = members.sum(dim=0)
    return members.T @ features / sizes.clamp_min(1)[:, None], sizes > 0


def soft_labels(features: Tensor, prototypes: Tensor, there: Tensor, scale: float = 1.0) -> Tensor:
    """Computes s_ik = softmax_k(−scale·‖x_i − c_k‖²), shape (n, k); 0 for groups not ``there``, bool (k,)."""
    # ‖x‖² is the same for all groups
    distances = prototypes.square().sum(dim=1) - 2 * features @ prototypes.T
    logits = (-scale * distances).masked_fill(~there, -torch.inf)
    return logits.softmax(dim=1)


def propagate(soft: Tensor, spread: float) -> Tensor:
    """Computes Y* of samples with soft labels S (n, k); rows still sum to 1."""
    products = soft.T @ soft
    spreading = _spreading(products, soft.sum(dim=0), spread)
    labels: Tensor = torch.linalg.solve(spreading, soft, left=False)
    return (1 - spread) * labels


def propagate_each(soft: Tensor, known: Tensor, spread: float) -> Tensor:
    """Computes Y* of each sample of S (n, k) in a graph of its own, which it shares with known samples (m, k)."""
    products, sizes = known.T @ known, known.sum(dim=0)

    def own(rows: slice) -> tuple[Tensor]:
        part = soft[rows]
        matrices = _spreading(products + part[:, :, None] * part[:, None, :], sizes + part, spread)
        return ((1 - spread) * torch.linalg.solve(matrices, part[:, None], left=False).squeeze(1),)

    return in_chunks(own, len(soft), max(ROOM // soft.shape[1] ** 2, 1))[0]


def _spreading(products: Tensor, sizes: Tensor, spread: float) -> Tensor:
    """Computes I − λ·D·SᵀS."""
    shares = products / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)[..., :, None]
    return torch.eye(products.shape[-1], dtype=products.dtype, device=products.device) - spread * shares


def group_shares(
    features: Tensor, known: Tensor, groups: Tensor, count: int, config: GraphConfig, *, together: bool
) -> Tensor:
    """Returns how much each sample belongs to each group, shape (n, count); rows sum to 1.

    Args:
        features: Features of the samples, shape (n, d).
        known: Features of samples whose groups are known, at least one, shape (m, d).
        groups: Their groups, shape (m,).
        count: Number of groups; nobody belongs to one without known samples.
        config: Switches.
        together: One graph of all samples, towards which the prototypes move; or one for each sample, with the known
            samples, whose prototypes stay.
    """
    with full_precision(features.device):
        features, known = F.normalize(features.float(), dim=1), F.normalize(known.float(), dim=1)
        prototypes, there = group_means(known, groups, count)
        if not together:
            own, others = (soft_labels(part, prototypes, there, config.scale) for part in (features, known))
            return propagate_each(own, others, config.spread)
        nodes = torch.cat([features, known])
        shares = propagate(soft_labels(nodes, prototypes, there, config.scale), config.spread)
        for _ in range(config.moves):
            sizes = shares.sum(dim=0)[:, None].clamp_min(torch.finfo(shares.dtype).tiny)
            # c ← σ·c + (1 − σ)·Σ_i y_i·x_i / Σ_i y_i
            prototypes = config.keep * prototypes + (1 - config.keep) * (shares.T @ nodes / sizes)
            shares = propagate(soft_labels(nodes, prototypes, there, config.scale), config.spread)
        return shares[: len(features)]
