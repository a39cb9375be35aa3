"""ResNet's first convolution on packed images against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ratp.functional.kernels import stem as stem_module
from ratp.functional.kernels.stem import convolve
from ratp.functional.norm import BatchNorm2d
from ratp.networks import folded as folded_module
from ratp.networks import resnet as resnet_module
from ratp.networks.folded import FoldedConvolution
from ratp.networks.resnet import Stem

SIZES = [(8, 10), (7, 9), (9, 6), (1, 1), (2, 3), (32, 32)]
channels_last = {"memory_format": torch.channels_last}


def draw(source, *shape):
    return torch.randn(*shape, generator=source)


def both(images, weight, dtype=torch.float32):
    """Results and gradients of the weights, and PyTorch's in single precision."""
    found_weight, other_weight = (weight.detach().clone().requires_grad_() for _ in range(2))
    with torch.backends.cudnn.flags(allow_tf32=False):
        found = convolve(images, found_weight, dtype)
        expected = F.conv2d(images.to(dtype).float(), other_weight.to(dtype).float(), stride=2, padding=3)
        slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(images.device, dtype)
        gradients = torch.autograd.grad(found, found_weight, slope)
        gradients += torch.autograd.grad(expected, other_weight, slope.float())
    return (found, expected), gradients


def assert_close(one, other, tolerance):
    torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_pytorch_s_and_so_is_its_gradient(size, dtype, tolerance, device):
    source = torch.Generator().manual_seed(1)
    images, weight = draw(source, 3, 3, *size).to(device), draw(source, 8, 3, 7, 7).to(device)
    for layout in ({}, channels_last):
        results, gradients = both(images.contiguous(**layout), weight.contiguous(**layout), dtype)
        assert results[0].dtype == dtype
        assert gradients[0].dtype == torch.float32
        assert gradients[0].is_contiguous(**layout)
        assert_close(*results, tolerance)
        assert_close(*gradients, tolerance)


def test_images_need_not_be_dense(device):
    source = torch.Generator().manual_seed(1)
    images, weight = draw(source, 4, 6, 12, 30).to(device), draw(source, 5, 3, 7, 7).to(device)
    results, _ = both(images[1::2, 1:6:2, 1:, ::2], weight)
    assert_close(*results, 1e-5)
    results, _ = both(images[:1, :3].expand(3, 3, 12, 30), weight)
    assert_close(*results, 1e-5)


def test_a_nan_stays_one_and_stays_in_its_image(device):
    images, weight = torch.ones(3, 3, 20, 20, device=device), torch.ones(2, 3, 7, 7, device=device)
    images[1, 2, 10, 10] = torch.nan
    (found, expected), _ = both(images, weight)
    assert found[expected.isnan()].isnan().all()
    assert found[::2].isfinite().all()


def test_no_image_is_a_batch_too(device):
    weight = torch.ones(2, 3, 7, 7, device=device)
    assert convolve(torch.zeros(0, 3, 9, 9, device=device), weight, torch.bfloat16).shape == (0, 2, 5, 5)


class TestLayer:
    """The layer of a ResNet chooses by device, precision and gradients."""

    @pytest.fixture(autouse=True)
    def _packs(self, device, monkeypatch):
        if device.type == "cpu":
            monkeypatch.setattr(resnet_module, "packs", lambda _, dtype: dtype == torch.bfloat16)
            monkeypatch.setattr(folded_module, "packs", lambda _, dtype: dtype == torch.bfloat16)

    @pytest.fixture
    def calls(self, monkeypatch):
        """The batches that were packed."""
        made, pack_images = [], stem_module.pack_images
        monkeypatch.setattr(stem_module, "pack_images", lambda *given: made.append(given) or pack_images(*given))
        return made

    @staticmethod
    def make(device):
        source = torch.Generator().manual_seed(1)
        layer = Stem().to(device, memory_format=torch.channels_last)
        with torch.no_grad():
            layer.weight.copy_(draw(source, 64, 3, 7, 7))
        return layer, draw(source, 2, 3, 18, 15).to(device)

    def compute(self, layer, images):
        with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
            y = layer(images)
            (gradient,) = torch.autograd.grad(y.float().square().mean(), layer.weight)
        return y.detach(), gradient

    def test_under_autocast_it_packs_and_computes_the_same(self, device, calls):
        layer, images = self.make(device)
        y, gradient = self.compute(layer, images)
        assert len(calls) == 1
        assert y.dtype == torch.bfloat16
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resnet_module, "packs", lambda *_: False)
            expected, wanted = self.compute(layer, images)
        assert len(calls) == 1
        assert_close(y, expected.float(), 1e-2)
        assert_close(gradient, wanted, 1e-2)

    def test_images_that_need_a_gradient_get_it(self, device, calls):
        layer, images = self.make(device)
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            y = layer(images.requires_grad_())
            assert torch.autograd.grad(y.sum(), images)[0].abs().sum() > 0
            assert not calls
            with torch.no_grad():
                layer(images)
            assert len(calls) == 1

    def test_a_folded_network_packs_too(self, device, calls):
        layer, images = self.make(device)
        norm = BatchNorm2d(64).to(device).eval()
        folded = FoldedConvolution(layer, norm, torch.bfloat16)
        with torch.no_grad():
            y = folded(images, relu=True)
            assert len(calls) == 1
            assert_close(y, F.conv2d(images, layer.weight, stride=2, padding=3).relu(), 2e-2)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_a_captured_step_uses_the_weights_of_the_moment(self, device):
        layer, images = self.make(device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.compute(layer, images)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = self.compute(layer, images)
        with torch.no_grad():
            layer.weight.mul_(-2)
        graph.replay()
        for one, other in zip(found, self.compute(layer, images), strict=True):
            assert_close(one, other.float(), 1e-2)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    @pytest.mark.parametrize("tf32", [True, False])
    def test_single_precision_stays_exact_where_it_must(self, tf32, device, calls):
        layer, images = self.make(device)
        with torch.backends.cudnn.flags(allow_tf32=tf32), torch.no_grad():
            y = layer(images)
        assert len(calls) == tf32
        assert_close(
            y, F.conv2d(images.double(), layer.weight.double(), stride=2, padding=3).float(), 2e-3 if tf32 else 1e-6
        )
