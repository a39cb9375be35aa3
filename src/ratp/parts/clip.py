"""A bound on the length of a gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_norm(gradients: list[Tensor], largest: float) -> list[Tensor]:
    """The gradients, all scaled alike so that their length together is at most ``largest``."""
    length = torch.stack(torch._foreach_norm(gradients)).norm()
    # min(1, largest/‖g‖)
    return list(torch._foreach_mul(gradients, (largest / length.clamp_min(1e-30)).clamp(max=1)))
