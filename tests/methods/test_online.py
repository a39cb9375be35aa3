"""What online methods share: batches of one domain judged by their own statistics, and stages begun by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ratp
from helpers import CLASSES, QUICK, TINY, all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp._core.environment import Randomness
from ratp.data.domain import LabelledDomain
from ratp.errors import ConfigError
from ratp.functional.norm import BatchNorm1d, BatchNorm2d, affine_parameters, batch_norms, by_batch
from ratp.methods.shared.online import FewLayersWarning, classify_by_batch, in_batches
from ratp.networks.backbones import REGISTRY
from ratp.networks.network import Network, NetworkConfig
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.streams.stream import make_stream
from ratp.training.method import Setting

ONLINE = ["tent", "eata", "cotta", "t3a", "adacon", "adabn", "sar", "rmt", "roid", "deyo"]
AFFINE = ["tent", "eata", "sar", "roid", "deyo"]
# Limits that every image is below.
LENIENT = {
    "eata": {"margin": 2.0, "similarity": 2.0},
    "sar": {"margin": 2.0, "recover_below": 0.0},
    "deyo": {"margin": 2.0, "plpd": -1.0},
}


@pytest.fixture
def setting():
    return Setting(toy_plan("source-only").recipe, CLASSES, (32, 32), Randomness(3), torch.device("cpu"))


def classify(setting, images, size=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return classify_by_batch(setting.network(), images, setting.scaling(), size, generator)


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (5, [5]), (64, [64]), (65, [65]), (127, [127]), (128, [64, 64]), (200, [64, 64, 72])]
)
def test_a_short_last_batch_is_added_to_the_one_before(count, sizes):
    parts = in_batches(torch.arange(count), 64)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), torch.arange(count))


class TestByBatch:
    def test_it_is_a_forward_pass_of_each_batch(self, setting):
        images, network = toy_domain("mud", 40).images, setting.network()
        order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
        expected = torch.empty(40, 4)
        for part in (order[:16], order[16:]):
            with torch.no_grad(), by_batch(network.eval()):
                expected[part] = network(setting.scaling()(images[part])).logits
        torch.testing.assert_close(classify(setting, images, 16), expected)

    def test_who_is_seen_together_is_up_to_the_generator(self, setting):
        images = toy_domain("mud", 40).images
        assert torch.equal(classify(setting, images, 8), classify(setting, images, 8))
        assert not torch.equal(classify(setting, images, 8), classify(setting, images, 8, seed=1))

    def test_classes_in_order_are_mixed(self, setting):
        """Batches of one class would all look alike to BatchNorm."""
        domain = toy_domain("mud", 64)
        by_class = domain.labels.argsort(stable=True)
        seen = []
        network = setting.network()
        network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        classify_by_batch(network, domain.images[by_class], setting.scaling(), 16, torch.Generator().manual_seed(0))
        places = {bytes(image.numpy().tobytes()): int(label) for image, label in zip(
            setting.scaling()(domain.images), domain.labels, strict=True)}  # fmt: skip
        assert [len(part) for part in seen] == [16] * 4
        assert all(len({places[image.numpy().tobytes()] for image in part}) == 4 for part in seen)

    def test_running_statistics_do_not_matter_and_stay(self, setting):
        network, images = setting.network().train(), toy_domain("mud", 20).images
        state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        first = classify_by_batch(network, images, setting.scaling(), 64, torch.Generator().manual_seed(0))
        assert network.training
        assert same_tensors(network.state_dict(), state)
        for layer in batch_norms(network).values():
            layer.running_mean += 5
        again = classify_by_batch(network, images, setting.scaling(), 64, torch.Generator().manual_seed(0))
        assert torch.equal(first, again)

    @pytest.mark.parametrize("count", [0, 1])
    def test_too_few_for_statistics(self, setting, count):
        assert classify(setting, toy_domain("mud", 2).images[:count]).isfinite().all()


class TestLayers:
    @pytest.mark.parametrize(("backbone", "side", "layers"), [("dtn", 32, 4), ("resnet50", 64, 54)])
    def test_all_are_found_by_type(self, backbone, side, layers):
        network = Network(NetworkConfig(backbone, hidden=8, dim=4), 7, (side, side))
        assert len(batch_norms(network)) == layers
        found = affine_parameters(network)
        assert len(found) == 2 * layers
        assert all(found[name] is dict(network.named_parameters())[name] for name in found)

    def test_those_without_parameters_have_none(self):
        assert affine_parameters(nn.Sequential(BatchNorm1d(3, affine=False), nn.Linear(3, 3))) == {}
        assert affine_parameters(nn.LayerNorm(3, elementwise_affine=False)) == {}

    def test_all_three_kinds_are_found_in_their_order(self):
        layers = [nn.LayerNorm(3), nn.Sequential(nn.GroupNorm(1, 3), nn.Linear(3, 3)), nn.BatchNorm2d(3)]
        layers += [nn.LayerNorm(3, bias=False), nn.InstanceNorm2d(3, affine=True)]
        names = ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight", "2.bias", "3.weight"]
        assert list(affine_parameters(nn.Sequential(*layers))) == names
        assert list(affine_parameters(nn.LayerNorm(3))) == ["weight", "bias"]

    @pytest.mark.parametrize("training", [True, False])
    def test_layers_of_others_take_the_batch_too(self, training):
        """Those of timm are no layers of ours."""
        ours, theirs = BatchNorm2d(3).train(training), nn.BatchNorm2d(3).train(training)
        x = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0)) * 3 + 1
        state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
        with by_batch(ours), by_batch(theirs):
            torch.testing.assert_close(ours(x), theirs(x))
            assert theirs(x).mean().abs() < 1e-5
        assert same_tensors(theirs.state_dict(), state)
        assert theirs.track_running_stats
        assert torch.equal(theirs.eval()(x), ours.eval()(x))


@pytest.mark.parametrize("name", ONLINE)
def test_images_shown_after_a_domain_begin_a_stage_as_they_do_after_a_reload(name):
    plan = toy_plan(name, changes={"reset": True} if name == "t3a" else {})
    logits = []
    for reload in (False, True):
        method, source, targets = toy_method(plan)
        method.fit_source(source)
        method.adapt(targets[0].unlabelled())
        if reload:
            state = {key: tensor.clone() for key, tensor in method.state().items()}
            method, *_ = toy_method(plan)
            method.load_state(state)
        logits.append([method.observe(part) for part in targets[1].images.split(16)])
    assert all(torch.equal(kept, loaded) for kept, loaded in zip(*logits, strict=True))


def build_on(backbone, name, *, size=32, **changes):
    """A method with another backbone, a source and a target of a few images."""
    tiny = {**TINY, **QUICK.get(name, {}), **LENIENT.get(name, {}), "network.backbone": backbone, "network.width": 1}
    plan = resolve(RunRequest(method=name, changes={**tiny, "size": size, **changes}, weights="none", device="cpu"))
    generator = torch.Generator().manual_seed(0)
    domains = [
        LabelledDomain(
            title,
            torch.randint(256, (16, 3, size, size), generator=generator, dtype=torch.uint8),
            torch.arange(16) % 4,
            CLASSES,
        )
        for title in ("ink", "mud")
    ]
    return plan.build_method(make_stream("toy", domains, 0)), domains[0], domains[1].unlabelled()


def changed_by_adapting(method, source, target):
    """The names of what a target changes in the network."""
    method.fit_source(source)
    before = {name: tensor.clone() for name, tensor in method.network.state_dict().items()}
    method.adapt(target)
    assert all_finite(method.state())
    return {name for name, tensor in method.network.state_dict().items() if not torch.equal(tensor, before[name])}


class TestTransformers:
    @pytest.fixture(autouse=True)
    def _timm(self):
        pytest.importorskip("timm")

    @pytest.mark.parametrize("name", AFFINE)
    def test_all_layer_norms_adapt(self, name):
        """Or below the last of six blocks."""
        built = build_on("timm:test_vit", name, size=160, **{"step.rate": 0.05, "step.optimiser": "adam"})
        network = built[0].network
        expected = {
            f"{path}.{kind}"
            for path, layer in network.named_modules()
            if isinstance(layer, nn.LayerNorm | nn.BatchNorm1d)
            for kind in ("weight", "bias")
        }
        assert len(expected) == 2 * (13 + 1)
        if name in ("sar", "deyo"):
            last = ("backbone.blocks.5.", "backbone.norm.", "bottleneck.")
            expected = {path for path in expected if not path.startswith(last)}
        assert changed_by_adapting(*built) == expected

    def test_statistics_of_the_batch_affect_the_bottleneck_alone(self):
        method, source, target = build_on("timm:test_vit", "adabn", size=160)
        with pytest.warns(FewLayersWarning, match=r"timm:test_vit has no BatchNorm: only those of the bottleneck"):
            method.fit_source(source)
        features = []
        method.network.bottleneck.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        plain = method.predict(target.images)
        method.adapt(target)
        features.clear()
        by_its_own = method.predict(target.images[:8])
        with torch.no_grad():
            alone = method.network.backbone(method.scaling(target.images[:8]))
        assert features[0].shape == alone.shape
        torch.testing.assert_close(features[0].sort(dim=0).values, alone.sort(dim=0).values)
        assert not torch.allclose(plain[:8], by_its_own)


class TestFewLayers:
    @pytest.fixture(autouse=True)
    def _backbones(self, monkeypatch):
        def bare():
            return nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.ReLU(), nn.Flatten())

        def grouped():
            layers = (nn.Conv2d(3, 4, 8, 8), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))
            return nn.Sequential(*layers, nn.Flatten())

        monkeypatch.setattr("ratp.networks.backbones.REGISTRY", REGISTRY.copy())
        ratp.register_backbone("bare", bare)
        ratp.register_backbone("grouped", grouped)

    @pytest.mark.parametrize("name", ["tent", "eata", "roid"])
    def test_without_any_in_the_backbone_a_note_comes_before_training(self, name):
        method, source, target = build_on("bare", name)
        with pytest.warns(FewLayersWarning, match=rf"^{name} adapts scale .* bare has none: only those of the bottlen"):
            method.source_phases(source)
        with pytest.warns(FewLayersWarning):
            assert changed_by_adapting(method, source, target) == {"bottleneck.1.weight", "bottleneck.1.bias"}

    @pytest.mark.parametrize("name", ["sar", "deyo"])
    def test_without_any_below_the_last_block_it_is_refused(self, name):
        with pytest.raises(
            ConfigError, match=rf"{name} adapts .* bare has none below its last blocks: .* freeze_top=f"
        ):
            build_on("bare", name)
        method, source, target = build_on("bare", name, freeze_top=False)
        with pytest.warns(FewLayersWarning):
            assert changed_by_adapting(method, source, target) == {"bottleneck.1.weight", "bottleneck.1.bias"}

    @pytest.mark.parametrize("name", AFFINE)
    def test_group_norms_adapt(self, name):
        found = changed_by_adapting(*build_on("grouped", name))
        layers = ("backbone.1",) if name in ("sar", "deyo") else ("backbone.1", "backbone.4", "bottleneck.1")
        assert found == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


@pytest.mark.parametrize("name", ONLINE)
def test_with_a_single_class_nothing_turns_into_nan(name):
    """Streams refuse it, but methods can be built without one. Its entropies are all 0, and so is ln K."""
    plan = toy_plan(name, changes=QUICK.get(name, {}))
    method = plan.method(Setting(plan.recipe, ("all",), (32, 32), Randomness(3), torch.device("cpu")), plan.config)
    source, target = toy_domain("ink", 24), toy_domain("mud", 20)
    method.fit_source(LabelledDomain("ink", source.images, torch.zeros_like(source.labels), ("all",)))
    method.adapt(target.unlabelled())
    assert method.predict(target.images).isfinite().all()
    assert all_finite(method.state())


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("memory", [0, 24])
def test_domains_smaller_than_a_batch(name, memory):
    plan = toy_plan(name, changes={**QUICK.get(name, {}), **LENIENT.get(name, {}), "memory": memory, "batch": 64})
    method, source, _ = toy_method(plan)
    method.fit_source(source)
    for count in (1, 2, 5):
        target = toy_domain(f"mud {count}", count).unlabelled()
        method.adapt(target)
        assert method.predict(target.images).isfinite().all()
    assert method.stage == 4
    assert all_finite(method.state())
