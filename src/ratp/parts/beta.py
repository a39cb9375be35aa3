"""Beta-distributed random numbers from a generator, without reading anything back from the device.

Torch's own sampler takes no generator. This is Jöhnk's method: of uniform u and v, x = u^{1/a} and y = v^{1/b} are
kept if x + y ≤ 1, and x/(x + y) is then beta-distributed. A fixed number of pairs is drawn for each number wanted, so
many that there is practically always one to keep, and the first such pair counts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Chance that no pair is kept for a number; it then comes from a pair that should have been thrown away.
FAILURE = 1e-12


def beta_numbers(a: float, b: float, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Numbers drawn from Beta(a, b), shape (count,), float32.

    Meant for small a and b: the number of pairs grows quickly with them, 7 for 0.1, 40 for 1, 152 for 2.

    Args:
        a: First parameter.
        b: Second parameter.
        count: How many.
        generator: Where to draw from; None: torch's own.
        device: Where the generator is, and the numbers are to be.
    """
    uniform = torch.rand(2, _pairs(a, b), count, generator=generator, device=device)
    # In logarithms, for u^10 is soon too small: log x = log(u)/a, with u in (0, 1]
    log_x, log_y = (1 - uniform[0]).log() / a, (1 - uniform[1]).log() / b
    kept = torch.logaddexp(log_x, log_y) <= 0
    first = kept.to(torch.uint8).argmax(dim=0, keepdim=True)
    # x/(x + y) = σ(log x − log y)
    return (log_x - log_y).gather(0, first).squeeze(0).sigmoid()


def _pairs(a: float, b: float) -> int:
    # P(x + y ≤ 1) = Γ(1+a)·Γ(1+b)/Γ(1+a+b)
    kept = math.exp(math.lgamma(1 + a) + math.lgamma(1 + b) - math.lgamma(1 + a + b))
    return max(1, math.ceil(math.log(FAILURE) / math.log1p(-kept)))
