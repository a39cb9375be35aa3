"""Stochastic gradient descent whose rate falls once in a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ratp.errors import ConfigError
from ratp.parts.sgd import Group, SGDConfig, StageSGD


def check_step_decay(config: SGDConfig, factor: float) -> None:
    """Checks that a rate can fall.

    Args:
        config: Switches of the optimiser.
        factor: On the rate once it has fallen.

    Raises:
        ConfigError: If the rate changes with every step anyway.
    """
    if config.schedule == "per-step" and factor != 1:
        raise ConfigError("a rate that follows sgd.schedule per-step cannot fall once as well: set decay to 1.")


class StepDecaySGD(StageSGD):
    """SGD for one stage, whose rate is multiplied by ``factor`` from a certain epoch on.

    Args:
        parameters: As for :class:`StageSGD`.
        lr: Initial rate.
        epochs: Epochs of the stage.
        config: Switches.
        after: Share of the epochs before the rate falls; at least one epoch runs at the full rate.
        factor: On the rate from then on.

    Raises:
        ConfigError: If the rate changes with every step anyway, and is to fall.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Sequence[Group],
        lr: float,
        epochs: int,
        config: SGDConfig,
        *,
        after: float,
        factor: float,
        steps: int = 1,
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
