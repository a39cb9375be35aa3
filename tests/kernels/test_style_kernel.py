"""The style module with its convolutions by kernels, against the same without."""

from __future__ import annotations

import pytest
import torch

from ratp import kernels
from ratp.parts import random_convolutions
from ratp.parts.style import StyleModule


@pytest.fixture
def style(device):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = StyleModule((12, 14), (3, 9, 5))
    with torch.no_grad():
        module.noise_level.fill_(1.5)
    return module.to(device)


def results(style, device):
    """Both kinds of styles, and the gradient of the one that has one."""
    images = torch.randn(3, 3, 12, 14, generator=torch.Generator().manual_seed(2)).to(device)
    sources = [torch.Generator(device).manual_seed(seed) for seed in (3, 4)]
    restyled, estimated = style.restyle(images, sources[0]), style.estimate(images, sources[1])
    direction = torch.randn(estimated.shape, generator=torch.Generator().manual_seed(5)).to(device)
    slopes = torch.autograd.grad((estimated * direction).sum(), list(style.parameters()))
    return [restyled, estimated, *slopes]


def test_kernels_give_the_same(style, device, monkeypatch):
    packed = []
    pack = random_convolutions.Layers.pack
    monkeypatch.setattr(random_convolutions.Layers, "pack", lambda *args: packed.append(1) or pack(*args))
    monkeypatch.setattr(random_convolutions, "_kernel_takes", lambda images: True)
    found = results(style, device)
    assert len(packed) == 2
    monkeypatch.undo()
    with kernels.plain(), torch.backends.cudnn.flags(allow_tf32=False):
        expected = results(style, device)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
