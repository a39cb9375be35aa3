"""Stochastic gradient descent over one stage, with the rate set epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ratp.config import switch

Schedule = Literal["inverse", "constant"]


@dataclass(frozen=True)
class SGDConfig:
    """Switches of the optimiser; defaults are those of RaTP's published code."""

    momentum: float = switch(0.0, "momentum; the paper says 0.9, its code passes none", row=1, minimum=0, below=1)
    weight_decay: float = switch(5e-4, "weight decay on all parameters", row=39, minimum=0)
    schedule: Schedule = switch("inverse", "rate over a stage: (1+10e/E)^−0.75 (published code) or constant", row=2)


def lr_multiplier(schedule: Schedule, epoch: int, epochs: int) -> float:
    """The factor on the initial learning rate during ``epoch`` (counted from 0).

    ``inverse`` sets the rate after each epoch from the index of the epoch just finished, so epochs 0 and 1
    both run at the full rate.
    """
    if schedule == "constant":
        return 1.0
    finished = max(epoch - 1, 0)
    # lr = lr0 · (1 + 10·e/E)^−0.75
    return float((1 + 10 * finished / epochs) ** -0.75)


class StageSGD:
    """SGD for one stage: made anew with every domain.

    ``torch.optim`` is not used: making its first optimiser takes seconds, for compilers that are not needed. On
    CUDA the rate is a number on the device, so that a captured update follows it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, epochs: int, config: SGDConfig) -> None:
        self._initial_lr, self._epochs, self._config = lr, epochs, config
        self._lr = lr
        self._parameters: list[Tensor] = list(parameters)
        self._rate = self._device_rate()
        self._velocities = [torch.zeros_like(p) for p in self._parameters] if config.momentum else []

    def begin_epoch(self, epoch: int) -> float:
        """Sets and returns the learning rate of ``epoch``."""
        self._lr = self._initial_lr * lr_multiplier(self._config.schedule, epoch, self._epochs)
        if self._rate is not None:
            self._rate.fill_(self._lr)
        return self._lr

    def minimise(self, loss: Tensor) -> None:
        """One update of the parameters the loss depends on."""
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        used = [index for index, gradient in enumerate(gradients) if gradient is not None]
        parameters = [self._parameters[index] for index in used]
        with torch.no_grad():
            # g ← ∇L + λθ
            steps = torch._foreach_add([gradients[i] for i in used], parameters, alpha=self._config.weight_decay)
            if self._config.momentum:
                # v ← μv + g
                velocities = [self._velocities[index] for index in used]
                torch._foreach_mul_(velocities, self._config.momentum)
                torch._foreach_add_(velocities, steps)
                steps = tuple(velocities)
            # θ ← θ − ηv
            if self._rate is None:
                torch._foreach_add_(parameters, steps, alpha=-self._lr)
            else:
                torch._foreach_sub_(parameters, torch._foreach_mul(steps, self._rate))

    def _device_rate(self) -> Tensor | None:
        """A place for the rate beside the parameters; None on processors, where the host's number does."""
        if not self._parameters or not self._parameters[0].is_cuda:
            return None
        return torch.full((), self._lr, dtype=self._parameters[0].dtype, device=self._parameters[0].device)
