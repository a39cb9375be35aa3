"""Adam (Kingma and Ba, 2015) at a constant rate, without weight decay; an update can be captured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """Adam for some parameters; counters are on the device."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self._parameters: list[Tensor] = list(parameters)
        self._lr = lr
        self._means = [torch.zeros_like(p) for p in self._parameters]
        self._squares = [torch.zeros_like(p) for p in self._parameters]
        self._decays = [torch.ones((), device=p.device) for p in self._parameters[:1] for _ in range(2)]

    def minimise(self, loss: Tensor) -> None:
        """One update of the parameters the loss depends on."""
        self.update(torch.autograd.grad(loss, self._parameters, allow_unused=True))

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """One update by given gradients; None counts as zero."""
        given = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, self._parameters, strict=True)]
        with torch.no_grad():
            # m ← β₁m + (1 − β₁)g;  v ← β₂v + (1 − β₂)g²
            torch._foreach_lerp_(self._means, given, 1 - BETA1)
            torch._foreach_mul_(self._squares, BETA2)
            torch._foreach_addcmul_(self._squares, given, given, 1 - BETA2)
            first, second = self._decays
            first.mul_(BETA1)
            second.mul_(BETA2)
            # θ ← θ − η · m/(1 − β₁ᵗ) / (√(v/(1 − β₂ᵗ)) + ε)
            roots = torch._foreach_sqrt(torch._foreach_div(self._squares, 1 - second))
            torch._foreach_add_(roots, EPSILON)
            steps = torch._foreach_div(torch._foreach_div(self._means, roots), (1 - first) / self._lr)
            torch._foreach_sub_(self._parameters, steps)
