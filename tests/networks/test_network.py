import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from helpers import all_finite, each_method, toy_method, toy_plan
from ratp._core.environment import Randomness
from ratp.errors import ConfigError
from ratp.functional.optim import SGDConfig, StageSGD
from ratp.networks.backbones import ChannelDropout
from ratp.networks.network import Network, NetworkConfig, check_network


def make(classes=10, seed=0, image_size=(32, 32), **sizes):
    with Randomness(seed).scope("network"):
        return Network(NetworkConfig(**sizes), classes, image_size)


def small(seed=0):
    return make(width=0.1, hidden=16, dim=8, seed=seed)


def make_images(count=4, seed=0):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class TestShape:
    def test_parameters_at_full_width(self):
        convolutions = sum(5 * 5 * a * b + b + 2 * b for a, b in ((3, 64), (64, 128), (128, 256)))
        bottleneck = 4096 * 256 + 256 + 2 * 256 + 256 * 128 + 128
        assert sum(p.numel() for p in make().parameters()) == convolutions + bottleneck + 10 * 128

    @pytest.mark.parametrize(("width", "hidden", "dim", "classes"), [(1.0, 256, 128, 10), (0.25, 32, 12, 7)])
    def test_outputs(self, width, hidden, dim, classes):
        network = make(classes, width=width, hidden=hidden, dim=dim).eval()
        with torch.no_grad():
            output = network(make_images())
            features = network.backbone(make_images())
        assert features.shape == (4, round(256 * width) * 16)
        assert output.embedding.shape == (4, dim)
        assert output.logits.shape == (4, classes)
        assert network.prototypes.shape == (classes, dim)

    def test_logits_are_dot_products_with_the_prototypes(self):
        network = small().eval()
        with torch.no_grad():
            embedding, logits = network(make_images())
        torch.testing.assert_close(logits, embedding @ network.prototypes.T)
        assert network.classifier.bias is None

    def test_a_tiny_width_keeps_at_least_one_channel(self):
        assert make(width=0.001).eval()(make_images()).logits.shape == (4, 10)

    def test_features_are_those_of_a_plain_dtn_without_dropout(self):
        network = small().eval()
        layers = [nn.Identity() if isinstance(module, ChannelDropout) else module for module in network.backbone]
        kinds = [type(layer).__name__ for layer in layers]
        assert kinds == ["Conv2d", "BatchNorm2d", "Identity", "ReLU"] * 3 + ["Flatten"]
        with torch.no_grad():
            torch.testing.assert_close(network.backbone(make_images()), nn.Sequential(*layers)(make_images()))
        assert [m.probability for m in network.backbone if isinstance(m, ChannelDropout)] == [0.1, 0.3, 0.5]

    @pytest.mark.parametrize(("backbone", "size"), [("dtn", (20, 12)), ("resnet18", (64, 32))])
    def test_other_backbones_and_image_sizes(self, backbone, size):
        network = make(5, backbone=backbone, hidden=16, dim=8, image_size=size).eval()
        with torch.no_grad():
            output = network(torch.randn(2, 3, *size))
        assert output.embedding.shape == (2, 8)
        assert output.logits.shape == (2, 5)


