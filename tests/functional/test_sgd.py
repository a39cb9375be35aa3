import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ratp.functional import optim
from ratp.functional.optim import SGDConfig, StageSGD, lr_multiplier
from ratp_reference import sgd as reference


@pytest.mark.parametrize(
    ("epoch", "multiplier"), [(0, 1.0), (1, 1.0), (2, 0.806), (10, 0.354), (20, 0.224), (29, 0.174)]
)
def test_published_multipliers(epoch, multiplier):
    assert lr_multiplier("inverse", epoch, 30) == pytest.approx(multiplier, abs=5e-4)


def test_mean_of_the_published_multipliers():
    assert sum(lr_multiplier("inverse", e, 30) for e in range(30)) / 30 == pytest.approx(0.371, abs=5e-4)


@given(epochs=st.integers(1, 100))
def test_the_rate_never_rises_and_never_vanishes(epochs):
    multipliers = [lr_multiplier("inverse", epoch, epochs) for epoch in range(epochs)]
    assert multipliers == sorted(multipliers, reverse=True)
    assert multipliers[0] == 1
    assert multipliers[-1] > 11**-0.75


@given(epoch=st.integers(0, 100))
def test_a_constant_schedule_is_constant(epoch):
    assert lr_multiplier("constant", epoch, 30) == 1


@pytest.mark.parametrize("schedule", ["inverse", "constant"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4, 0.1])
def test_updates_follow_rate_momentum_and_weight_decay(schedule, momentum, weight_decay):
    weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimiser = StageSGD([weight], 0.1, 6, SGDConfig(momentum, weight_decay, schedule))
    slopes, rates, found = [], [], []
    for epoch in range(6):
        rate = optimiser.begin_epoch(epoch)
        assert rate == pytest.approx(0.1 * lr_multiplier(schedule, epoch, 6))
        for step in range(2):
            slope = 1.0 + epoch + 0.5 * step
            optimiser.minimise(slope * weight)
            slopes.append(slope)
            rates.append(rate)
            found.append(weight.item())
    expected = reference.sgd_path(2.0, slopes, rates, momentum, weight_decay)
    assert found == pytest.approx(expected, rel=1e-12)


def test_defaults_are_those_of_the_published_code():
    """One update of w = 2 by the slope 3: 2 − 0.01·(3 + 5e-4·2), then the same again without momentum."""
    weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimiser = StageSGD([weight], 0.01, 30, SGDConfig())
    optimiser.begin_epoch(0)
    optimiser.minimise(3 * weight)
    assert weight.item() == pytest.approx(2 - 0.01 * 3.001, rel=1e-12)
    after_one = weight.item()
    optimiser.minimise(3 * weight)
    assert weight.item() == pytest.approx(after_one - 0.01 * (3 + 5e-4 * after_one), rel=1e-12)


def test_gradients_of_one_step_do_not_reach_the_next():
    first, second = (nn.Parameter(torch.tensor(1.0)) for _ in range(2))
    optimiser = StageSGD([first, second], 0.1, 1, SGDConfig(weight_decay=0.0))
    optimiser.begin_epoch(0)
    optimiser.minimise(first + second)
    optimiser.minimise(1.0 * second)
    assert first.item() == pytest.approx(0.9)
    assert second.item() == pytest.approx(0.8)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_rate_on_the_device_gives_the_same_numbers(momentum):
    """As on CUDA, where a captured update reads it."""
    ends = []
    for on_device in (False, True):
        weights = [nn.Parameter(torch.linspace(-1, 2, 7, dtype=torch.float64)) for _ in range(2)]
        optimiser = StageSGD(weights, 0.1, 4, SGDConfig(momentum=momentum))
        assert optimiser._rate is None
        if on_device:
            optimiser._rate = place = torch.zeros((), dtype=torch.float64)
        for epoch in range(4):
            rate = optimiser.begin_epoch(epoch)
            assert not on_device or (optimiser._rate is place and place.item() == rate)
            optimiser.minimise((weights[0] ** 3 + weights[1] ** 2).sum())
        ends.append([weight.detach() for weight in weights])
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("schedule", ["inverse", "per-step"])
def test_one_kernel_gives_the_same_numbers(schedule, momentum, nesterov, monkeypatch):
    """For groups with factors, unused parameters and gradients in another memory layout, too."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ends = []
    for fused in (False, True):
        monkeypatch.setattr(optim, "_fusable", lambda tensors, fused=fused: fused)
        source = torch.Generator().manual_seed(0)
        shapes = [(4, 3, 5, 5), (7,), (6, 3, 1, 1), (2, 5)]
        weights = [nn.Parameter(torch.randn(*shape, generator=source).to(device)) for shape in shapes]
        groups = [(weights[:2], 1.0), (weights[2:], 0.1)]
        optimiser = StageSGD(groups, 0.1, 4, SGDConfig(momentum, 0.01, schedule, nesterov), 2)
        optimiser._rate = torch.zeros((), device=device) if optimiser._rate is None else optimiser._rate
        for epoch in range(4):
            optimiser.begin_epoch(epoch)
            for _ in range(2):
                gradients = [torch.randn(*shape, generator=source).to(device) for shape in shapes[:3]]
                gradients[0] = gradients[0].to(memory_format=torch.channels_last)
                optimiser.update([*gradients, None])
        ends.append([weight.detach() for weight in weights])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
