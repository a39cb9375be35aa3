"""Distillation: Kullback-Leibler divergence of the student's softmax from the teacher's."""

from __future__ import annotations

from torch import Tensor


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """Σ_k q_k (log q_k − log p_k) with the teacher's q and the student's p, mean over the rows; 0 without any."""
    if not len(student):
        return student.sum()
    log_p, log_q = student.log_softmax(dim=1), teacher.log_softmax(dim=1)
    return (log_q.exp() * (log_q - log_p)).sum(dim=1).mean()