class TestOneLayer:
    """The bottleneck SHOT was published with."""

    def test_the_embedding_is_a_normalised_linear_map_of_the_features(self):
        network = make(width=0.1, dim=8, bottleneck="one").eval()
        linear, norm, _ = network.bottleneck
        with torch.no_grad():
            features = network.features(make_images())
            z = features @ linear.weight.T + linear.bias
            torch.testing.assert_close(network(make_images()).embedding, z / math.sqrt(1 + norm.eps))

    def test_half_of_it_is_dropped_while_it_learns(self):
        network = make(width=0.1, dim=64, bottleneck="one").train()
        network.use_generator(generator())
        first = network(make_images(32)).embedding
        assert 0.4 < (first == 0).float().mean() < 0.6
        network.use_generator(generator())
        assert torch.equal(network(make_images(32)).embedding, first)

    def test_nothing_is_dropped_behind_a_large_network(self):
        network = make(backbone="resnet18", dim=8, bottleneck="one", image_size=(64, 64)).train()
        assert not (network(torch.randn(4, 3, 64, 64)).embedding == 0).any()

    @pytest.mark.parametrize("name", each_method())
    @pytest.mark.parametrize("bias", [False, True])
    def test_every_method_learns_with_it_and_with_weight_norm(self, name, bias):
        changes = {"network.bottleneck": "one", "network.weight_norm": True, "network.bias": bias}
        method, source, targets = toy_method(toy_plan(name, changes=changes))
        before = {key: tensor.clone() for key, tensor in method.state().items()}
        method.fit_source(source)
        trained = ["direction", "length"] + (["bias"] if bias else [])
        for key in (f"classifier.{part}" for part in trained):
            old, new = (next(t for k, t in state.items() if k.endswith(key)) for state in (before, method.state()))
            assert not torch.equal(old, new), key
        if not method.uses_target_labels(method.config):
            method.adapt(targets[0].unlabelled())
        assert all_finite(method.state())


class TestClassifier:
    """Bias and weight norm, against torch's own layers."""

    @pytest.mark.parametrize("weight_norm", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    def test_logits_and_gradients(self, bias, weight_norm):
        network = make(width=0.1, dim=8, bias=bias, weight_norm=weight_norm)
        plain = torch.nn.Linear(8, 10, bias=bias)
        rows, shift = torch.randn(10, 8), torch.randn(10)
        network.set_prototypes(rows)
        with torch.no_grad():
            plain.weight.copy_(rows)
            if bias:
                plain.bias.copy_(shift)
                network.classifier.bias.copy_(shift)
        if weight_norm:
            plain = parametrizations.weight_norm(plain)
        z, w = torch.randn(5, 8), torch.randn(5, 10)
        torch.testing.assert_close(network.prototypes, plain.weight)
        torch.testing.assert_close(network.classify(z), plain(z))
        parts = (
            [network.classifier.length, network.classifier.direction] if weight_norm else [network.classifier.weight]
        )
        own = torch.autograd.grad((network.classify(z) * w).sum(), parts)
        # torch's are called original0 and original1, lengths (n, 1) before directions
        theirs = [p for name, p in plain.named_parameters() if name != "bias"]
        for one, other in zip(own, torch.autograd.grad((plain(z) * w).sum(), theirs), strict=True):
            torch.testing.assert_close(one, other.reshape(one.shape))
        if bias:
            gradient = torch.autograd.grad((network.classify(z) * w).sum(), [network.classifier.bias])[0]
            torch.testing.assert_close(gradient, w.sum(dim=0))

    def test_a_step_of_sgd_moves_lengths_and_directions_as_with_torch(self):
        network = make(width=0.1, dim=8, bias=True, weight_norm=True)
        plain = parametrizations.weight_norm(torch.nn.Linear(8, 10))
        plain.load_state_dict(
            {
                "bias": network.classifier.bias.detach(),
                "parametrizations.weight.original0": network.classifier.length.detach()[:, None],
                "parametrizations.weight.original1": network.classifier.direction.detach(),
            }
        )
        config = {"momentum": 0.9, "weight_decay": 1e-3, "nesterov": True}
        ours = StageSGD(network.classifier.parameters(), 0.5, 3, SGDConfig(schedule="constant", **config))
        theirs = torch.optim.SGD(plain.parameters(), 0.5, **config)
        for _ in range(3):
            z, labels = torch.randn(16, 8), torch.randint(10, (16,))
            ours.minimise(F.cross_entropy(network.classify(z), labels))
            theirs.zero_grad()
            F.cross_entropy(plain(z), labels).backward()
            theirs.step()
        torch.testing.assert_close(network.prototypes, plain.weight)

    def test_it_begins_as_long_as_it_is_and_without_bias(self):
        network = make(width=0.1, dim=8, bias=True, weight_norm=True)
        torch.testing.assert_close(network.prototypes, network.classifier.direction)
        assert network.prototypes.abs().max() <= 1 / math.sqrt(8)
        assert not network.classifier.bias.any()
        assert not make(width=0.1, dim=8, bias=True).classifier.bias.any()

    def test_a_frozen_copy_stays_and_has_no_gradient(self):
        network = make(width=0.1, dim=8, bias=True, weight_norm=True).eval()
        copy, images = network.frozen_copy(), make_images()
        before = copy(images).logits
        with torch.no_grad():
            network.classifier.length.mul_(2)
        assert torch.equal(copy(images).logits, before)
        assert not before.requires_grad
        copy.load_state_dict(network.state_dict())
        with torch.no_grad():
            assert torch.equal(copy(images).logits, network(images).logits)


class TestCheck:
    def test_valid_settings_pass(self):
        for backbone in ("dtn", "resnet50"):
            check_network(NetworkConfig(backbone=backbone))

    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            ({"backbone": "resnet05"}, "Did you mean 'resnet50'?"),
            ({"backbone": "resnet50", "width": 0.5}, "network.width belongs to dtn"),
        ],
    )
    def test_mistakes_are_found_before_anything_is_built(self, sizes, expected):
        with pytest.raises(ConfigError, match=expected.replace("?", "[?]")):
            check_network(NetworkConfig(**sizes))
        with pytest.raises(ConfigError):
            Network(NetworkConfig(**sizes), 10)

    def test_sizes_of_images(self):
        check_network(NetworkConfig(), (32, 32))
        with pytest.raises(ConfigError, match="these are 512×512"):
            check_network(NetworkConfig(), (512, 512))


