"""Optimisers of one stage: SGD with several schedules, Adam, and the moving average of a network's weights.

``torch.optim`` is not used, because its first optimiser takes seconds to import compilers that nothing here needs.
Updates can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ratp._core.state import Stateful
from ratp.config import switch
from ratp.errors import ConfigError

Schedule = Literal["inverse", "constant", "per-step"]
Group = tuple[Iterable[nn.Parameter], float]


@dataclass(frozen=True)
class SGDConfig:
    """Switches of the optimiser; defaults are those of RaTP's published code."""

    momentum: float = switch(
        0.0, "momentum; RaTP's paper says 0.9, its code passes none", doc_ref=1, minimum=0, below=1
    )
    weight_decay: float = switch(5e-4, "weight decay on all parameters", doc_ref=39, minimum=0)
    schedule: Schedule = switch(
        "inverse",
        "rate over a stage: (1+10e/E)^−0.75 by epoch (published code), the same by step, or constant",
        doc_ref=2,
    )
    nesterov: bool = switch(False, "Nesterov's momentum")


# A preset of methods that train the source by plain cross-entropy: momentum, as the appendix of RaTP's paper has it.
WITH_MOMENTUM: Mapping[str, Mapping[str, Any]] = {"momentum": {"sgd.momentum": 0.9, "sgd.nesterov": True}}


def lr_multiplier(schedule: Schedule, epoch: int, epochs: int) -> float:
    """Returns the factor on the initial learning rate during ``epoch`` (counted from 0).

    ``inverse`` sets the rate after each epoch from the index of the epoch just finished, so epochs 0 and 1
    both run at the full rate. ``per-step`` follows the same curve within epochs; this is its value at their start.
    """
    if schedule == "constant":
        return 1.0
    place = epoch if schedule == "per-step" else max(epoch - 1, 0)
    # lr = lr0 · (1 + 10·e/E)^−0.75
    return float((1 + 10 * place / epochs) ** -0.75)


class StageSGD(Stateful):
    """SGD for one stage; create a new one for every domain.

    On CUDA the rate is a tensor on the device, so that a captured update follows it.

    Args:
        parameters: What to train, but for what needs no gradient; or groups, each with a factor on the rate.
        lr: Initial rate.
        epochs: Epochs of the stage.
        config: Switches.
        steps: Steps per epoch, which the schedule ``per-step`` needs.
    """

    saved = "_initial_lr _lr _velocities _rate _done"

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
            members = [parameter for parameter in group if parameter.requires_grad]
            self._parameters += members
            self._factors += [factor] * len(members)
        self._velocities = [torch.zeros_like(p) for p in self._parameters] if config.momentum else []
        self._per_step = config.schedule == "per-step"
        # the rate as a tensor on the parameters' device; None where a Python number suffices
        self._rate: Tensor | None = None
        if self._parameters and (self._per_step or self._parameters[0].is_cuda):
            self._rate = self._parameters[0].new_full((), lr)
        self._done = torch.zeros_like(self._rate) if self._rate is not None else None

    def begin_epoch(self, epoch: int) -> float:
        """Sets and returns the learning rate of ``epoch``."""
        return self.set_rate(self._initial_lr * lr_multiplier(self._config.schedule, epoch, self._epochs))

    def set_rate(self, lr: float) -> float:
        """Sets and returns the learning rate; the schedule ``per-step`` overrides it in every step."""
        self._lr = lr
        if self._rate is not None and not self._per_step:
            self._rate.fill_(lr)
        return lr

    def minimise(self, loss: Tensor) -> None:
        """Updates the parameters the loss depends on."""
        self.update(torch.autograd.grad(loss, self._parameters, allow_unused=True))

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """Updates the parameters by gradients in their order; None leaves that parameter unchanged."""
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
        velocities = [self._velocities[index] for index in used if self._velocities]
        rate = self._rate if self._rate is None or factor == 1 else self._rate * factor
        if rate is not None and _fusable([rate, *parameters]):
            torch._fused_sgd_(
                parameters,
                [_laid_out(gradient, p) for gradient, p in zip(gradients, parameters, strict=True)],
                velocities,
                weight_decay=self._config.weight_decay,
                momentum=self._config.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=self._config.nesterov and bool(velocities),
                maximize=False,
                is_first_step=False,
            )
            return
        # g ← ∇L + λθ
        steps = list(torch._foreach_add(gradients, parameters, alpha=self._config.weight_decay))
        if velocities:
            # v ← μv + g;  Nesterov: g + μv in place of v
            torch._foreach_mul_(velocities, self._config.momentum)
            torch._foreach_add_(velocities, steps)
            if self._config.nesterov:
                steps = list(torch._foreach_add(steps, velocities, alpha=self._config.momentum))
            else:
                steps = velocities
        # θ ← θ − ηv
        if rate is None:
            torch._foreach_add_(parameters, steps, alpha=-self._lr * factor)
        else:
            torch._foreach_sub_(parameters, torch._foreach_mul(steps, rate))


