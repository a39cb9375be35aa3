"""SAR learns from sure images, with a gradient from uphill, and returns to the source if it collapses."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp.functional.losses import logit_entropy
from ratp.functional.norm import affine_parameters, by_batch
from ratp.methods.sar import uphill
from ratp.methods.shared.online import blocks_of, lower_affine_parameters
from ratp.networks.backbones import make_backbone
from ratp.networks.network import Network, NetworkConfig
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest

PLAIN_SGD = {"step.optimiser": "sgd", "step.rate": 0.1, "step.momentum": 0.0}
ALL = {"margin": 2.0, "recover_below": 0.0}


def build_method(name="sar", **changes):
    method, source, targets = toy_method(toy_plan(name, changes=changes))
    method.fit_source(source)
    return method, [target.unlabelled() for target in targets]


def network_of(method):
    return {name: tensor.clone() for name, tensor in method.network.state_dict().items()}


def entropies_of(network, inputs):
    with by_batch(network.eval()):
        p = network(inputs).logits.softmax(dim=1)
    return -(p * p.log()).sum(dim=1)


def middle(values):
    """A number that half of the values are below."""
    ordered = values.sort().values
    return ordered[len(ordered) // 2 - 1 :][:2].mean().item()


def step_by_hand(method, images, radius, replay):
    """The parameters after one step of plain SGD at 0.1, and which of the sure images are sure uphill too."""
    network = deepcopy(method.network).eval()
    parameters = {n: p for n, p in network.named_parameters() if n.startswith(("backbone.1.", "backbone.5."))}
    start = {n: p.detach().clone() for n, p in parameters.items()}
    inputs = method.scaling(images)
    first = entropies_of(network, inputs)
    sure = [i for i, h in enumerate(first.tolist()) if h < method.threshold]
    slope = torch.autograd.grad(sum(first[i] for i in sure) / len(sure), list(parameters.values()))
    length = math.sqrt(sum(float(g.double().square().sum()) for g in slope))
    with torch.no_grad():
        for parameter, g in zip(parameters.values(), slope, strict=True):
            parameter += radius * g / length
    second = entropies_of(network, inputs)
    still = [i for i in sure if second[i] < method.threshold]
    loss = sum(second[i] for i in still) / len(still)
    total = loss
    if replay == "separate":
        index = torch.randint(len(method.memory), (8,), generator=method.setting.generator("batches", 1))
        with by_batch(network):
            stored = network(method.scaling(method.memory.images[index])).logits
        total = loss + F.cross_entropy(stored, method.memory.labels[index])
    gradients = torch.autograd.grad(total, list(parameters.values()))
    after = {n: start[n] - 0.1 * g for n, g in zip(start, gradients, strict=True)}
    return after, sure, still, loss.item()


class TestStep:
    @pytest.mark.parametrize("replay", ["none", "separate"])
    def test_by_hand(self, replay):
        """Some images are unsure at first, and some more of them uphill."""
        method, (target, _) = build_method(replay=replay, radius=0.5, recover_below=0.0, **PLAIN_SGD)
        images = target.images[:24]
        method.threshold = middle(entropies_of(method.network, method.scaling(images)))
        after, sure, still, loss = step_by_hand(method, images, 0.5, replay)
        assert 0 < len(still) < len(sure) < 24
        before = network_of(method)
        logits = method.observe(images)
        with torch.no_grad(), by_batch(method.network):
            assert not torch.allclose(logits, method.network(method.scaling(images)).logits)
        found = method.network.state_dict()
        for name, value in before.items():
            torch.testing.assert_close(found[name], after.get(name, value), rtol=1e-4, atol=1e-6)
            assert torch.equal(found[name], value) == (name not in after)
        assert (method._shown, method._learnt) == (24, len(still))
        assert method.mean_loss == pytest.approx(loss, rel=1e-4)

    def test_the_prediction_is_that_from_before(self):
        method, (target, _) = build_method(**ALL)
        with torch.no_grad(), by_batch(method.network.eval()):
            logits = method.network(method.scaling(target.images[:8])).logits
        torch.testing.assert_close(method.observe(target.images[:8]), logits)

    def test_on_all_images_and_layers_without_looking_uphill_it_is_tent(self):
        sar, targets = build_method(radius=0.0, freeze_top=False, **ALL)
        tent, _ = build_method("tent")
        for target in targets:
            sar.adapt(target)
            tent.adapt(target)
        torch.testing.assert_close(dict(sar.network.state_dict()), dict(tent.network.state_dict()))

    def test_an_entropy_at_the_threshold_is_left_out(self):
        method, (target, _) = build_method(**ALL)
        first = logit_entropy(method.observe(target.images[:8]))
        method, _ = build_method(**ALL)
        method.threshold = first.max().item()
        method.observe(target.images[:8])
        assert method._learnt <= 7


class TestUphill:
    def test_it_goes_as_far_as_the_radius_along_the_gradient_and_returns(self):
        parameters = [torch.tensor([1.0, 2.0]), torch.tensor([[0.1]])]
        before = [p.clone() for p in parameters]
        with uphill(parameters, [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])], 0.5):
            assert parameters[0].tolist() == pytest.approx([1.3, 2.0])
            assert parameters[1].item() == pytest.approx(0.5)
        assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))

    def test_a_gradient_of_zero_goes_nowhere(self):
        parameters = [torch.tensor([1.0, 2.0])]
        with uphill(parameters, [torch.zeros(2)], 0.5):
            assert parameters[0].tolist() == [1.0, 2.0]

    def test_it_returns_after_an_error(self):
        parameters = [torch.tensor([0.1])]
        with pytest.raises(KeyError), uphill(parameters, [torch.ones(1)], 0.7):
            raise KeyError
        assert torch.equal(parameters[0], torch.tensor([0.1]))


class TestNothingKept:
    @pytest.mark.parametrize("replay", ["none", "separate"])
    def test_at_first_there_is_no_step_at_all(self, replay):
        method, targets = build_method(margin=0.0, replay=replay)
        before = network_of(method)
        for target in targets:
            method.adapt(target)
        assert same_tensors(method.network.state_dict(), before)
        assert method.mean_loss is None
        assert all_finite(method.state())

    def test_nor_uphill(self):
        """Far enough uphill, the only sure image is unsure."""
        method, (target, _) = build_method(radius=3.0)
        before, images = network_of(method), target.images[:8]
        first = entropies_of(method.network, method.scaling(images)).sort().values
        method.threshold = first[:2].mean().item()
        method.observe(images)
        assert (method._shown, method._learnt, method.mean_loss) == (8, 0, None)
        assert same_tensors(method.network.state_dict(), before)


class TestRecovery:
    def test_the_limit_goes_by_the_number_of_classes(self):
        assert build_method()[0].limit == pytest.approx(0.2 * math.log(4) / math.log(1000))
        assert build_method(recover_scale="none")[0].limit == 0.2

    def test_a_low_loss_brings_the_source_back(self):
        method, targets = build_method(margin=2.0, recover_below=100.0)
        before = network_of(method)
        method.adapt(targets[0])
        assert same_tensors(method.network.state_dict(), before)
        assert method.mean_loss is None
        (phase,) = method.target_phases(targets[1])
        phase.begin()
        phase.begin_epoch(0)
        for _ in range(phase.steps):
            phase.step()
        record = phase.finish()
        assert (record["recoveries"], record["learnt_from"]) == (phase.steps, 1.0)

    def test_the_optimiser_starts_anew(self):
        method, (target, _) = build_method(margin=2.0, recover_below=0.0, **{"step.optimiser": "sgd"})
        method.observe(target.images[:8])
        method.limit = 100.0
        method.observe(target.images[8:16])
        assert not any(v.any() for v in method._optimiser._velocities)

    def test_the_average_counts_the_latest_loss_by_a_tenth(self):
        method, _ = build_method(**ALL)
        method._begin()
        for loss in (1.0, 2.0, 0.5):
            method._watch(loss)
        assert method.mean_loss == pytest.approx(0.9 * (0.9 * 1.0 + 0.1 * 2.0) + 0.1 * 0.5)

    def test_the_average_and_the_source_survive_a_reload(self):
        method, targets = build_method(**ALL)
        method.adapt(targets[0])
        state = {name: tensor.clone() for name, tensor in method.state().items()}
        other, _ = build_method(**ALL)
        other.load_state(state)
        assert other.mean_loss == method.mean_loss is not None
        assert same_tensors(other.anchors, method.anchors)


class TestLayers:
    @pytest.mark.parametrize(
        ("backbone", "side", "left_out", "count"),
        [("dtn", 32, ("backbone.9",), 2), ("resnet50", 64, ("backbone.layer4",), 43)],
    )
    def test_the_last_block_and_the_bottleneck_are_left_out(self, backbone, side, left_out, count):
        network = Network(NetworkConfig(backbone, hidden=8, dim=4), 7, (side, side))
        found, all_ = lower_affine_parameters(network), affine_parameters(network)
        assert list(found) == [name for name in all_ if not name.startswith((*left_out, "bottleneck"))]
        assert len(found) == 2 * count

    def test_three_of_twelve_blocks_of_a_transformer(self):
        pytest.importorskip("timm")
        backbone, _ = make_backbone("timm:vit_tiny_patch16_224", (224, 224))
        names = blocks_of(backbone)
        assert names == [f"blocks.{index}" for index in range(12)]
        network = nn.Module()
        network.backbone, network.bottleneck = backbone, nn.BatchNorm1d(3)
        kept = {f"backbone.blocks.{i}.norm{j}.{kind}" for i in range(9) for j in (1, 2) for kind in ("weight", "bias")}
        assert lower_affine_parameters(network).keys() == kept

    @pytest.mark.parametrize(
        ("name", "blocks"),
        [
            ("resnet101", ["layer1", "layer2", "layer3", "layer4"]),
            ("timm:test_resnet", ["layer1", "layer2", "layer3", "layer4"]),
            ("timm:test_efficientnet", [f"blocks.{index}" for index in range(5)]),
            ("timm:test_convnext", ["stages.0", "stages.1", "stages.2", "stages.3"]),
        ],
    )
    def test_blocks_are_those_of_the_whole_network(self, name, blocks):
        """Not the many of a stage of a deep network, nor two single layers with numbers."""
        pytest.importorskip("timm")
        assert blocks_of(make_backbone(name, (64, 64))[0]) == blocks

    def test_other_backbones(self):
        nested = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4)))
        assert blocks_of(nested) == ["1.0", "1.2"]
        assert blocks_of(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))) == ["1"]
        assert blocks_of(nn.Sequential(nn.Conv2d(3, 4, 1))) == []
        plain = nn.Module()
        plain.start, plain.end = nn.LayerNorm(4), nn.LayerNorm(4)
        assert blocks_of(plain) == ["start", "end"]

    def test_all_layers_if_asked(self):
        method, targets = build_method(freeze_top=False, **ALL)
        before = network_of(method)
        for target in targets:
            method.adapt(target)
        after = method.network.state_dict()
        assert {n for n in before if not torch.equal(before[n], after[n])} == affine_parameters(method.network).keys()


def test_one_image_is_predicted_and_not_learnt():
    method, (target, _) = build_method(**ALL)
    before = network_of(method)
    assert torch.equal(method.observe(target.images[:1]), method.predict(target.images[:1]))
    method.adapt(toy_domain("dot", 1).unlabelled())
    assert same_tensors(method.network.state_dict(), before)


def test_large_networks_have_their_own_values():
    large = resolve(RunRequest("pacs", "sar", weights="none")).config
    assert (large.step.optimiser, large.step.rate, large.step.momentum) == ("sgd", 2.5e-4, 0.9)
    assert not hasattr(large, "nesterov")
    small = resolve(RunRequest("digits", "sar", weights="none")).config
    assert (small.step.optimiser, small.step.rate, small.radius, small.margin) == ("adam", 1e-3, 0.05, 0.4)
