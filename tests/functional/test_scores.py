"""Products with class vectors: a matrix product, however its gradient is computed."""

from __future__ import annotations

import pytest
import torch

import ratp.functional.losses as module
from ratp.functional.losses import scores


@pytest.mark.parametrize("few", [0, 2**20], ids=["multiplied", "summed"])
def test_product_and_gradients(monkeypatch, few):
    monkeypatch.setattr(module, "FEW", few)
    source = torch.Generator().manual_seed(1)
    features, vectors = (torch.randn(n, 6, generator=source, dtype=torch.float64).requires_grad_() for n in (9, 4))
    slope = torch.randn(9, 4, generator=source, dtype=torch.float64)
    plain = features @ vectors.T
    wanted = torch.autograd.grad(plain, (features, vectors), slope)
    for product in (scores(features, vectors), module._Scores.apply(features, vectors)):
        torch.testing.assert_close(product, plain)
        torch.testing.assert_close(torch.autograd.grad(product, (features, vectors), slope), wanted)


def test_constants_have_no_gradient():
    features, vectors = torch.ones(3, 2), torch.ones(4, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(module._Scores.apply(features, vectors).sum(), vectors)
    assert slope.eq(3).all()
