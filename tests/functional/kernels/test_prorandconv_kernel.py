"""Pro-RandConv's kernel against its plain function, with the same random numbers."""

from __future__ import annotations

import pytest
import torch

from ratp.functional import kernels
from ratp.functional.prorandconv import ProRandConv


@pytest.mark.parametrize("repeats", [1, 2, 5])
@pytest.mark.parametrize("size", [(6, 9), (8, 8)], ids=str)
def test_kernel_and_plain_function_agree(size, repeats, device):
    source = torch.Generator(device).manual_seed(repeats)
    mean, std = torch.tensor([0.5, 0.4, 0.3], device=device), torch.tensor([0.5, 0.6, 0.7], device=device)
    augment = ProRandConv(mean, std)
    images = 2 * torch.rand(2, 3, *size, generator=source, device=device) - 1
    draw = augment.draw(source)._replace(repeats=torch.tensor(repeats, device=device))
    with kernels.plain(), torch.backends.cudnn.flags(allow_tf32=False):
        expected = augment.apply(images, draw)
    channels_last = images.contiguous(memory_format=torch.channels_last)
    for given in (images, channels_last):
        torch.testing.assert_close(augment._apply_kernel(given, draw), expected, rtol=1e-4, atol=1e-4)


def test_an_image_with_a_nan_does_not_change_the_others(device):
    augment = ProRandConv(torch.zeros(3, device=device), torch.ones(3, device=device))
    images = torch.ones(3, 3, 8, 8, device=device)
    draw = augment.draw(torch.Generator(device).manual_seed(0))
    expected = augment._apply_kernel(images, draw)
    images[1, 0, 3, 4] = torch.nan
    found = augment._apply_kernel(images, draw)
    assert found[1].isnan().any()
    torch.testing.assert_close(found[::2], expected[::2], rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_replay_makes_as_many_repetitions_as_it_should():
    source = torch.Generator("cuda").manual_seed(1)
    augment = ProRandConv(torch.zeros(3, device="cuda"), torch.ones(3, device="cuda"))
    images = torch.rand(64, 3, 32, 32, generator=source, device="cuda")
    draw = augment.draw(source)
    augment.apply(images, draw)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies = augment.apply(images, draw)
    for repeats in (1, 4, 9):
        draw.repeats.fill_(repeats)
        graph.replay()
        with kernels.plain(), torch.backends.cudnn.flags(allow_tf32=False):
            torch.testing.assert_close(copies, augment.apply(images, draw), rtol=1e-3, atol=1e-3)
