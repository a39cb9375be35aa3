import pytest
import torch
from scipy import stats

from ratp.functional.numerics import beta_numbers

CPU = torch.device("cpu")


def numbers(a, b, count=20_000, seed=0):
    return beta_numbers(a, b, count, torch.Generator().manual_seed(seed), CPU)


@pytest.mark.parametrize(("a", "b"), [(0.1, 0.1), (0.75, 0.75), (1.0, 1.0), (0.3, 1.5), (1.9, 1.9)])
def test_they_are_distributed_as_they_should(a, b):
    samples = numbers(a, b).double()
    assert samples.min() >= 0
    assert samples.max() <= 1
    assert samples.mean().item() == pytest.approx(a / (a + b), abs=0.015)
    assert samples.var().item() == pytest.approx(stats.beta.var(a, b), abs=0.01)
    # The largest gap between drawn and true distribution; close to 1, single precision has few numbers left.
    ranked = samples.sort().values
    gaps = torch.arange(1, len(samples) + 1) / len(samples) - torch.from_numpy(stats.beta.cdf(ranked.numpy(), a, b))
    assert gaps[ranked < 1 - 1e-4].abs().max() < 0.013


@pytest.mark.parametrize("edge", [1e-6, 1e-4, 0.01, 0.1, 0.5, 0.9, 0.99, 1 - 1e-4])
def test_a_tenth_lies_mostly_at_the_ends(edge):
    samples = numbers(0.1, 0.1, 40_000)
    assert (samples <= edge).double().mean().item() == pytest.approx(stats.beta.cdf(edge, 0.1, 0.1), abs=0.01)


def test_the_generator_alone_decides():
    assert torch.equal(numbers(0.1, 0.1, 50), numbers(0.1, 0.1, 50))
    assert not torch.equal(numbers(0.1, 0.1, 50), numbers(0.1, 0.1, 50, seed=1))