def _fusable(tensors: Sequence[Tensor]) -> bool:
    """Whether one kernel can read and update all of them."""
    return all(tensor.is_cuda and tensor.dtype == torch.float32 for tensor in tensors)


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Returns a gradient in the memory layout of its parameter, which the kernel needs."""
    if gradient.squeeze().stride() == parameter.squeeze().stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Adam(Stateful):
    """Adam (Kingma and Ba, 2015) at a constant rate, without weight decay; its counters are on the device."""

    saved = "_means _squares _decays"

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self._parameters: list[Tensor] = [parameter for parameter in parameters if parameter.requires_grad]
        self._lr = lr
        self._means = [torch.zeros_like(p) for p in self._parameters]
        self._squares = [torch.zeros_like(p) for p in self._parameters]
        self._decays = [torch.ones((), device=p.device) for p in self._parameters[:1] for _ in range(2)]

    def begin_epoch(self, epoch: int) -> float:
        """Returns the rate, which is the same in every epoch."""
        del epoch
        return self._lr

    def minimise(self, loss: Tensor) -> None:
        """Updates the parameters the loss depends on."""
        self.update(torch.autograd.grad(loss, self._parameters, allow_unused=True))

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """Updates the parameters by gradients in their order; None counts as zero."""
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


def cosine_multiplier(done: int, steps: int) -> float:
    """Returns the factor on the initial rate after ``done`` of ``steps`` steps: from 1 down to 0."""
    # ½·(1 + cos(π·i/I))
    return 0.5 * (1 + math.cos(math.pi * min(done, steps) / steps))


def check_step_decay(config: SGDConfig, factor: float) -> None:
    """Raises a ConfigError if a step decay is combined with a rate that changes with every step."""
    if config.schedule == "per-step" and factor != 1:
        raise ConfigError("sgd.schedule per-step cannot be combined with a step decay: set decay to 1.")


class StepDecaySGD(StageSGD):
    """SGD for one stage whose rate is multiplied by ``factor`` from a certain epoch on."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Sequence[Group],  # as for :class:`StageSGD`
        lr: float,  # at first
        epochs: int,  # of the stage
        config: SGDConfig,
        steps: int = 1,  # per epoch
        *,
        after: float,  # share of the epochs before the rate falls; at least one epoch runs at the full rate
        factor: float,  # factor on the rate from then on
    ) -> None:
        check_step_decay(config, factor)
        super().__init__(parameters, lr, epochs, config, steps)
        self._full_lr, self._factor = lr, factor
        self._falls = max(1, int(after * epochs))

    def begin_epoch(self, epoch: int) -> float:
        """Sets and returns the learning rate of ``epoch``."""
        # η₀ before the fall, η₀·factor after it
        self._initial_lr = self._full_lr * (self._factor if epoch >= self._falls else 1.0)
        return super().begin_epoch(epoch)


@torch.no_grad()
def follow_(averages: Iterable[Tensor], values: Iterable[Tensor], keep: float) -> None:
    """Moves averages towards values in place, as a mean teacher does; ``keep`` is the share of the average kept."""
    # θ̄ ← keep·θ̄ + (1 − keep)·θ
    torch._foreach_lerp_(list(averages), list(values), 1 - keep)
