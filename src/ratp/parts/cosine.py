"""Stochastic gradient descent whose rate falls along half a cosine over a known number of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ratp.parts.sgd import Group, SGDConfig, StageSGD


def cosine_multiplier(done: int, steps: int) -> float:
    """The factor on the initial rate after ``done`` of ``steps`` steps: from 1 down to 0."""
    # ½·(1 + cos(π·i/I))
    return 0.5 * (1 + math.cos(math.pi * min(done, steps) / steps))


class CosineSGD(StageSGD):
    """SGD for one pass; the rate is constant until :meth:`begin_step` is told how far the pass is.

    Args:
        groups: What to train, each with a factor on the rate.
        lr: Initial rate.
        config: Switches; the schedule is of no effect.
    """

    def __init__(self, groups: Sequence[Group], lr: float, config: SGDConfig) -> None:
        super().__init__(groups, lr, 1, replace(config, schedule="constant"))

    def begin_step(self, done: int, steps: int) -> float:
        """Sets and returns the rate of the next step, when ``done`` of ``steps`` are made."""
        return self.set_rate(self._initial_lr * cosine_multiplier(done, steps))
