"""What online methods share: batches of one domain judged by their own statistics, and stages begun by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import CLASSES, same_tensors, toy_domain, toy_method, toy_plan
from ratp._core.environment import Randomness
from ratp.functional.norm import BatchNorm1d, BatchNorm2d, affine_parameters, batch_norms, by_batch
from ratp.methods.shared.online import classify_by_batch, in_batches
from ratp.networks.network import Network, NetworkConfig
from ratp.training.method import Setting


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


@pytest.mark.parametrize("name", ["tent", "eata", "cotta", "t3a", "adacon", "adabn"])
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
