import pytest
import torch
from torch import nn

from ratp.functional.optim import Adam


def trained(make):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    minimise = make(list(network.parameters()))
    for inputs in torch.randn(25, 8, 5, dtype=torch.float64):
        minimise(network(inputs).square().mean() + network(inputs).sum())
    return [parameter.detach() for parameter in network.parameters()]


def torchs(parameters):
    optimiser = torch.optim.Adam(parameters, lr=0.01)

    def minimise(loss):
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return minimise


def test_it_is_torchs():
    ours = trained(lambda parameters: Adam(parameters, 0.01).minimise)
    for mine, theirs in zip(ours, trained(torchs), strict=True):
        # the counters of decay are single precision
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_first_step_has_the_length_of_the_rate():
    weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    Adam([weight], 0.1).minimise((weight * torch.tensor([5.0, -0.01, 0.0])).sum())
    assert weight.detach().tolist() == pytest.approx([0.9, 1.1, 1.0], abs=1e-4)


def test_parameters_without_gradient_stay():
    used, unused = (nn.Parameter(torch.tensor(1.0)) for _ in range(2))
    Adam([used, unused], 0.1).minimise(2 * used)
    assert unused.item() == 1
