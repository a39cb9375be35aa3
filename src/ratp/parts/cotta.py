"""What CoTTA (CVPR 2022) computes: cross-entropy with a teacher, and weights put back at random."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def teacher_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """−Σ softmax(target)·log softmax(logits), mean over the rows; both are logits of shape (n, classes)."""
    return -(target.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1).mean()


def teacher_loss(student: Tensor, teacher: Tensor, *, symmetric: bool = False) -> Tensor:
    """Distance of a student from its teacher, which learns nothing here.

    Args:
        student: Its logits, shape (n, classes).
        teacher: Its logits, of the same shape.
        symmetric: ½·CE(teacher → student) + ½·CE(student → teacher); else the former alone.
    """
    teacher = teacher.detach()
    forth = teacher_cross_entropy(student, teacher)
    return 0.5 * forth + 0.5 * teacher_cross_entropy(teacher, student) if symmetric else forth


@torch.no_grad()
def restore_(
    parameters: Iterable[Tensor], originals: Iterable[Tensor], probability: float, generator: torch.Generator
) -> None:
    """Puts every number back to its original with some probability, each on its own, in place."""
    for parameter, original in zip(parameters, originals, strict=True):
        chance = torch.rand(parameter.shape, generator=generator, device=generator.device)
        # θ ← b·θ⁰ + (1 − b)·θ,  b ~ Bernoulli(p)
        parameter.copy_(torch.where(chance < probability, original, parameter))
