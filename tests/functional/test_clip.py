"""Clipping of gradients by their common length."""

from __future__ import annotations

import torch

from ratp.methods.gsfda import clip_norm


def test_long_gradients_are_scaled_alike():
    clipped = clip_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])], 1.0)
    torch.testing.assert_close(clipped[0], torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(clipped[1], torch.tensor([[0.8]]))


def test_short_ones_stay_bit_for_bit():
    gradients = [torch.randn(5, generator=torch.Generator().manual_seed(0)), torch.zeros(3)]
    assert all(map(torch.equal, clip_norm(gradients, 100.0), gradients))


def test_nothing_is_no_problem():
    assert clip_norm([torch.zeros(2)], 1.0)[0].tolist() == [0, 0]


def test_it_is_torchs_own():
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(7))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    clipped = clip_norm([p.grad.clone() for p in parameters], 2.0)
    torch.nn.utils.clip_grad_norm_(parameters, 2.0)
    for parameter, gradient in zip(parameters, clipped, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)
