"""The style module by its kernels, against the same without, with the same random numbers."""

from __future__ import annotations

import pytest
import torch

from helpers import slow
from ratp.functional import kernels
from ratp.functional.kernels import style as style_kernels
from ratp.functional.style import Blend, StyleModule

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's
SIZE = (12, 14)


def module(device, kernel_sizes=(3, 9, 5)):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        style_module = StyleModule(SIZE, kernel_sizes)
    with torch.no_grad():
        style_module.noise_level.fill_(1.5)
    return style_module.to(device)


def results(style, device, share, layout=torch.contiguous_format):
    """Both kinds of styles, and the gradients of the one that has them."""
    mean, std = torch.tensor([0.5, 0.4, 0.3], device=device), torch.tensor([0.5, 0.6, 0.7], device=device)
    blend = Blend(share, mean, std)
    images = torch.randn(3, 3, *SIZE, generator=torch.Generator().manual_seed(2)).to(device, memory_format=layout)
    sources = [torch.Generator(device).manual_seed(seed) for seed in (3, 4)]
    restyled = style.restyle(images, blend, sources[0])
    estimated = style.estimate(images, blend, sources[1])
    direction = torch.randn(estimated.shape, generator=torch.Generator().manual_seed(5)).to(device)
    slopes = torch.autograd.grad((estimated * direction).sum(), list(style.parameters()))
    return [restyled, estimated, *slopes]


@pytest.mark.parametrize("share", [0.6, slow(1.0)])
@pytest.mark.parametrize("kernel_sizes", [slow((3, 9, 5)), (4,)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kernels_give_the_same(layout, kernel_sizes, share, device, monkeypatch):
    style = module(device, kernel_sizes)
    used = []
    forward = style_kernels.restyle
    monkeypatch.setattr(style_kernels, "restyle", lambda *args: used.append(1) or forward(*args))
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    found = results(style, device, share, layout)
    assert len(used) == 2
    monkeypatch.undo()
    with kernels.plain(), torch.backends.cudnn.flags(allow_tf32=False):
        expected = results(style, device, share)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_weights_that_cancel_out_give_numbers(device, monkeypatch):
    style, real = module(device), torch.randn

    def cancelling(*shape, **options):
        if shape == (4,):
            return torch.tensor([1.0, -1.0, 0.5, -0.5], device=device)
        return real(*shape, **options)

    monkeypatch.setattr(torch, "randn", cancelling)
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    assert results(style, device, 0.6)[0].isfinite().all()


def test_larger_images_are_left_to_the_plain_functions(monkeypatch):
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    assert kernels.usable_for(torch.empty(1, 3, 32, 32)) and not kernels.usable_for(torch.empty(1, 3, 33, 32))
