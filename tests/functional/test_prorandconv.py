"""Pro-RandConv, against its formula in plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ratp.functional.prorandconv import REPEATS, Draw, ProRandConv

MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5, 0.2, 0.25])


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


def images(count=3, side=8, seed=5):
    return torch.randn(count, 3, side, side, generator=chance(seed))


def reference(x, kernel, scale, shift, repeats):
    """One image (3, h, w), pixel by pixel."""
    _, high, wide = x.shape
    for _ in range(repeats):
        hidden = np.zeros_like(x)
        for out in range(3):
            for row in range(high):
                for column in range(wide):
                    for channel in range(3):
                        for i in (-1, 0, 1):
                            for j in (-1, 0, 1):
                                if 0 <= row + i < high and 0 <= column + j < wide:
                                    weight = kernel[out, channel, i + 1, j + 1]
                                    hidden[out, row, column] += weight * x[channel, row + i, column + j]
        x = np.empty_like(hidden)
        for out in range(3):
            plane = hidden[out]
            standard = (plane - plane.mean()) / math.sqrt(plane.var() + 1e-5)
            x[out] = np.tanh(scale[out] * standard + shift[out])
    return x


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_it_is_its_formula(repeats):
    augment, x = ProRandConv(MEAN, STD), images(2, 6)
    drawn = augment.draw(chance(repeats))._replace(repeats=torch.tensor(repeats))
    found = augment.apply(x, drawn)
    kernel, scale, shift = (tensor.double().numpy() for tensor in drawn[:3])
    for image, copy in zip(x.double().numpy(), found, strict=True):
        expected = reference(image, kernel, scale.ravel(), shift.ravel(), repeats)
        expected = ((expected + 1) / 2 - MEAN.numpy()[:, None, None]) / STD.numpy()[:, None, None]
        np.testing.assert_allclose(copy, expected, rtol=1e-3, atol=1e-4)


def test_its_numbers_have_the_stated_distributions():
    augment, generator = ProRandConv(MEAN, STD), chance()
    draws = [augment.draw(generator) for _ in range(3000)]
    kernels = torch.stack([draw.kernel for draw in draws])
    # the centre of a kernel is never faded out
    assert kernels[..., 1, 1].std().item() == pytest.approx(27**-0.5, rel=0.03)
    assert kernels[..., 0, 0].std() < kernels[..., 0, 1].std() < kernels[..., 1, 1].std()
    for name in ("scale", "shift"):
        numbers = torch.stack([getattr(draw, name) for draw in draws])
        assert numbers.std().item() == pytest.approx(0.5, rel=0.03)
        assert abs(numbers.mean().item()) < 0.03
    repeats = torch.stack([draw.repeats for draw in draws])
    counts = repeats.bincount(minlength=REPEATS + 1)
    assert counts[0] == 0
    assert (counts[1:] - 300).abs().max() < 90


def test_a_batch_shares_its_numbers():
    x = images(1).expand(4, -1, -1, -1)
    copies = ProRandConv(MEAN, STD)(x, chance())
    torch.testing.assert_close(copies, copies[:1].expand_as(copies))


def test_copies_are_in_the_range_of_the_networks_input():
    augment, generator = ProRandConv(MEAN, STD), chance()
    for _ in range(20):
        unit = augment(images(), generator) * STD[:, None, None] + MEAN[:, None, None]
        assert 0 <= unit.min() <= unit.max() <= 1


def test_calls_differ_and_repeat_with_the_generator():
    augment, x = ProRandConv(MEAN, STD), images()
    first, second = augment(x, generator := chance()), augment(x, generator)
    assert not torch.equal(first, second)
    assert torch.equal(augment(x, chance()), first)


@pytest.mark.parametrize("rows", [[True, False, True], [False] * 3, [True] * 3])
def test_rows_select(rows):
    augment, x, rows = ProRandConv(MEAN, STD), images(), torch.tensor(rows)
    torch.testing.assert_close(augment(x, chance(), rows), augment(x, chance())[rows])


def test_flat_images_stay_finite():
    assert ProRandConv(MEAN, STD)(torch.zeros(2, 3, 8, 8), chance()).isfinite().all()


def test_no_gradient_is_recorded():
    x = images().requires_grad_()
    assert not ProRandConv(MEAN, STD)(x, chance()).requires_grad


def test_a_draw_holds_tensors_only():
    """A captured step must not take a number from the host."""
    drawn = ProRandConv(MEAN, STD).draw(chance())
    assert isinstance(drawn, Draw)
    assert all(isinstance(number, torch.Tensor) for number in drawn)
