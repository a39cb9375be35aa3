"""Learning from labels that are partly wrong: SelNLPL ("NLNL: Negative Learning for Noisy Labels", ICCV 2019).

A label that may be wrong says little about which class an image has, but a random other class is rarely the right one.
Negative learning (NL) lowers the probability of such a complementary class ȳ:

    −log(1 − p_ȳ)

Selective negative learning (SelNL) leaves out samples whose label y has become improbable, p_y < 1/K: their label is
probably wrong. Selective positive learning (SelPL) is cross-entropy with the labels of which the network is sure by
then, p_y ≥ γ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ratp.config import switch

# Bounds of 1 − p_ȳ inside the logarithm (published code).
SMALLEST = 1e-5


@dataclass(frozen=True)
class SelNLPLConfig:
    """Switches of SelNLPL."""

    order: Literal["thirds", "sum"] = switch(
        "thirds", "NL, SelNL and SelPL for a third of the phase each, or SelNL and SelPL together from its start"
    )
    history: int = switch(3, "epochs over which the probability of a label is averaged; published: 10", minimum=1)
    threshold: float = switch(
        0.5, "γ, mean probability of its label from which a sample learns it", minimum=0, maximum=1
    )
    weighted: bool = switch(True, "negative learning weighs rare labels higher (published code)")


class Selection(NamedTuple):
    """Which samples learn in which way, bool of shape (n,)."""

    negative: Tensor
    positive: Tensor


def complementary_labels(labels: Tensor, classes: int, generator: torch.Generator) -> Tensor:
    """Draws a class other than the label for every sample, shape (n,); with one class there is none, so it is that."""
    other = torch.randint(1, max(classes, 2), labels.shape, generator=generator, device=labels.device)
    # ȳ = (y + U{1..K−1}) mod K
    return (labels + other) % classes


def negative_losses(logits: Tensor, complementary: Tensor) -> Tensor:
    """Computes −log(1 − p_ȳ) of logits (n, k) and complementary labels (n,), shape (n,)."""
    probability = logits.float().softmax(dim=1).gather(1, complementary[:, None]).squeeze(1)
    return -(1 - probability).clamp(SMALLEST, 1).log()


def rarity(labels: Tensor, classes: int) -> Tensor:
    """Computes the size of the largest class relative to each sample's own, n_max/n_y, shape (n,)."""
    sizes = labels.bincount(minlength=classes)
    return (sizes.max() / sizes.clamp_min(1))[labels]


def select(confidence: Tensor, classes: int, progress: float, config: SelNLPLConfig) -> Selection:
    """Returns which samples learn negatively and positively.

    Args:
        confidence: Mean probability of each sample's label over the last epochs, shape (n,).
        classes: K. With one class, no complementary class exists, so no sample learns negatively.
        progress: Share of the phase that is done, from 0 up to but not including 1.
        config: Switches.
    """
    every = torch.full_like(confidence, classes > 1, dtype=torch.bool)
    possible, sure = (confidence >= 1 / classes) & every, confidence >= config.threshold
    if config.order == "sum":
        return Selection(possible, sure)
    third = int(3 * progress)
    nobody = torch.zeros_like(every)
    return (Selection(every, nobody), Selection(possible, nobody), Selection(nobody, sure))[third]
