"""A rate that falls once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ratp.errors import ConfigError
from ratp.functional.optim import SGDConfig, StageSGD, StepDecaySGD

CONSTANT = SGDConfig(momentum=0.9, schedule="constant", nesterov=True)


def rates(epochs, config=CONSTANT, after=0.8, factor=0.1):
    optimiser = StepDecaySGD([nn.Parameter(torch.ones(1))], 0.5, epochs, config, after=after, factor=factor)
    return [optimiser.begin_epoch(epoch) for epoch in range(epochs)]


@pytest.mark.parametrize(("epochs", "full"), [(30, 24), (12, 9), (2, 1), (1, 1)])
def test_it_falls_after_its_share_of_the_epochs(epochs, full):
    assert rates(epochs) == pytest.approx([0.5] * full + [0.05] * (epochs - full))


def test_it_falls_on_top_of_another_schedule():
    plain = StageSGD([nn.Parameter(torch.ones(1))], 0.5, 4, SGDConfig())
    expected = [plain.begin_epoch(epoch) * (0.1 if epoch >= 2 else 1) for epoch in range(4)]
    assert rates(4, SGDConfig(), after=0.5) == pytest.approx(expected)


def test_updates_follow_the_rate_and_keep_their_momentum():
    parameter = nn.Parameter(torch.ones(1))
    optimiser = StepDecaySGD([parameter], 0.5, 2, CONSTANT, after=0.5, factor=0.1)
    reference = nn.Parameter(torch.ones(1))
    torchs = torch.optim.SGD([reference], 0.5, momentum=0.9, weight_decay=5e-4, nesterov=True)
    for epoch in range(2):
        optimiser.begin_epoch(epoch)
        torchs.param_groups[0]["lr"] = 0.5 if epoch == 0 else 0.05
        for _ in range(3):
            optimiser.minimise((parameter**2).sum())
            torchs.zero_grad()
            (reference**2).sum().backward()
            torchs.step()
    torch.testing.assert_close(parameter, reference)


def test_a_rate_of_every_step_cannot_fall_as_well():
    with pytest.raises(ConfigError, match="set decay to 1"):
        rates(4, SGDConfig(schedule="per-step"))
    assert len(rates(4, SGDConfig(schedule="per-step"), factor=1)) == 4
