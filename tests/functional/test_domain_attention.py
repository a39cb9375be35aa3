"""Masks of domains: how they sharpen, what their gradient is multiplied by, who uses which channel."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from ratp.methods.gsfda import MaskedLinear, annealed_scale, compensation, domain_masks, used_elsewhere


def layer(slots=3, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = nn.Linear(4, 5)
        return plain, MaskedLinear(plain, slots)


def test_masks_are_nearly_binary():
    masks = domain_masks(torch.tensor([-1.0, -0.01, 0.0, 0.01, 1.0]))
    expected = torch.tensor([0.0, 0.268941, 0.5, 0.731059, 1.0])
    torch.testing.assert_close(masks, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("progress", "scale"), [(0.0, 0.01), (0.5, 50.005), (1.0, 100.0)])
def test_they_sharpen_from_one_end_to_the_other(progress, scale):
    assert annealed_scale(torch.tensor(progress)).item() == pytest.approx(scale)


@pytest.mark.parametrize("scale", [0.01, 1.0, 40.0, 100.0])
def test_golden_compensation_at_zero(scale):
    assert compensation(torch.zeros(2), torch.tensor(scale)).tolist() == pytest.approx([100 / scale] * 2)


def test_compensation_elsewhere():
    """By hand: 100/5 · (cosh(2.5) + 1)/(cosh(0.5) + 1), and with the exponent cut at 10."""
    found = compensation(torch.tensor([0.5, 3.0], dtype=torch.float64), torch.tensor(5.0, dtype=torch.float64))
    assert found.tolist() == pytest.approx([20 * 7.1322895 / 2.1276260, 20 * 11014.2329 / 11.0676620], rel=1e-6)


def test_the_compensated_gradient_does_not_depend_on_the_scale():
    """HAT's aim: as if the mask were that of s_max's own size, σ'(e)·s_max."""
    for value in (-0.7, 0.0, 0.3):
        for scale in (0.01, 1.0, 10.0):
            e = torch.tensor(value, dtype=torch.float64, requires_grad=True)
            (gradient,) = torch.autograd.grad(domain_masks(e, scale), e)
            corrected = gradient * compensation(e.detach(), torch.tensor(scale, dtype=torch.float64))
            plain = e.detach().sigmoid()
            assert corrected.item() == pytest.approx((100 * plain * (1 - plain)).item())


def test_it_is_finite_for_any_vector():
    assert compensation(torch.tensor([1e4, -1e4]), torch.tensor(100.0)).isfinite().all()


def test_channels_used_elsewhere():
    masks = torch.tensor([[1.0, 0.0, 0.2], [0.0, 0.0, 1.0], [0.5, 0.1, 0.3]])
    assert used_elsewhere(masks, 0).tolist() == pytest.approx([0.5, 0.1, 1.0])
    assert used_elsewhere(masks, 1).tolist() == pytest.approx([1.0, 0.1, 0.3])
    assert used_elsewhere(masks, 2).tolist() == pytest.approx([1.0, 0.0, 1.0])
    assert used_elsewhere(masks[:1], 0).tolist() == [0, 0, 0]


class TestMaskedLinear:
    def test_it_is_the_layer_times_the_mask_in_force(self):
        plain, masked = layer()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        for slot in range(3):
            masked.slot.fill_(slot)
            torch.testing.assert_close(masked(x), plain(x) * domain_masks(masked.domains[slot]))
        with masked.unmasked():
            assert torch.equal(masked(x), plain(x))
        assert not torch.equal(masked(x), plain(x))

    def test_weights_are_taken_over_and_names_stay(self):
        plain, masked = layer()
        assert masked.weight is plain.weight
        assert masked.bias is plain.bias
        assert list(masked.state_dict()) == ["weight", "bias", "domains", "slot"]

    def test_another_mask_for_a_while(self):
        _, masked = layer()
        masked.slot.fill_(1)
        x, place = torch.ones(1, 4), masked.slot.data_ptr()
        before = masked(x)
        with masked.using(2):
            assert not torch.equal(masked(x), before)
        assert torch.equal(masked(x), before)
        assert masked.slot.data_ptr() == place

    def test_copy_has_its_own_masks(self):
        _, masked = layer()
        copy = deepcopy(masked)
        copy.slot.fill_(2)
        assert masked.slot.item() == 0
