"""L2D: a network and a style module that take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from helpers import TINY, all_finite, same_tensors, tensors_of, toy_domain, toy_method, toy_plan
from ratp.errors import ConfigError
from ratp.functional.losses import supervised_contrastive
from ratp.functional.pseudo_labels import shot_labels
from ratp.methods.l2d import misfit
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from read_back import ReadBack


def build_method(domains=None, **changes):
    method, source, targets = toy_method(toy_plan("l2d", domains, changes=changes))
    return method, source, [target.unlabelled() for target in targets]


def snapshot(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def parameters(module):
    return snapshot(dict(module.named_parameters()))


def start_source(**changes):
    """A method on its source, and its phase before the first step."""
    method, source, _ = build_method(**changes)
    (phase,) = method.source_phases(source)
    phase.begin()
    phase.begin_epoch(0)
    method.network.train()
    return method, phase


class TestEncoding:
    def test_embeddings_scatter_by_a_fifth_of_their_deviation(self):
        method, phase = start_source()
        method.network.eval()
        images = phase.batches.draw(TINY["batch"]).images
        with torch.no_grad():
            draws = [method.encode(images, torch.Generator().manual_seed(seed)) for seed in range(200)]
        first = draws[0]
        assert all(torch.equal(draw.mean, first.mean) for draw in draws)
        scatter = torch.stack([draw.embedding for draw in draws]).std(dim=0)
        torch.testing.assert_close(scatter, 0.2 * (first.log_variance / 2).exp(), rtol=0.2, atol=0)
        assert (first.log_variance >= 0).all()
        torch.testing.assert_close(first.logits, first.embedding @ method.network.prototypes.T)

    def test_the_mean_is_what_predicts(self):
        method, phase = start_source()
        images = phase.batches.draw(TINY["batch"]).images
        with torch.no_grad():
            output = method.network.eval()(images)
            encoding = method.encode(images, torch.Generator().manual_seed(0))
        torch.testing.assert_close(encoding.mean, output.embedding)
        assert not torch.allclose(encoding.embedding, output.embedding)

    def test_predictions_do_not_scatter(self):
        method, source, targets = build_method()
        method.fit_source(source)
        assert torch.equal(method.predict(targets[0].images), method.predict(targets[0].images))


class TestTurns:
    def test_the_network_learns_while_the_style_module_stands_still(self):
        method, phase = start_source()
        batch = phase.batches.draw(TINY["batch"])
        before = [parameters(m) for m in (method.network, method.variance, method.style)]
        phase._learn(batch.images, batch.labels)
        after = [parameters(m) for m in (method.network, method.variance, method.style)]
        assert not any(torch.equal(after[0][name], before[0][name]) for name in after[0] if name.endswith("weight"))
        assert not same_tensors(after[1], before[1])
        assert same_tensors(after[2], before[2])

    def test_the_style_module_learns_while_the_network_stands_still(self):
        method, phase = start_source()
        batch = phase.batches.draw(TINY["batch"])
        before = [parameters(m) for m in (method.network, method.variance, method.style)]
        fixed = method.style.fixed.clone()
        phase._diversify(batch.images, batch.labels)
        after = [parameters(m) for m in (method.network, method.variance, method.style)]
        assert same_tensors(after[0], before[0]) and same_tensors(after[1], before[1])
        assert not any(torch.equal(after[2][name], before[2][name]) for name in after[2])
        assert torch.equal(method.style.fixed, fixed)

    def test_the_networks_turn_is_three_weighted_losses(self):
        weights = {"contrast": 0.5, "likelihood": 0.25, "styled": 0.7}
        (_, phase), (twin, other) = start_source(**weights), start_source(**weights)
        batch = other.batches.draw(TINY["batch"])
        styled = twin.style.restyle(batch.images, twin.blend, other._styles)
        mean, log_variance, z, logits = twin.encode(torch.cat([styled, batch.images]), other._noise)
        labels, n = torch.cat([batch.labels] * 2), TINY["batch"]
        step = phase.step()
        assert list(step) == ["total", "ce", "contrast", "likelihood", "discrepancy", "information"]
        torch.testing.assert_close(step["ce"], F.cross_entropy(logits, labels))
        torch.testing.assert_close(step["contrast"], 0.5 * supervised_contrastive(z, labels).mean())
        torch.testing.assert_close(step["likelihood"], 0.25 * misfit(mean[n:], log_variance[n:], z[:n]))
        torch.testing.assert_close(step["total"], step["ce"] + step["contrast"] + step["likelihood"])

    def test_terms_without_weight_are_left_out(self):
        _, phase = start_source(contrast=0, likelihood=0, information=0)
        assert list(phase.step()) == ["total", "ce", "discrepancy"]

    def test_a_batch_without_pairs_of_a_class_leaves_numbers(self):
        method, source, targets = build_method([toy_domain("ink"), toy_domain("mud", 1), toy_domain("fog", 3)], batch=2)
        method.fit_source(source)
        for target in targets:
            method.adapt(target)
        assert all_finite(method.state())


class TestStages:
    def test_targets_are_learnt_by_shots_labels_and_everything_trains(self):
        method, source, targets = build_method(epochs=1)
        method.fit_source(source)
        before = snapshot(method.state())
        (phase,) = method.target_phases(targets[0])
        phase.begin()
        assert phase.begin_epoch(0).keys() >= {"lr", "labels_changed", "labels_as_predicted"}
        with torch.no_grad():
            output = method.network.eval()(method.scaling(targets[0].images))
        assert torch.equal(phase.batches.labels, shot_labels(output.embedding, output.logits.softmax(dim=1)))
        phase.step()
        after = method.state()
        weights = [name for name in after if name.endswith("weight") and name.startswith(("network", "variance"))]
        assert not any(torch.equal(after[name], before[name]) for name in weights)
        assert phase.finish() == {"exemplars": float(len(method.memory))}

    @pytest.mark.parametrize(("replay", "some"), [("union", True), ("none", False)])
    def test_the_memory_is_in_the_batches(self, replay, some):
        method, source, targets = build_method(replay=replay)
        method.fit_source(source)
        (phase,) = method.target_phases(targets[0])
        assert phase.batches.draw(200).replayed.any().item() is some

    def test_style_module_and_head_are_in_the_state_but_not_in_the_network(self):
        method, source, _ = build_method()
        method.fit_source(source)
        state = snapshot(method.state())
        assert {name.partition(".")[0] for name in state} == {"network", "memory", "style", "variance"}
        assert "style.fixed" in state
        other, _, _ = build_method()
        other.load_state(state)
        assert same_tensors(other.state(), state)

    def test_the_rate_falls_at_four_fifths(self):
        method, source, _ = build_method(epochs=10)
        (phase,) = method.source_phases(source)
        lr = method.setting.recipe.lr
        assert [phase.begin_epoch(e)["lr"] for e in range(10)] == pytest.approx([lr] * 8 + [0.1 * lr] * 2)

    def test_published_rates(self):
        for stream, rate in {"digits": 0.01, "pacs": 0.001, "domainnet10": 0.001, "demo": 0.005}.items():
            assert resolve(RunRequest(stream, "l2d", weights="none", device="cpu")).recipe.lr == rate

    def test_a_step_reads_nothing_back_and_draws_from_its_generators_only(self):
        method, source, targets = build_method(**{"target_transform.flip": 0.5})
        method.fit_source(source)
        (phase,) = method.target_phases(targets[0])
        assert phase.captures
        phase.begin()
        phase.begin_epoch(0)
        phase.step()
        before = [generator.get_state() for generator in phase.generators]
        chance = torch.random.get_rng_state()
        with ReadBack():
            phase.step()
        assert torch.equal(torch.random.get_rng_state(), chance)
        assert not any(torch.equal(g.get_state(), b) for g, b in zip(phase.generators, before, strict=True))


def test_images_too_small_for_the_style_module_are_refused():
    with pytest.raises(ConfigError, match="set kernel_sizes to numbers below 32"):
        build_method(kernel_sizes="5,32")


def test_a_rate_that_changes_twice_is_refused():
    with pytest.raises(ConfigError, match="set decay to 1"):
        build_method(**{"sgd.schedule": "per-step"})
    build_method(decay=1, **{"sgd.schedule": "per-step"})


@pytest.mark.parametrize("events", [3, 9])
def test_an_interrupted_run_ends_like_an_undisturbed_one(events, tmp_path):
    Run(toy_plan("l2d"), tmp_path / "whole").execute()
    run = Run(toy_plan("l2d"), tmp_path / "run").events()
    for _ in range(events):
        next(run)
    run.close()
    Run(toy_plan("l2d"), tmp_path / "run").execute()
    assert same_tensors(tensors_of(tmp_path / "run"), tensors_of(tmp_path / "whole"))


@pytest.mark.slow
def test_a_large_network_in_low_precision_gives_numbers():
    changes = {"network.backbone": "resnet18", "network.width": 1, "batch": 4, "steps": 1, "epochs": 2}
    plan = replace(toy_plan("l2d", changes=changes), weights_from="none", precision="bf16")
    method, source, targets = toy_method(plan)
    method.fit_source(source)
    method.adapt(targets[0].unlabelled())
    assert all_finite(method.state())


@pytest.mark.slow
def test_it_learns_the_toy():
    sizes = {"network.width": 0.2, "network.hidden": 32, "network.dim": 16, "epochs": 4, "steps": 10, "batch": 16}
    method, source, targets = build_method(**sizes, lr=0.01, kernel_sizes="3,5")
    method.fit_source(source)
    method.adapt(targets[0])
    for domain in (toy_domain("ink"), toy_domain("mud", 32)):
        assert (method.predict(domain.images).argmax(dim=1) == domain.labels).float().mean() > 0.9
