"""Knowledge distillation: the old model's softmax as a soft target for the new one."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.parts.losses import mean_over


def distillation(student: Tensor, teacher: Tensor, valid: Tensor | None = None) -> Tensor:
    """KL(teacher ‖ student), mean over the batch, at temperature 1; 0 for an empty batch.

    Args:
        student: Logits (or features) of the model that learns, shape (n, k).
        teacher: The same of the old model; a constant, no gradient flows into it.
        valid: Which rows count, bool of shape (n,); None: all.
    """
    target = F.softmax(teacher.detach().float(), dim=1)
    # KL(q ‖ p) = Σ_k q_k (log q_k − log p_k)
    divergence = F.kl_div(F.log_softmax(student.float(), dim=1), target, reduction="none")
    return mean_over(divergence.sum(dim=1), valid)
