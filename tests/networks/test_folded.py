"""Networks folded for inference against themselves."""

from __future__ import annotations

import pytest
import torch

from helpers import slow
from ratp._core.environment import Randomness
from ratp.functional import kernels
from ratp.networks import folded as folded_module
from ratp.networks.folded import FoldedConvolution, fold
from ratp.networks.network import Network, NetworkConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = {"hidden": 16, "dim": 8}


def trained(precision="fp32", size=32, **config):
    """A network with statistics, weights of both signs and biases, and the images to compare on."""
    source = torch.Generator().manual_seed(1)
    with Randomness(0).scope("network"):
        network = Network(NetworkConfig(**SMALL, **config), 5, (size, size))
    for name, tensor in network.state_dict().items():
        if tensor.ndim == 1:
            near = 1.0 if name.endswith(("weight", "var")) else 0.0
            tensor.copy_(near + 0.3 * torch.randn(tensor.shape, generator=source).clamp(-2, 2))
    with torch.no_grad():
        next(m for m in network.modules() if isinstance(m, torch.nn.BatchNorm2d)).weight[0] *= -1
    images = torch.randn(6, 3, size, size, generator=source)
    return network.on(DEVICE, precision).frozen_copy(), images.to(DEVICE)


def assert_same(network, images, tolerance):
    with torch.backends.cudnn.flags(allow_tf32=False), torch.no_grad():
        expected, found = network(images), fold(network)(images)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())


CONFIGS = [
    {"backbone": "dtn", "width": 0.25},
    {"backbone": "dtn", "width": 0.25, "bottleneck": "one"},
    {"backbone": "resnet18", "bottleneck": "none", "bias": True},
    slow({"backbone": "resnet50"}),
]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_infers_the_same(config, fuse, monkeypatch):
    monkeypatch.setattr(folded_module, "FUSE", fuse)
    network, images = trained(**config)
    assert_same(network, images, 1e-4)
    found = fold(network)
    assert any(isinstance(module, FoldedConvolution) for module in found.modules())
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in found.modules())


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("backbone", ["dtn", "resnet18", slow("resnet50")])
def test_it_infers_nearly_the_same_in_bfloat16(backbone, fuse, monkeypatch):
    monkeypatch.setattr(folded_module, "FUSE", fuse)
    network, images = trained("bf16", backbone=backbone)
    assert_same(network, images, 1e-1 if backbone == "resnet50" else 5e-2)  # errors add up over the layers


def test_the_network_itself_stays_as_it_is():
    network, _ = trained(backbone="resnet18")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = fold(network)
    assert found.prototypes.data_ptr() != network.prototypes.data_ptr()
    assert network.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_where_kernels_do_not_run_nothing_is_folded():
    network, _ = trained()
    with kernels.plain():
        assert network.folded() is network


@needs_gpu
def test_without_kernels_a_residual_network_infers_the_same():
    network, images = trained("bf16", backbone="resnet50")
    with torch.no_grad():
        found = network(images).logits
        with kernels.plain():
            expected = network(images).logits
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2 * expected.abs().max().item())


@needs_gpu
def test_a_kernel_that_cudnn_lacks_is_replaced(monkeypatch):
    def refuse(*_):
        raise RuntimeError("Unable to find an engine to execute this computation")

    network, images = trained(backbone="resnet18")
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", refuse)
    assert_same(network, images, 1e-4)


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_comes_from_memory_that_was_used_before(precision):
    network, images = trained(precision, backbone="resnet18")
    found = fold(network)
    with torch.no_grad():
        expected = found(images).logits
        used = [torch.full((2**k,), torch.nan, device=DEVICE) for k in range(8, 22) for _ in range(8)]
        del used
        torch.testing.assert_close(found(images).logits, expected, rtol=1e-3, atol=1e-3)


def test_foreign_backbones_keep_their_layers():
    with Randomness(0).scope("network"):
        network = Network(NetworkConfig("torchvision:resnet18", **SMALL), 5)
    found = fold(network)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in found.backbone.modules())
    assert isinstance(found.bottleneck[1], FoldedConvolution)


@needs_gpu
@pytest.mark.parametrize("backbone", ["dtn", "resnet50"])
def test_it_can_be_captured(backbone):
    network, images = trained("bf16", backbone=backbone)
    found = network.folded()
    assert found is not network
    with torch.no_grad():
        expected = found(images).logits
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found(images)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            logits = found(images).logits
    for _ in range(2):
        graph.replay()
    torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-2)
