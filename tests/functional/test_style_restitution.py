import math

import pytest
import torch
import torch.nn.functional as F

from ratp.methods.snr import Restitution, StyleRestitution, dual_restitution, restitutions


def maps(seed=0, images=3, channels=32, side=4):
    return torch.randn(images, channels, side, side, generator=torch.Generator().manual_seed(seed)) * 3 + 1


@pytest.fixture
def module():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return StyleRestitution(32)


def with_gate(module, value):
    """A module whose gate is ``value`` everywhere."""
    with torch.no_grad():
        module.excite.weight.zero_()
        module.excite.bias.fill_(value)
    return module


def test_the_style_is_taken_out(module):
    x = maps()
    torch.testing.assert_close(module.restitute(x).normalised, F.instance_norm(x))
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 2, 32))
        module.bias.copy_(torch.linspace(-1, 1, 32))
    expected = F.instance_norm(x, weight=module.weight, bias=module.bias)
    torch.testing.assert_close(module.restitute(x).normalised, expected)


def test_both_results_together_are_all_there_is(module):
    x = maps()
    normalised, plus, minus = module.restitute(x)
    torch.testing.assert_close(plus + minus, normalised + x)
    assert torch.equal(module(x), plus)


def test_an_open_gate_changes_nothing(module):
    x = maps()
    torch.testing.assert_close(with_gate(module, math.inf)(x), x)


def test_a_closed_gate_leaves_no_style(module):
    x = maps()
    torch.testing.assert_close(with_gate(module, -math.inf)(x), F.instance_norm(x))


def test_the_gate_is_that_of_the_removed_part(module):
    x = maps()
    normalised, plus, _ = module.restitute(x)
    removed = x - normalised
    pooled = removed.mean(dim=(2, 3))
    gate = torch.sigmoid(
        (pooled @ module.squeeze.weight.T + module.squeeze.bias).clamp(min=0) @ module.excite.weight.T
        + module.excite.bias
    )
    torch.testing.assert_close(plus, normalised + gate[:, :, None, None] * removed)
    assert module.squeeze.weight.shape == (2, 32)


def test_constant_maps_are_all_style(module):
    x = torch.full((2, 32, 4, 4), 2.5)
    normalised, _, _ = module.restitute(x)
    assert normalised.abs().max() < 1e-5


@pytest.mark.parametrize("channels", [1, 3, 16])
def test_few_channels_have_a_gate_too(channels):
    assert StyleRestitution(channels)(maps(channels=channels)).shape == (3, channels, 4, 4)


def test_all_its_parameters_learn(module):
    module(maps()).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in module.parameters())


def test_low_precision_is_kept(module):
    x = maps()
    low = module.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert module.float()(x.bfloat16()).dtype == torch.bfloat16


def test_what_passes_can_be_looked_at(module):
    x, kept = maps(), []
    with restitutions(module, kept):
        out = module(x)
    module(x)
    assert len(kept) == 1
    torch.testing.assert_close(kept[0].plus, out.mean(dim=(2, 3)))
    for part, whole in zip(kept[0], module.restitute(x), strict=True):
        torch.testing.assert_close(part, whole.mean(dim=(2, 3)))


class TestDualLoss:
    def test_golden(self):
        """Between one of four and one of two, the entropies of guesses differ by log 2; softplus(−log 2) = log 1.5."""
        four, two = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, -99.0, -99.0]])
        assert dual_restitution(Restitution(four, two, four)).item() == pytest.approx(math.log(1.5) + math.log(2))
        assert dual_restitution(Restitution(two, two, four)).item() == pytest.approx(math.log(1.5) + math.log(2))
        assert F.softplus(torch.tensor(-0.7)).item() == pytest.approx(0.403186, abs=1e-6)

    def test_equal_entropies(self):
        logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        assert dual_restitution(Restitution(logits, logits, logits)).item() == pytest.approx(2 * math.log(2))

    def test_it_is_its_definition(self):
        certain, middle, vague = (torch.tensor([[scale, 0.0], [0.0, scale]]) for scale in (4.0, 2.0, 0.5))

        def entropy(logits):
            p = logits.softmax(dim=1)
            return float(-(p * p.log()).sum(dim=1).mean())

        def softplus(x):
            return math.log1p(math.exp(x))

        expected = softplus(entropy(certain) - entropy(middle)) + softplus(entropy(middle) - entropy(vague))
        assert dual_restitution(Restitution(middle, certain, vague)).item() == pytest.approx(expected)
        assert expected < 2 * math.log(2) < dual_restitution(Restitution(middle, vague, certain)).item()

    def test_it_stays_a_number_for_certain_predictions(self):
        logits = torch.tensor([[200.0, 0.0]], requires_grad=True)
        dual_restitution(Restitution(logits, logits, -logits)).backward()
        assert logits.grad.isfinite().all()