class TestInitialisation:
    def test_initial_weights_are_stable(self):
        """Published results depend on them."""
        with Randomness(2022).scope("network"):
            network = Network(NetworkConfig(width=0.1, hidden=16, dim=8), 7)
            after = torch.rand(1).item()
        assert after == pytest.approx(0.4120826721191406, abs=0)
        expected = Randomness(2022).generator("network")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(expected.get_state())
            before = 3
            for layer, channels in zip((0, 4, 8), (6, 13, 26), strict=True):
                assert torch.equal(nn.Conv2d(before, channels, 5, 2, 2).weight, network.backbone[layer].weight)
                before = channels
            nn.Linear(before * 16, 16), nn.Linear(16, 8), nn.Linear(8, 7, bias=False)
            first = torch.empty(16, before * 16).normal_(std=0.01)
        assert torch.equal(first, network.bottleneck[0].weight)

    @pytest.mark.parametrize("classes", [7, 10])
    def test_prototypes_are_uniform_within_the_published_bounds(self, classes):
        weights = torch.cat([make(classes, width=0.1, seed=seed).prototypes.detach() for seed in range(3)])
        bound = 1 / math.sqrt(classes)
        assert 0.98 * bound < weights.abs().max() <= bound
        assert weights.std() == pytest.approx(bound / math.sqrt(3), rel=0.05)

    def test_bottleneck_weights_are_normal_and_biases_zero(self):
        network = make()
        for layer in (network.bottleneck[0], network.bottleneck[3]):
            assert layer.weight.std().item() == pytest.approx(0.01, rel=0.03)
            assert layer.weight.abs().max() > 0.03
            assert (layer.bias == 0).all()

    def test_a_seed_gives_the_same_network(self):
        one, same, other = small(), small(), small(seed=1)
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, same.state_dict()[name])
        assert not torch.equal(one.prototypes, other.prototypes)


