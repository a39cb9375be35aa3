"""Modules after blocks of a feature extractor leave everything else as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers import CLASSES, same_tensors, toy_plan
from ratp._core.environment import Randomness
from ratp.errors import ConfigError
from ratp.functional.norm import supports_row_masks
from ratp.methods.shared.insertion import insert_after
from ratp.networks.network import Network, NetworkConfig
from ratp.networks.weights import Weights
from ratp.training.method import Setting


class Doubler(nn.Module):
    """Notes the shapes it sees, and doubles."""

    def __init__(self, channels):
        super().__init__()
        self.factor = nn.Parameter(torch.full((channels,), 2.0))
        self.shapes = []

    def forward(self, x):
        self.shapes.append(tuple(x.shape[1:]))
        return x * self.factor[:, None, None]


def network(backbone="dtn", width=0.25, side=32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(NetworkConfig(backbone, width, 12, 6), 4, (side, side))


def make_images(count=4, side=32):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


CASES = {"dtn": (0.25, 32, (1, 2, 3)), "resnet18": (1.0, 64, (1, 2, 3))}


@pytest.fixture(params=CASES)
def case(request):
    width, side, blocks = CASES[request.param]
    return network(request.param, width, side), make_images(side=side), blocks


def test_tensors_keep_their_names_and_values(case):
    net, _, blocks = case
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    insert_after(net, blocks, "twice", Doubler)
    after = net.state_dict()
    new = {name for name in after if ".twice." in name}
    assert len(new) == len(blocks)
    assert same_tensors({name: after[name] for name in after if name not in new}, before)


def test_they_act_after_their_blocks(case):
    net, x, blocks = case
    inserted = insert_after(net, blocks, "twice", Doubler)
    net.eval()(x)
    seen = [inserted[block].shapes[-1] for block in blocks]
    if len(net.backbone._modules) > 12:
        assert seen == [(16, 16, 16), (32, 8, 8), (64, 4, 4)]
    else:
        assert seen == [(64, 16, 16), (128, 8, 8), (256, 4, 4)]


def test_what_they_do_counts(case):
    net, x, blocks = case
    net.eval()
    before = net.features(x)
    inserted = insert_after(net, blocks[-1:], "twice", Doubler)
    after = net.features(x)
    assert not torch.allclose(before, after)
    with torch.no_grad():
        inserted[blocks[-1]].factor.fill_(1)
    assert torch.equal(net.features(x), before)


def test_the_last_block_of_dtn_is_what_the_bottleneck_sees():
    net, x = network(), make_images()
    net.eval()
    before = net.features(x)
    insert_after(net, (3,), "twice", Doubler)
    assert torch.equal(net.features(x), 2 * before)


def test_they_learn_with_the_network_and_are_copied_with_it(case):
    net, x, blocks = case
    inserted = insert_after(net, blocks, "twice", Doubler)
    net.train()(x).logits.sum().backward()
    assert all(module.factor.grad is not None for module in inserted.values())
    copy = net.frozen_copy()
    assert not any(p.requires_grad for p in copy.parameters())
    assert same_tensors(copy.state_dict(), net.state_dict())
    net.eval()
    before = copy(x).logits
    assert torch.equal(before, net(x).logits)
    with torch.no_grad():
        inserted[blocks[0]].factor.fill_(9)
    assert torch.equal(copy(x).logits, before)
    assert not torch.equal(net(x).logits, before)
    assert supports_row_masks(net)


def test_a_state_goes_into_another_network_with_the_same(case):
    net, x, blocks = case
    insert_after(net, blocks, "twice", Doubler)
    other = Network(net.config, 4, net.image_size)
    insert_after(other, blocks, "twice", Doubler)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.eval()(x).logits, net.eval()(x).logits)


def test_the_mode_is_the_networks_and_nothing_else_changes(case):
    net, _, blocks = case
    net.eval()
    inserted = insert_after(net, blocks, "twice", Doubler)
    assert not any(module.training for module in net.modules())
    assert all(not module._forward_hooks for module in net.modules())
    net.train()
    assert all(module.training for module in inserted.values())


def test_two_kinds_can_follow_a_block():
    net, x = network(), make_images()
    net.eval()
    before = net.features(x)
    insert_after(net, (3,), "one", Doubler)
    insert_after(net, (3,), "two", Doubler)
    assert torch.equal(net.features(x), 4 * before)


@pytest.mark.parametrize(("backbone", "blocks"), [("dtn", (4,)), ("resnet18", (1, 5))])
def test_blocks_that_are_not_there_are_refused(backbone, blocks):
    width, side, _ = CASES[backbone]
    net = network(backbone, width, side)
    names = net.state_dict().keys()
    with pytest.raises(ConfigError, match="has blocks 1, 2, 3"):
        insert_after(net, blocks, "twice", Doubler)
    assert net.state_dict().keys() == names


def test_an_unknown_build_is_refused():
    net = network()
    net.backbone = nn.Flatten()
    with pytest.raises(ConfigError, match="nothing can be inserted"):
        insert_after(net, (1,), "twice", Doubler)


def test_pretrained_weights_are_there_afterwards():
    tensors = network("resnet18", 1.0, 64).backbone.state_dict()
    recipe = replace(toy_plan("source-only").recipe, network=NetworkConfig("resnet18", 1.0, 12, 6))
    weights = Weights("given", "0" * 64, tensors)
    net = Setting(recipe, CLASSES, (64, 64), Randomness(9), torch.device("cpu"), weights).network()
    insert_after(net, (1, 2, 3), "twice", Doubler)
    kept = {name: tensor for name, tensor in net.backbone.state_dict().items() if ".twice." not in name}
    assert same_tensors(kept, tensors)
