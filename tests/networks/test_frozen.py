"""``network.frozen``: modules at the start of a backbone that training leaves as they are."""

from __future__ import annotations

import pytest
import torch

from helpers import ratp
from ratp.errors import ConfigError
from ratp.functional.optim import SGDConfig, StageSGD
from ratp.networks.network import Network, NetworkConfig


def build(frozen: int) -> Network:
    torch.manual_seed(0)
    return Network(NetworkConfig(backbone="resnet18", hidden=8, dim=4, frozen=frozen), 3, (32, 32))


def test_frozen_modules_keep_weights_and_statistics():
    network = build(4)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    optimiser = StageSGD(network.parameters(), 0.1, 1, SGDConfig())
    for _ in range(2):
        optimiser.minimise(network.train()(torch.randn(4, 3, 32, 32)).logits.square().mean())
    same = {name for name, tensor in network.state_dict().items() if torch.equal(tensor, before[name])}
    starts = ("backbone.conv1", "backbone.bn1", "backbone.layer1", "backbone.layer2")
    assert {name for name in before if name.startswith(starts)} <= same
    assert not {name for name in same if name.startswith(("backbone.layer3", "backbone.layer4"))}


def test_a_gradient_reaches_the_images():
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    assert torch.autograd.grad(build(5).eval()(images).logits.sum(), images)[0].abs().sum() > 0


def test_at_most_all_modules():
    with pytest.raises(ConfigError, match="at most 6, got 7: resnet18 has the modules conv1, bn1, layer1"):
        build(7)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["shot", "gsfda", "eata", "tent", "l2d", "pden", "sar", "cotta", "bmd", "ratp"])
def test_methods_train_on(method, tmp_path):
    words = ["--set", "network.frozen=2", "--epochs", 1, "--steps", 1, "--device", "cpu", "--out", tmp_path / "run"]
    result = ratp("run", "demo", "-m", method, *words, "--set", "network.width=0.1")
    assert result.code == 0, result.err