class TestDropout:
    @pytest.mark.parametrize("probability", [0.1, 0.5])
    def test_whole_channels_are_dropped_and_the_rest_scaled_up(self, probability):
        dropout = ChannelDropout(probability).train()
        dropout.generator = generator()
        out = dropout(torch.ones(200, 50, 3, 3))
        channels = out.flatten(2)
        assert (channels == channels[:, :, :1]).all()
        values = channels[:, :, 0]
        assert values.unique().tolist() == pytest.approx([0, 1 / (1 - probability)])
        assert (values == 0).float().mean().item() == pytest.approx(probability, abs=0.02)

    def test_images_lose_different_channels(self):
        dropout = ChannelDropout(0.5).train()
        out = dropout(torch.ones(2, 64, 1, 1))
        assert not torch.equal(out[0], out[1])

    def test_it_draws_from_the_given_generator_alone(self):
        network = small().train()
        outputs = []
        before = torch.get_rng_state()
        for seed in (5, 5, 6):
            network.use_generator(generator(seed))
            outputs.append(network(make_images()).logits)
        assert torch.equal(outputs[0], outputs[1])
        assert not torch.equal(outputs[0], outputs[2])
        assert torch.equal(torch.get_rng_state(), before)

    def test_dropout_advances_the_generator(self):
        network = small().train()
        network.use_generator(generator())
        assert not torch.equal(network(make_images()).logits, network(make_images()).logits)

    def test_it_is_off_in_evaluation(self):
        network = small().eval()
        source = generator()
        network.use_generator(source)
        before = source.get_state()
        assert torch.equal(network(make_images()).logits, network(make_images()).logits)
        assert torch.equal(source.get_state(), before)


class TestFrozenCopy:
    def test_it_is_equal(self):
        network = small()
        network.train()(make_images())
        copy = network.frozen_copy()
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, copy.state_dict()[name])
        assert torch.equal(network.eval()(make_images()).logits, copy(make_images()).logits)

    def test_it_stays_while_the_network_learns(self):
        network = small()
        copy = network.frozen_copy()
        before = {name: tensor.clone() for name, tensor in copy.state_dict().items()}
        optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
        network.train()(make_images()).logits.square().sum().backward()
        optimiser.step()
        assert not torch.equal(network.prototypes, copy.prototypes)
        for name, tensor in copy.state_dict().items():
            assert torch.equal(tensor, before[name])

    def test_it_neither_learns_nor_drops(self):
        copy = small().train().frozen_copy()
        assert not any(parameter.requires_grad for parameter in copy.parameters())
        assert not any(module.training for module in copy.modules())
        assert not copy(make_images()).logits.requires_grad

    def test_the_network_still_learns(self):
        network = small().train()
        network.frozen_copy()
        assert network.training
        assert all(parameter.requires_grad for parameter in network.parameters())

    def test_its_dropout_holds_no_generator(self):
        network = small()
        source = generator()
        network.use_generator(source)
        state = source.get_state()
        copy = network.frozen_copy()
        assert all(m.generator is None for m in copy.modules() if isinstance(m, ChannelDropout))
        assert all(m.generator is source for m in network.modules() if isinstance(m, ChannelDropout))
        assert torch.equal(source.get_state(), state)

    def test_it_copies_any_backbone(self):
        network = make(3, backbone="resnet18", hidden=16, dim=8).eval()
        copy = network.frozen_copy()
        with torch.no_grad():
            assert torch.equal(network(make_images()).logits, copy(make_images()).logits)
        assert not {p.data_ptr() for p in network.parameters()} & {p.data_ptr() for p in copy.parameters()}

    def test_frozen_copy_does_not_rebuild(self, monkeypatch):
        network = small()
        monkeypatch.setattr("ratp.networks.network.make_backbone", None)
        assert network.frozen_copy().config == network.config

    def test_it_leaves_torchs_generator_alone(self):
        network = small()
        before = torch.get_rng_state()
        network.frozen_copy()
        assert torch.equal(torch.get_rng_state(), before)
