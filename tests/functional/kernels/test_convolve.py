"""The convolution between three channels against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import slow
from ratp.functional.kernels.convolve import convolve


@pytest.mark.parametrize(
    ("size", "padding", "shape"),
    [
        (1, 0, (5, 4)),
        (3, 0, (7, 9)),
        (3, 2, (5, 6)),
        (5, 4, (4, 8)),
        (9, 0, (9, 9)),
        slow(9, 8, (20, 19)),
        (4, 1, (8, 6)),
    ],
)
def test_it_is_pytorch_s_and_so_is_its_gradient(size, padding, shape, device):
    source = torch.Generator(device).manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=source, device=device)

    images, weight, bias = draw(3, 3, *shape), draw(3, 3, size, size), draw(3)
    kernels_own, pytorch_s = images.clone().requires_grad_(), images.clone().requires_grad_()
    with torch.backends.cudnn.flags(allow_tf32=False):
        expected = F.conv2d(pytorch_s, weight, bias, padding=padding)
        found = convolve(kernels_own, weight, bias, padding)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        direction = draw(*expected.shape)
        (expected * direction).sum().backward()
    (found * direction).sum().backward()
    torch.testing.assert_close(kernels_own.grad, pytorch_s.grad, rtol=1e-4, atol=1e-4)


def test_images_need_not_lie_in_a_row(device):
    images = torch.randn(2, 8, 7, 3, device=device).permute(0, 3, 1, 2)
    weight, bias = torch.randn(3, 3, 3, 3, device=device), torch.zeros(3, device=device)
    with torch.backends.cudnn.flags(allow_tf32=False):
        expected = F.conv2d(images, weight, bias)
    torch.testing.assert_close(convolve(images, weight, bias), expected, rtol=1e-4, atol=1e-4)
