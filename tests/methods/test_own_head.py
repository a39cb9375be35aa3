"""The head and the optimisers that source-free methods were published with."""

from __future__ import annotations

import pytest
import torch

import source_free_checks as checks
from helpers import same_tensors, toy_plan
from ratp._core.files import read_tensors
from ratp.config import as_dict, override
from ratp.errors import ConfigError
from ratp.functional.optim import SGDConfig
from ratp.methods.shared.source_free import SourceFreeConfig
from ratp.runs.plan import resolve
from ratp.runs.record import read_run
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from read_back import ReadBack

FAMILY = ("shot", "shot+", "shot++", "gsfda", "bmd")
OWN = {"momentum": 0.9, "weight_decay": 1e-3, "schedule": "per-step", "nesterov": True}
ON_SOURCE = {f"source_sgd.{name}": value for name, value in OWN.items()}
EVERYWHERE = {f"sgd.{name}": value for name, value in OWN.items()}


OWN_HEAD = {"network.bottleneck": "one", "network.bias": True, "network.weight_norm": True}


class TestSourceOptimiser:
    def test_by_default_it_is_that_of_targets(self):
        config = override(SourceFreeConfig(), EVERYWHERE)
        assert SourceFreeConfig().sgd_on_source == SGDConfig()
        assert config.sgd_on_source == config.sgd == SGDConfig(**OWN)
        assert override(config, {"source_sgd.momentum": 0.5}).sgd_on_source == SGDConfig(**OWN | {"momentum": 0.5})
        assert override(config, {"source_sgd.momentum": "0", "source_sgd.nesterov": "false"}).sgd_on_source == (
            SGDConfig(**OWN | {"momentum": 0.0, "nesterov": False})
        )
        plan = toy_plan("shot")
        assert not any(name.startswith("source_sgd") for name in plan.decisions()["switches"])

    @pytest.mark.parametrize("name", FAMILY)
    def test_it_trains_on_the_source_alone(self, name):
        method, source, targets = checks.build_method(name, **ON_SOURCE)
        method.fit_source(source)
        trained = checks.snapshot(method.state())
        other, _, _ = checks.build_method(name, **EVERYWHERE)
        other.fit_source(source)
        assert same_tensors(other.state(), trained)
        plain, _, _ = checks.build_method(name)
        plain.fit_source(source)
        assert not torch.equal(plain.state()["network.classifier.weight"], trained["network.classifier.weight"])

        plain, _, _ = checks.build_method(name)  # on targets it learns as without the switch
        for one in (method, plain):
            one.load_state(trained)
            one.adapt(targets[0])
        assert same_tensors(plain.state(), method.state())


