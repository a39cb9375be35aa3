"""RandMix's kernels against its plain functions, with the same random numbers."""

from __future__ import annotations

import pytest
import torch

from helpers import slow
from ratp.functional import kernels
from ratp.functional.randmix import RandMix, RandMixConfig

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's, where σ is 0
SMALL = (3, 6)
CONFIGS = [
    {},
    {"tanh": False},
    slow({"adain": "affine"}, name="affine"),
    {"colour_branch": False},
    slow({"noise_per": "batch"}, name="one noise"),
    {"weights_per": "sample"},
    slow({"input_noise": 0.0}, name="no noise"),
    slow({"renormalise": False}, name="as it is"),
    slow({"safe_division": False}, name="unsafe"),
    {"kernel_sizes": (4,)},
    slow({"kernel_sizes": (5, 9, 13, 17)}, name="large"),
]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_kernels_and_plain_functions_agree(config, device, monkeypatch):
    size = (18, 17) if max(config.get("kernel_sizes", SMALL)) > 9 else (9, 10)
    source = torch.Generator(device).manual_seed(1)
    mean, std = torch.tensor([0.5, 0.4, 0.3], device=device), torch.tensor([0.5, 0.6, 0.7], device=device)
    randmix = RandMix(RandMixConfig(**{"kernel_sizes": SMALL, **config}), mean, std, source)
    images = 2 * torch.rand(2, 3, *size, generator=source, device=device) - 1
    draw = randmix.draw(images.shape, source)
    draw.weights.sub_(1)  # a sum near zero would magnify the rounding
    with kernels.plain(), torch.backends.cudnn.flags(allow_tf32=False):
        expected = randmix.apply(images, draw)
        exact = randmix._apply_kernel(images, draw)
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)
    with torch.backends.cudnn.flags(allow_tf32=True):
        torch.testing.assert_close(randmix._apply_kernel(images, draw), expected, rtol=0, atol=0.01)
        if device.type == "cpu":  # a GPU rounds to TF32
            monkeypatch.setattr("ratp.functional.kernels.randmix_tensor_cores.STORED", torch.float32)
            torch.testing.assert_close(randmix._apply_kernel(images, draw), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_a_sum_of_weights_near_zero_is_kept_away_from_it(device, tensor_cores):
    source = torch.Generator(device).manual_seed(1)
    config = RandMixConfig(kernel_sizes=SMALL)
    randmix = RandMix(config, torch.zeros(3, device=device), torch.ones(3, device=device), source)
    images = torch.rand(1, 3, 9, 9, generator=source, device=device)
    draw = randmix.draw(images.shape, source)
    draw.weights.sub_(1)  # a sum near zero would magnify the rounding
    draw.weights.copy_(torch.tensor([1.0, -1.0, 1.0, -1.0 - 1e-7], device=device))
    with torch.backends.cudnn.flags(allow_tf32=tensor_cores):
        assert randmix._apply_kernel(images, draw).isfinite().all()


def test_an_image_with_a_nan_does_not_change_the_others(device):
    source = torch.Generator(device).manual_seed(1)
    randmix = RandMix(
        RandMixConfig(kernel_sizes=SMALL), torch.zeros(3, device=device), torch.ones(3, device=device), source
    )
    images = torch.rand(3, 3, 9, 20, generator=source, device=device)
    draw = randmix.draw(images.shape, source)
    with torch.backends.cudnn.flags(allow_tf32=True):
        expected = randmix._apply_kernel(images, draw)
        images[1, 0, 3, 4] = torch.nan
        found = randmix._apply_kernel(images, draw)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[::2], expected[::2], rtol=0, atol=0)


@needs_gpu
@pytest.mark.parametrize("size", [(224, 224), (75, 100), (32, 32)], ids=str)
def test_large_images_on_tensor_cores_in_a_captured_step(size):
    source = torch.Generator("cuda").manual_seed(1)
    mean, std = torch.tensor([0.5, 0.4, 0.3], device="cuda"), torch.tensor([0.5, 0.6, 0.7], device="cuda")
    randmix = RandMix(RandMixConfig(), mean, std, source)
    images = 2 * torch.rand(5, 3, *size, generator=source, device="cuda") - 1
    draw = randmix.draw(images.shape, source)
    draw.weights.abs_()  # a sum near zero would magnify the rounding
    with torch.backends.cudnn.flags(allow_tf32=True):
        randmix.apply(images, draw)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            copies = randmix.apply(images, draw)
    for _ in range(2):
        images.mul_(-0.5)
        graph.replay()
        with kernels.plain(), torch.backends.cudnn.flags(allow_tf32=False):
            torch.testing.assert_close(copies, randmix.apply(images, draw), rtol=0, atol=0.01)
