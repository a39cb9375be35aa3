"""Max pooling against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

SHAPES = [(2, 5, 8, 6), (3, 70, 7, 9), (1, 1, 1, 1), (2, 3, 2, 1), (40, 16, 5, 4)]


def results(pool, x, dy):
    """Maxima, with and without a gradient, and the gradient."""
    x = x.detach()
    alone, y = pool(x), pool(x.requires_grad_())
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y) if dy is None else dy)
    return alone, y, dx


def assert_same(x, dy=None, counts=None):
    """Compares with PyTorch's in single precision, whose sums are not rounded in between."""
    from ratp.functional.kernels.pool import max_pool

    found = results(max_pool, x, dy)
    wanted = results(lambda x: F.max_pool2d(x, 3, 2, 1), x.float(), None if dy is None else dy.float())
    for one, other, kind in zip(found, wanted, ("alone", "y", "dx"), strict=True):
        rows = slice(None) if counts is None or kind != "dx" else counts
        torch.testing.assert_close(one[rows], other[rows].to(x.dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_pytorch_s_and_so_is_its_gradient(shape, dtype, device):
    source = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=source).to(device, dtype)
    dy = torch.randn(shape[0], shape[1], -(-shape[2] // 2), -(-shape[3] // 2), generator=source).to(device, dtype)
    assert_same(x.contiguous(memory_format=torch.channels_last), dy)
    assert_same(x, dy)


def test_the_first_of_equal_values_gets_the_gradient(device):
    """After ReLU most windows hold several zeros."""
    x = torch.randint(3, (3, 8, 9, 8), generator=torch.Generator().manual_seed(1)).float().to(device)
    assert_same(x)
    assert_same(torch.zeros(1, 2, 4, 5, device=device))


def test_maps_need_not_be_dense(device):
    source = torch.Generator().manual_seed(1)
    x = torch.randn(4, 12, 9, 14, generator=source).to(device)
    assert_same(x[::2, 1::3, 1:, ::2])
    assert_same(x, torch.randn(1, 1, 1, 1, generator=source).to(device).expand(4, 12, 5, 7))


def test_non_finite_values_are_not_hidden(device):
    x = torch.randn(2, 4, 7, 8, generator=torch.Generator().manual_seed(1)).to(device)
    x[0, 1, 3, 3] = x[0, 1, 3, 4] = x[1, 2, 0, 0] = torch.nan
    x[1, 3, 4, 4] = torch.inf
    x[0, 2] = -torch.inf
    counts = torch.ones(2, 4, dtype=torch.bool, device=device)
    counts[0, 2] = False  # where nothing exceeds −∞, PyTorch's own kernels differ in the place
    assert_same(x, counts=counts)


def test_no_image_is_a_batch_too(device):
    assert_same(torch.zeros(0, 3, 6, 6, device=device))
