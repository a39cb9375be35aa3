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
    {"adain": "affine"},
    {"colour_branch": False},
    {"noise_per": "batch"},
    {"weights_per": "sample"},
    {"input_noise": 0.0},
    {"renormalise": False},
    {"safe_division": False},
    {"kernel_sizes": (4,)},
    slow({"kernel_sizes": (5, 9, 13, 17)}, name="large"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_kernels_and_plain_functions_agree(config, device, monkeypatch):
    wide_randmix = pytest.importorskip("ratp.functional.kernels.wide_randmix")
    size = (18, 17) if max(config.get("kernel_sizes", SMALL)) > 9 else (9, 10)
    source = torch.Generator(device).manual_seed(1)
    mean, std = torch.tensor([0.5, 0.4, 0.3], device=device), torch.tensor([0.5, 0.6, 0.7], device=device)
    randmix = RandMix(RandMixConfig(**{"kernel_sizes": SMALL, **config}), mean, std, source)
    images = 2 * torch.rand(2, 3, *size, generator=source, device=device) - 1
    draw = randmix.draw(images.shape, source)
    draw.weights.sub_(1)  # a sum near zero would magnify the rounding
    with kernels.plain(), torch.backends.cudnn.flags(allow_tf32=False):
        expected = randmix.apply(images, draw)
    torch.testing.assert_close(randmix._apply_kernel(images, draw), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(kernels, "_MOST_PIXELS", 0)  # all images are large
    torch.testing.assert_close(randmix._apply_kernel(images, draw), expected, rtol=0, atol=0.01)
    if device.type == "cpu":  # a GPU would round to TF32
        monkeypatch.setattr(wide_randmix, "STORED", torch.float32)
        torch.testing.assert_close(randmix._apply_kernel(images, draw), expected, rtol=1e-4, atol=1e-4)


def test_a_sum_of_weights_near_zero_is_kept_away_from_it(device):
    source = torch.Generator(device).manual_seed(1)
    config = RandMixConfig(kernel_sizes=SMALL)
    randmix = RandMix(config, torch.zeros(3, device=device), torch.ones(3, device=device), source)
    images = torch.rand(1, 3, 9, 9, generator=source, device=device)
    draw = randmix.draw(images.shape, source)
    draw.weights.sub_(1)  # a sum near zero would magnify the rounding
    draw.weights.copy_(torch.tensor([1.0, -1.0, 1.0, -1.0 - 1e-7], device=device))
    assert randmix._apply_kernel(images, draw).isfinite().all()