class TestGSFDA:
    def test_one_layer_is_masked_after_batch_norm(self):
        method, _, targets = checks.build_method("gsfda", **OWN_HEAD)
        method.gate.slot.fill_(1)
        linear, norm, _, gate = method.network.bottleneck
        assert gate is method.gate
        images = method.scaling(targets[0].images[:8])
        with torch.no_grad():
            output = method.network.eval()(images)
            # the running statistics are still 0 and 1
            normed = linear(method.network.features(images)) / (1 + norm.eps) ** 0.5 * norm.weight + norm.bias
            embedding = normed * torch.sigmoid(100 * gate.domains[1])
            logits = embedding @ method.network.prototypes.T + method.network.classifier.bias
        torch.testing.assert_close(output.embedding, embedding)
        torch.testing.assert_close(output.logits, logits)

    def test_channels_used_elsewhere_stay_and_the_others_take_a_plain_step(self):
        changes = {"replay": "none", "sgd.weight_decay": 0.1, "sgd.momentum": 0.9}
        method, source, targets = checks.build_method("gsfda", **OWN_HEAD, **changes)
        method.fit_source(source)
        used = torch.tensor([1.0, 1, 1, 1, 0, 0])
        with torch.no_grad():
            method.gate.domains.copy_(torch.stack([2 * used - 1, *[-torch.ones(6)] * 3]))
            method.gate.domains[1, 3:] = 1  # its own mask keeps no channel of others from anything
        network, classifier = method.network, method.network.classifier
        (phase,) = method.target_phases(targets[0])
        phase.begin()
        phase.begin_epoch(0)
        assert phase._free.item() == pytest.approx(2 / 6)
        linear, norm = network.bottleneck[0], network.bottleneck[1]
        rows = [linear.weight, linear.bias, norm.weight, norm.bias]
        others = [classifier.direction, classifier.length, classifier.bias]
        before = [p.detach().clone() for p in (*rows, *others)]

        # one step by hand: (1 − a)·(∇L + λθ), lengths and bias without 1 − a
        twin = phase.batches.draw
        drawn = []
        phase.batches.draw = lambda count: drawn.append(twin(count)) or drawn[-1]
        generators = [g.get_state() for g in phase.generators]
        statistics = checks.snapshot(network.state_dict())
        bank = [phase._bank._directions.clone(), phase._bank._logs.clone()]
        phase.step()
        after = [p.detach().clone() for p in (*rows, *others)]
        for g, state in zip(phase.generators, generators, strict=True):
            g.set_state(state)
        network.load_state_dict(statistics)
        phase._bank._directions.copy_(bank[0])
        phase._bank._logs.copy_(bank[1])
        batch = twin(phase.batch)
        assert torch.equal(batch.images, drawn[0].images)
        output = network.train()(batch.images)
        logs = output.logits.log_softmax(dim=1)
        near = phase._bank.nearest(output.embedding.detach(), batch.places, method.config.neighbours)
        agreement = (logs[:, None].exp() * phase._bank.logs[near].exp()).sum(dim=2).log().sum(dim=1)
        mean = logs.exp().mean(dim=0)
        loss = -agreement.mean() + (mean * (mean + 1e-5).log()).sum()
        gradients = torch.autograd.grad(loss, [*rows, *others])
        free = 1 - used
        shares = [free[:, None], free, free, free, free[None, :], 1.0, 1.0]
        rate = method.setting.recipe.lr
        for old, new, gradient, share in zip(before, after, gradients, shares, strict=True):
            expected = old - rate * share * (gradient + 0.1 * old)
            torch.testing.assert_close(new, expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(after[0][:4], before[0][:4])
        assert torch.equal(after[4][:, :4], before[4][:, :4])
        assert not torch.equal(after[0][4:], before[0][4:])

    def test_steps_can_be_captured(self):
        method, source, targets = checks.build_method("gsfda", **OWN_HEAD)
        method.fit_source(source)
        (phase,) = method.target_phases(targets[0])
        phase.begin()
        phase.begin_epoch(0)
        phase.step()
        with ReadBack():
            phase.step()


class TestL2D:
    def test_one_layer_has_both_heads_on_the_features(self):
        method, _, targets = checks.build_method("l2d", **OWN_HEAD, spread=0.0)
        network = method.network.eval()
        images = method.scaling(targets[0].images[:8])
        with torch.no_grad():
            found = method.encode(images, torch.Generator())
            features, plain = network.features(images), network(images)
        variance = features @ method.variance.weight.T + method.variance.bias
        torch.testing.assert_close(found.log_variance, variance.relu())
        assert torch.equal(found.mean, plain.embedding)
        assert torch.equal(found.embedding, plain.embedding)
        assert torch.equal(found.logits, plain.logits)


class TestSHOTPlusPlus:
    def test_a_new_classifier_begins_as_one_with_weight_norm(self):
        method, source, targets = checks.build_method("shot++", **OWN_HEAD, **{"mixmatch.new_classifier": True})
        method.fit_source(source)
        *_, mixmatch = method.target_phases(targets[0])
        network = method.network
        before = network.prototypes.detach().clone()
        assert network.classifier.bias.any()
        mixmatch.begin()
        mixmatch.begin_epoch(0)
        assert not network.classifier.bias.any()
        assert not torch.equal(network.prototypes, before)
        assert network.prototypes.abs().max() <= network.config.dim**-0.5
        torch.testing.assert_close(network.prototypes, network.classifier.direction)


def test_t3a_replaces_rows_under_weight_norm():
    method, source, targets = checks.build_method("t3a", **{"network.weight_norm": True})
    method.fit_source(source)
    method.adapt(targets[0])
    rows = method.supports.rows(len(method.weight))
    torch.testing.assert_close(method.network.prototypes, rows)
    with torch.no_grad():
        embedding = method.embed(targets[0].images)
    torch.testing.assert_close(method.predict(targets[0].images), embedding @ rows.T)


def test_the_mixture_of_aucid_is_classified_with_the_bias():
    method, source, targets = checks.build_method("aucid", **OWN_HEAD)
    method.fit_source(source)
    (phase,) = method.target_phases(targets[0])
    phase.begin()
    phase.begin_epoch(0)
    state = phase._points.get_state()
    with torch.no_grad():
        each = -(-method.config.samples * phase.batch // len(phase._mixture.components))
        points, classes = phase._mixture.sample(each, phase._points)
        network = method.network
        logits = points @ network.prototypes.T + network.classifier.bias
        expected = torch.nn.functional.cross_entropy(logits, classes)
    phase._points.set_state(state)
    torch.testing.assert_close(phase.step()["mixture"], expected)


class TestPreset:
    """``own-head``: the head and the optimiser each method was published with."""

    @pytest.mark.parametrize("name", FAMILY)
    @pytest.mark.parametrize("stream", ["demo", "digits", "pacs", "domainnet10"])
    def test_values(self, name, stream):
        plan = resolve(RunRequest(stream, name, preset="own-head", weights="none", device="cpu"))
        recipe, config = as_dict(plan.recipe), plan.config
        large = recipe["network.backbone"] != "dtn"
        lr = 0.001 if name == "bmd" and large else 0.01
        sizes = OWN_HEAD | {"network.dim": 512 if name == "gsfda" else 256, "lr": lr}
        assert {key: recipe[key] for key in sizes} == sizes
        assert config.sgd == SGDConfig(**OWN)
        constant = {"weight_decay": 5e-4, "schedule": "constant"} if name == "gsfda" else {}
        assert config.sgd_on_source == SGDConfig(**OWN | constant)
        assert config.backbone_rate == (0.1 if large else 1.0)
        assert getattr(config, "extractor", None) == (not large if name == "bmd" else None)
        assert plan.changed == {}
        if name == "gsfda":
            assert config.slots == resolve(RunRequest(stream, name, weights="none")).config.slots

    def test_sizes_can_be_changed_and_outlast_another_backbone(self):
        changes = {"network.backbone": "resnet18", "network.weight_norm": "false"}
        plan = resolve(RunRequest(method="shot", preset="own-head", changes=changes, weights="none", device="cpu"))
        assert (plan.recipe.network.dim, plan.recipe.network.bottleneck, plan.recipe.lr) == (256, "one", 0.01)
        assert plan.changed == {"network.backbone": "resnet18", "network.weight_norm": False}
        assert not plan.recipe.network.weight_norm

    @pytest.mark.parametrize("name", FAMILY)
    def test_a_run_and_its_name(self, name, tmp_path):
        plan = toy_plan(name, preset="own-head")
        Run(plan, tmp_path, reuse_source=False).execute()
        assert read_run(tmp_path).label.startswith(f"{name} (own-head, ")
        weights, _ = read_tensors(tmp_path / "weights.safetensors")
        assert {key for key in weights if "classifier" in key} == {
            f"classifier.{part}" for part in ("direction", "length", "bias")
        }

    def test_methods_without_one_name_theirs(self):
        with pytest.raises(ConfigError, match="preset of tent"):
            resolve(RunRequest(method="tent", preset="own-head"))
