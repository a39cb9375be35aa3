"""Stochastic gradient descent over one stage, with the rate set epoch by epoch or step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ratp.config import switch

Schedule = Literal["inverse", "constant", "per-step"]
Group = tuple[Iterable[nn.Parameter], float]


@dataclass(frozen=True)
class SGDConfig:
    """Switches of the optimiser; defaults are those of RaTP's published code."""

    momentum: float = switch(0.0, "momentum; RaTP's paper says 0.9, its code passes none", row=1, minimum=0, below=1)
    weight_decay: float = switch(5e-4, "weight decay on all parameters", row=39, minimum=0)
    schedule: Schedule = switch(
        "inverse", "rate over a stage: (1+10e/E)^−0.75 by epoch (published code), the same by step, or constant", row=2
    )
    nesterov: bool = switch(False, "Nesterov's momentum")


def lr_multiplier(schedule: Schedule, epoch: int, epochs: int) -> float:
    """The factor on the initial learning rate during ``epoch`` (counted from 0).

    ``inverse`` sets the rate after each epoch from the index of the epoch just finished, so epochs 0 and 1
    both run at the full rate. ``per-step`` follows the same curve within epochs; this is its value at their start.
    """
    if schedule == "constant":
        return 1.0
    if schedule == "per-step":
        return float((1 + 10 * epoch / epochs) ** -0.75)
    finished = max(epoch - 1, 0)
    # lr = lr0 · (1 + 10·e/E)^−0.75
    return float((1 + 10 * finished / epochs) ** -0.75)


class StageSGD:
    """SGD for one stage: made anew with every domain.

    ``torch.optim`` is not used: making its first optimiser takes seconds, for compilers that are not needed. On
    CUDA the rate is a number on the device, so that a captured update follows it.

    Args:
        parameters: What to train; or groups of parameters, each with a factor on the rate.
        lr: Initial rate.
        epochs: Epochs of the stage.
        config: Switches.
        steps: Steps of an epoch, which the schedule ``per-step`` needs.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Sequence[Group],
        lr: float,
        epochs: int,
        config: SGDConfig,
        steps: int = 1,
    ) -> None:
        self._initial_lr, self._epochs, self._config, self._total = lr, epochs, config, epochs * steps
        self._lr = lr
        self._parameters: list[Tensor] = []
        self._factors: list[float] = []
        for item in parameters:
            group, factor = ((item,), 1.0) if isinstance(item, nn.Parameter) else item
            members = list(group)
            self._parameters += members
            self._factors += [factor] * len(members)
        self._velocities = [torch.zeros_like(p) for p in self._parameters] if config.momentum else []
        self._per_step = config.schedule == "per-step"
        self._rate = self._rate_tensor()
        self._done = torch.zeros_like(self._rate) if self._rate is not None else None

    def begin_epoch(self, epoch: int) -> float:
        """Sets and returns the learning rate of ``epoch``."""
        return self.set_rate(self._initial_lr * lr_multiplier(self._config.schedule, epoch, self._epochs))

    def set_rate(self, lr: float) -> float:
        """Sets and returns the learning rate; one that follows every step sets itself."""
        self._lr = lr
        if self._rate is not None and not self._per_step:
            self._rate.fill_(lr)
        return lr

    def minimise(self, loss: Tensor) -> None:
        """One update of the parameters the loss depends on."""
        self.update(torch.autograd.grad(loss, self._parameters, allow_unused=True))

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """One update by given gradients, in the order of the parameters; None: leave that one alone."""
        with torch.no_grad():
            if self._per_step and self._rate is not None and self._done is not None:
                # η = η₀ · (1 + 10·i/I)^−0.75
                self._rate.copy_((1 + 10 / self._total * self._done).pow(-0.75) * self._initial_lr)
                self._done += 1
            for factor in dict.fromkeys(self._factors):
                used = [
                    index
                    for index, gradient in enumerate(gradients)
                    if gradient is not None and self._factors[index] == factor
                ]
                if used:
                    self._update_group([gradients[index] for index in used], used, factor)  # type: ignore[misc]

    def _update_group(self, gradients: list[Tensor], used: list[int], factor: float) -> None:
        parameters = [self._parameters[index] for index in used]
        # g ← ∇L + λθ
        steps = list(torch._foreach_add(gradients, parameters, alpha=self._config.weight_decay))
        if self._config.momentum:
            # v ← μv + g;  Nesterov: g + μv in place of v
            velocities = [self._velocities[index] for index in used]
            torch._foreach_mul_(velocities, self._config.momentum)
            torch._foreach_add_(velocities, steps)
            if self._config.nesterov:
                steps = list(torch._foreach_add(steps, velocities, alpha=self._config.momentum))
            else:
                steps = velocities
        # θ ← θ − ηv
        if self._rate is None:
            torch._foreach_add_(parameters, steps, alpha=-self._lr * factor)
        else:
            torch._foreach_sub_(parameters, torch._foreach_mul(steps, self._rate * factor))

    def _rate_tensor(self) -> Tensor | None:
        """A place for the rate beside the parameters; None where the host's number does."""
        if not self._parameters or not (self._per_step or self._parameters[0].is_cuda):
            return None
        return torch.full((), self._lr, dtype=self._parameters[0].dtype, device=self._parameters[0].device)
