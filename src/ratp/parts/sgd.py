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
    """SGD for one stage: made anew with every domain."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, epochs: int, config: SGDConfig) -> None:
        self._lr, self._epochs, self._schedule = lr, epochs, config.schedule
        self._optimiser = torch.optim.SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=config.weight_decay)

    def begin_epoch(self, epoch: int) -> float:
        """Sets and returns the learning rate of ``epoch``."""
        lr = self._lr * lr_multiplier(self._schedule, epoch, self._epochs)
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        return lr

    def minimise(self, loss: Tensor) -> None:
        """One update."""
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimiser.step()
