"""PDEN: generators one after another, and a network that learns from all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from helpers import TINY, all_finite, same_tensors, tensors_of, toy_domain, toy_method, toy_plan
from ratp.functional.pseudo_labels import shot_labels
from ratp.methods.pden import NOISE_DIM, Stretch, diversity, instance_contrastive, stretches
from ratp.runs.run import Run
from ratp.training.phase import train
from read_back import ReadBack

FEW = {"epochs": 6, "steps": 1, "source_generators": 2}


def build_method(domains=None, **changes):
    method, source, targets = toy_method(toy_plan("pden", domains, changes=changes))
    return method, source, [target.unlabelled() for target in targets]


def snapshot(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def run_out(phases):
    return [item for item in train(phases) if isinstance(item, dict)]


class TestStretches:
    def test_the_budget_of_a_stage(self):
        found = stretches(30, 10, 1 / 3)
        assert [(s.epochs, s.learns, s.last) for s in found] == [(2, True, False), (1, False, True)] * 10
        assert [s.first for s in found] == [first for k in range(10) for first in (3 * k, 3 * k + 2)]
        assert stretches(30, 1, 1 / 3) == [Stretch(0, 0, 20, True, False), Stretch(0, 20, 10, False, True)]

    def test_the_published_half(self):
        assert [s.epochs for s in stretches(30, 1, 0.5)] == [15, 15]

    @pytest.mark.parametrize("epochs", [1, 2, 3, 7, 12, 30])
    @pytest.mark.parametrize("generators", [1, 3, 10])
    @pytest.mark.parametrize("frozen", [0.0, 1 / 3, 0.9])
    def test_all_epochs_are_shared_out_and_every_generator_learns(self, epochs, generators, frozen):
        found = stretches(epochs, generators, frozen)
        covered = [epoch for s in found for epoch in range(s.first, s.first + s.epochs)]
        assert covered == list(range(epochs))
        count = min(generators, epochs)
        assert sorted({s.generator for s in found}) == list(range(count))
        assert [s.generator for s in found if s.learns] == [s.generator for s in found if s.last] == list(range(count))


class TestPool:
    def test_it_grows_by_every_finished_generator(self):
        method, source, targets = build_method(**FEW)
        records = run_out(method.source_phases(source))
        assert [record["generators"] for record in records] == [0, 1, 1, 2]
        assert records[-1]["exemplars"] == len(method.memory) and "exemplars" not in records[0]
        for index, target in enumerate(targets):
            method.adapt(target)
            assert len(method.generators) == 3 + index
        assert not any(p.requires_grad for g in method.generators for p in g.parameters())

    def test_earlier_generators_stay_as_they_are(self):
        method, source, targets = build_method(**FEW)
        method.fit_source(source)
        before = [snapshot(generator.state_dict()) for generator in method.generators]
        method.adapt(targets[0])
        assert all(same_tensors(g.state_dict(), b) for g, b in zip(method.generators, before, strict=False))

    def test_a_frozen_generator_stays_bit_for_bit_while_the_network_learns(self):
        method, source, _ = build_method(**FEW)
        learning, frozen, *_ = method.source_phases(source)
        run_out([learning])
        generator = learning.stage._generator
        before, network = snapshot(generator.state_dict()), snapshot(method.network.state_dict())
        run_out([frozen])
        assert method.generators == [generator]
        assert same_tensors(generator.state_dict(), before)
        assert not same_tensors(method.network.state_dict(), network)

    def test_a_learning_generator_changes_and_so_does_its_way_back(self):
        method, source, _ = build_method(**FEW)
        phase, *_ = method.source_phases(source)
        phase.begin()
        phase.begin_epoch(0)
        parts = phase.stage._generator, phase.stage._back
        before = [snapshot(part.state_dict()) for part in parts]
        phase.step()
        for part, old in zip(parts, before, strict=True):
            assert not any(torch.equal(tensor, old[name]) for name, tensor in part.state_dict().items())

    def test_generators_differ_from_one_another_and_between_stages(self):
        method, source, targets = build_method(**FEW)
        method.fit_source(source)
        method.adapt(targets[0])
        weights = [generator.layers[0].weight for generator in method.generators]
        assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])

    def test_pool_and_projection_are_in_the_state_but_not_in_the_network(self):
        method, source, targets = build_method(**FEW)
        empty = snapshot(method.state())
        assert {name.partition(".")[0] for name in empty} == {"network", "memory", "projection"}
        method.fit_source(source)
        state = snapshot(method.state())
        assert {name.split(".")[1] for name in state if name.startswith("generators.")} == {"0", "1"}
        other, _, _ = build_method(**FEW)
        chance = torch.random.get_rng_state()
        other.load_state(state)
        assert torch.equal(torch.random.get_rng_state(), chance)
        assert same_tensors(other.state(), state)
        for one in (method, other):
            one.adapt(targets[0])
        assert same_tensors(other.state(), method.state())
        other.load_state(empty)
        assert other.generators == []


class TestStep:
    def started(self, which=0, **changes):
        """A phase of the source before its first step."""
        method, source, _ = build_method(**FEW, **changes)
        phases = method.source_phases(source)
        run_out(phases[:which])
        phases[which].begin()
        phases[which].begin_epoch(0)
        method.network.train()
        return method, phases[which]

    def test_names_of_the_four_kinds_of_phases(self):
        method, source, _ = build_method(**FEW)
        names = [phase.name for phase in method.source_phases(source)]
        assert names == ["generator 1", "generator 1 frozen", "generator 2", "generator 2 frozen"]

    @pytest.mark.parametrize(("which", "views"), [(0, 2), (1, 2), (2, 4), (3, 4)])
    def test_it_learns_from_all_views(self, which, views, monkeypatch):
        method, phase = self.started(which)
        seen, real = [], type(method.network).forward

        def noted(network, images):
            seen.append(len(images))
            return real(network, images)

        monkeypatch.setattr(type(method.network), "forward", noted)
        names = set(phase.step())
        batch = TINY["batch"]
        assert seen == ([views * batch, 2 * batch] if phase.stretch.learns else [views * batch])
        learnt = {"total", "ce", "expansion", "contrast"}
        assert names == learnt | ({"recognition", "diversity", "cycle", "adversary"} if phase.stretch.learns else set())

    def test_the_networks_turn(self):
        (_, phase), (twin, other) = self.started(2, expansion=0.5), self.started(2, expansion=0.5)
        stage = other.stage
        batch = stage.batches.draw(TINY["batch"])
        clean = batch.images * 0.5 + 0.5
        assert clean.min() >= -1e-6 and clean.max() <= 1 + 1e-6
        generated = stage._generator(clean, torch.randn(len(clean), NOISE_DIM, generator=stage._noise))
        old_noise = torch.randn(len(clean), NOISE_DIM, generator=stage._noise)
        assert torch.randint(1, (1,), generator=stage._noise) == 0
        old = twin.generators[0](clean, old_noise)
        u = torch.rand(len(clean), 1, 1, 1, generator=stage._noise)
        views = [generated, clean, old, u * clean + (1 - u) * old]
        output = twin.network(torch.cat([(view - 0.5) / 0.5 for view in views]))
        losses = [F.cross_entropy(part, batch.labels) for part in output.logits.chunk(4)]
        step = phase.step()
        torch.testing.assert_close(step["ce"], sum(losses[1:]))
        torch.testing.assert_close(step["expansion"], 0.5 * losses[0])
        contrast = instance_contrastive(twin.projection(output.embedding).chunk(4))
        torch.testing.assert_close(step["contrast"], 0.5 * contrast)
        torch.testing.assert_close(step["total"], step["ce"] + step["expansion"] + step["contrast"])

    def test_the_generators_turn_leaves_the_network_alone(self):
        method, phase = self.started(2)
        stage = phase.stage
        batch = stage.batches.draw(TINY["batch"])
        clean = batch.images * 0.5 + 0.5
        seen = stage._generator.look(clean)
        output = stage._draw(seen)
        before = snapshot(dict(method.network.named_parameters()) | dict(method.projection.named_parameters()))
        generator = snapshot(stage._generator.state_dict())
        terms = stage._expand(output, seen, clean, [batch.images] * 3, batch.labels)
        after = dict(method.network.named_parameters()) | dict(method.projection.named_parameters())
        assert same_tensors(after, before)
        assert not same_tensors(stage._generator.state_dict(), generator)
        assert -2 * 0.5 <= terms["diversity"] < 0
        assert all(terms[name] > 0 for name in ("recognition", "cycle", "adversary"))

    def test_the_networks_turn_leaves_the_generator_alone(self):
        _, phase = self.started(0)
        stage = phase.stage
        batch = stage.batches.draw(TINY["batch"])
        before = snapshot(stage._generator.state_dict())
        stage._learn(batch.images, [batch.images], batch.labels)
        assert same_tensors(stage._generator.state_dict(), before)

    def test_generator_follows_its_objective(self):
        """With one weight alone, its draws come apart, or its images can be brought back."""
        only = {"recognition": 0, "adversary": 0, "generator_lr": 0.01}
        stage = self.started(0, **only, cycle=0)[1].stage
        clean = stage.batches.draw(TINY["batch"]).images * 0.5 + 0.5

        def apart():
            seen = stage._generator.look(clean)
            return diversity(stage._draw(seen), stage._draw(seen), 0.5)

        before = apart()
        for _ in range(20):
            stage.step()
        assert apart() > before + 0.01
        stage = self.started(0, **only, diversity=0)[1].stage
        first = stage.step()["cycle"]
        for _ in range(20):
            last = stage.step()["cycle"]
        assert last < first

    def test_the_layout_of_gpus_is_kept_from_layer_to_layer_and_gives_the_same(self):
        """Each layer that turned images round would cost as much again on a GPU."""
        results = {}
        for channels_last in (False, True):
            method, source, _ = build_method(**FEW)
            if channels_last:
                method.network.to(memory_format=torch.channels_last).channels_last = True
            layouts = set()
            for phase in method.source_phases(source)[:3]:  # the last of them with an earlier generator
                phase.begin()
                phase.begin_epoch(0)
                for layer in (*phase.stage._generator.layers, *phase.stage._back.layers):
                    layer.register_forward_hook(
                        lambda _, inputs, output, layouts=layouts: layouts.update(
                            tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (*inputs, output)
                        )
                    )
                phase.step()
                phase.finish()
            assert layouts == {channels_last}
            results[channels_last] = method.state()
        for name, tensor in results[False].items():
            torch.testing.assert_close(results[True][name], tensor, rtol=1e-3, atol=1e-4, msg=name)

    def test_recomputing_changes_no_bit(self):
        outcomes = []
        for recompute in (False, True):
            method, source, targets = build_method(**FEW, recompute=recompute)
            method.fit_source(source)
            method.adapt(targets[0])
            outcomes.append(method.state())
        assert same_tensors(*outcomes)

    @pytest.mark.parametrize("recompute", [False, True])
    def test_a_step_reads_nothing_back_and_draws_from_its_generators_only(self, recompute):
        method, source, targets = build_method(**FEW, recompute=recompute, **{"target_transform.flip": 0.5})
        method.fit_source(source)
        for phase in method.target_phases(targets[0]):
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
        assert torch.equal(phase.stage.batches.labels, shot_labels(output.embedding, output.logits.softmax(dim=1)))
        phase.step()
        after = method.state()
        weights = [name for name in after if name.endswith("weight") and name.startswith(("network", "projection"))]
        assert not any(torch.equal(after[name], before[name]) for name in weights)

    def test_rate_and_labels_follow_the_epochs_of_the_stage(self):
        method, source, targets = build_method(epochs=9, steps=1, target_generators=3, refresh=2)
        method.fit_source(source)
        phases = method.target_phases(targets[0])
        seen = [phase.begin_epoch(epoch) for phase in phases for epoch in range(phase.epochs)]
        assert ["labels_changed" in record for record in seen] == [epoch % 2 == 0 for epoch in range(9)]
        (plain,) = toy_method(toy_plan("pcl", changes={"epochs": 9}))[0].source_phases(source)
        assert [record["lr"] for record in seen] == [plain.begin_epoch(epoch)["lr"] for epoch in range(9)]

    def test_batches_go_on_from_one_generator_to_the_next(self):
        method, source, _ = build_method(epochs=4, source_generators=4)
        phases = method.source_phases(source)
        assert len({id(phase.stage) for phase in phases}) == 1
        assert phases[0].generators is phases[1].generators

    @pytest.mark.parametrize(("replay", "some"), [("union", True), ("none", False)])
    def test_the_memory_is_in_the_batches(self, replay, some):
        method, source, targets = build_method(replay=replay)
        method.fit_source(source)
        phase, *_ = method.target_phases(targets[0])
        assert phase.stage.batches.draw(200).replayed.any().item() is some

    def test_small_domains_give_numbers(self):
        tiny = [toy_domain("ink"), toy_domain("mud", 1), toy_domain("fog", 3), toy_domain("dew", 9, classes=(2,))]
        for changes in ({}, {"memory": 0}, {"batch": 2}):
            method, source, targets = build_method(tiny, **changes)
            method.fit_source(source)
            for target in targets:
                method.adapt(target)
                assert all_finite(method.state())


@pytest.mark.parametrize("events", [3, 9])
def test_an_interrupted_run_ends_like_an_undisturbed_one(events, tmp_path):
    Run(toy_plan("pden"), tmp_path / "whole").execute()
    run = Run(toy_plan("pden"), tmp_path / "run").events()
    for _ in range(events):
        next(run)
    run.close()
    Run(toy_plan("pden"), tmp_path / "run").execute()
    assert same_tensors(tensors_of(tmp_path / "run"), tensors_of(tmp_path / "whole"))


@pytest.mark.slow
def test_a_large_network_in_low_precision_gives_numbers():
    changes = {"network.backbone": "resnet18", "network.width": 1, "batch": 4, "steps": 1, "epochs": 2}
    plan = replace(toy_plan("pden", changes=changes), weights_from="none", precision="bf16")
    method, source, targets = toy_method(plan)
    method.fit_source(source)
    method.adapt(targets[0].unlabelled())
    assert plan.config.recompute
    assert all_finite(method.state())


@pytest.mark.slow
def test_it_learns_the_toy():
    sizes = {"network.width": 0.2, "network.hidden": 32, "network.dim": 16, "epochs": 3, "steps": 8, "batch": 8}
    method, source, targets = build_method(**sizes, lr=0.03, source_generators=2)
    method.fit_source(source)
    method.adapt(targets[0])
    for domain in (toy_domain("ink"), toy_domain("mud", 32)):
        assert (method.predict(domain.images).argmax(dim=1) == domain.labels).float().mean() > 0.9
