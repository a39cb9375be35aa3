"""GSFDA: a mask for every domain, agreement among neighbours, channels of others left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import source_free_checks as checks
from helpers import TINY, all_finite, same_tensors, toy_domain, toy_domains, toy_plan
from ratp._core.environment import Randomness
from ratp.data.domain import LabelledDomain
from ratp.errors import ConfigError
from ratp.functional.losses import entropy
from ratp.methods.gsfda import GSFDA, Bank, annealed_scale, disagreement, domain_masks, used_elsewhere
from ratp.runs.run import Run
from ratp.training.method import Setting

NAME = "gsfda"


def start_target(**changes):
    """A method trained on the source, in the phase of the first target."""
    method, source, targets = checks.build_method(NAME, **changes)
    method.fit_source(source)
    (phase,) = method.target_phases(targets[0])
    phase.begin()
    phase.begin_epoch(0)
    return method, phase


def settle_masks(method, rows):
    """Masks as given, of ones and zeros."""
    with torch.no_grad():
        method.gate.domains.copy_(2 * torch.tensor(rows, dtype=torch.float32) - 1)


class TestSource:
    def test_a_step_is_the_sum_over_all_masks(self):
        method, source, _ = checks.build_method(NAME)
        (phase,) = method.source_phases(source)
        twin, _, _ = checks.build_method(NAME)
        (other,) = twin.source_phases(source)
        for p in (phase, other):
            p.begin()
            p.begin_epoch(0)
        batch = other.batches.draw(TINY["batch"])
        with twin.gate.unmasked():
            z = twin.network.train()(batch.images).embedding
        masks = domain_masks(twin.gate.domains, 1 / 100)
        expected = 0.0
        for mask in masks:
            log_p = (z * mask @ twin.network.prototypes.T).log_softmax(dim=1)
            targets = 0.9 * F.one_hot(batch.labels, 4) + 0.1 / 4
            expected = expected - (targets * log_p).sum(dim=1).mean()
        step = phase.step()
        torch.testing.assert_close(step["ce"], expected)
        torch.testing.assert_close(step["sparsity"], 0.1 * masks.mean())
        torch.testing.assert_close(step["total"], step["ce"] + step["sparsity"])

    def test_masks_can_be_sharp_from_the_first_step(self):
        """Masks and their mean have s = 100, as in the code for several targets; the compensation has the growing s."""
        method, source, _ = checks.build_method(NAME, source_masks="sharp", **{"sgd.weight_decay": 0.0})
        (phase,) = method.source_phases(source)
        twin, _, _ = checks.build_method(NAME)
        (other,) = twin.source_phases(source)
        for each in (method, twin):
            with torch.no_grad():
                each.gate.domains.mul_(0.01)  # near zero, where sharp masks have a gradient
        for p in (phase, other):
            p.begin()
            p.begin_epoch(0)
        batch = other.batches.draw(TINY["batch"])
        with twin.gate.unmasked():
            z = twin.network.train()(batch.images).embedding
        vectors = twin.gate.domains
        masks = 1 / (1 + (-100 * vectors).exp())
        logits = [z * mask @ twin.network.prototypes.T for mask in masks]
        expected = sum(F.cross_entropy(each, batch.labels, label_smoothing=0.1) for each in logits)
        before = vectors.detach().clone()
        step = phase.step()
        torch.testing.assert_close(step["ce"], expected)
        torch.testing.assert_close(step["sparsity"], 0.1 * masks.mean())
        # s = 1/100: (100/s)·(cosh(s·e) + 1)/(cosh(e) + 1)
        (gradient,) = torch.autograd.grad(expected + 0.1 * masks.mean(), vectors)
        gradient = gradient * 10_000 * ((before / 100).cosh() + 1) / (before.cosh() + 1)
        moved = before - method.gate.domains.detach()
        direction, wanted = (F.normalize(each.flatten(), dim=0) for each in (moved, gradient))
        torch.testing.assert_close(direction, wanted, rtol=1e-3, atol=1e-4)

    def test_other_scales_are_refused(self):
        with pytest.raises(ConfigError, match="unknown value of source_masks"):
            toy_plan(NAME, changes={"source_masks": "blunt"})

    def test_masks_sharpen_within_every_epoch(self, monkeypatch):
        import ratp.methods.gsfda as module

        seen = []
        monkeypatch.setattr(module, "annealed_scale", lambda p: seen.append(p.item()) or annealed_scale(p))
        method, source, _ = checks.build_method(NAME, steps=3)
        method.fit_source(source)
        assert seen == [0, 0.5, 1, 0, 0.5, 1]

    def test_every_mask_and_parameter_learns(self):
        method, source, _ = checks.build_method(NAME)
        before = checks.snapshot(method.network.state_dict())
        method.fit_source(source)
        after = method.network.state_dict()
        assert (after["bottleneck.3.domains"] != before["bottleneck.3.domains"]).all(dim=1).all()
        assert not any(torch.equal(after[n], before[n]) for n in after if n.endswith("weight"))

    def test_the_network_is_that_of_all_methods_but_for_the_masks(self):
        method, _, _ = checks.build_method(NAME)
        plain, _, _ = checks.build_method("shot")
        own = {n: t for n, t in method.network.state_dict().items() if not n.endswith(("domains", "slot"))}
        assert same_tensors(own, plain.network.state_dict())
        again, _, _ = checks.build_method(NAME)
        assert torch.equal(method.gate.domains, again.gate.domains)


class TestTarget:
    def test_a_step_is_agreement_with_neighbours_and_diversity(self):
        (_, phase), (twin, other) = start_target(replay="none"), start_target(replay="none")
        batch = other.batches.draw(TINY["batch"])
        with torch.no_grad():
            z = twin.network.eval()(twin.scaling(other.batches.images))
            bank = Bank(z.embedding, z.logits.log_softmax(dim=1))
        output = twin.network.train()(batch.images)
        logs = output.logits.log_softmax(dim=1)
        near = bank.nearest(output.embedding.detach(), batch.places, 3)
        assert near.shape == (TINY["batch"], 3)
        step = phase.step()
        assert step.keys() == {"total", "neighbours", "diversity"}
        torch.testing.assert_close(step["neighbours"], disagreement(logs, bank.logs[near]).mean())
        torch.testing.assert_close(step["diversity"], -entropy(logs.exp().mean(dim=0)))
        torch.testing.assert_close(step["total"], step["neighbours"] + step["diversity"])
        # then the bank knows the batch as it was seen
        torch.testing.assert_close(phase._bank.logs[batch.places[-1]], logs[-1].detach())

    def test_own_last_entries_can_be_neighbours(self):
        changes = {"replay": "none", "self_neighbour": True}
        (_, phase), (twin, other) = start_target(**changes), start_target(**changes)
        batch = other.batches.draw(TINY["batch"])
        with torch.no_grad():
            every = twin.network.eval()(twin.scaling(other.batches.images))
        output = twin.network.train()(batch.images)
        cosines = F.normalize(output.embedding.detach(), dim=1) @ F.normalize(every.embedding, dim=1).T
        q = every.logits.softmax(dim=1)[cosines.topk(3, dim=1).indices]
        p = output.logits.softmax(dim=1)
        expected = -torch.einsum("nc,nkc->nk", p, q).log().sum(dim=1).mean()
        torch.testing.assert_close(phase.step()["neighbours"], expected)

    def test_later_switches_leave_the_hash_of_runs_without_them(self):
        later = {"source_masks": "sharp", "self_neighbour": True}
        assert not later.keys() & toy_plan(NAME).decisions()["switches"].keys()
        digests = {
            toy_plan(NAME, changes=changes).digest() for changes in ({}, *(dict([item]) for item in later.items()))
        }
        assert len(digests) == 3

    def test_without_neighbours_only_diversity_is_left(self):
        _, phase = start_target(neighbours=0, replay="none")
        step = phase.step()
        assert step["neighbours"] == 0
        assert step["total"] == step["diversity"] < 0

    def test_the_bank_follows_the_batches_in_place(self):
        _, phase = start_target()
        place, before = phase._bank.directions.data_ptr(), phase._bank.directions.clone()
        phase.step()
        changed = (phase._bank.directions != before).any(dim=1)
        assert 0 < changed.sum() <= TINY["batch"]
        phase.begin_epoch(1)
        assert phase._bank.directions.data_ptr() == place

    def test_exemplars_have_their_labels_and_are_not_in_the_bank(self):
        method, phase = start_target()
        batch = phase.batches.draw(8)
        logs = method.network(batch.images).logits.log_softmax(dim=1)
        near = torch.zeros(8, 3, 4)
        none = phase._losses(batch._replace(replayed=torch.zeros(8, dtype=torch.bool)), logs, near, None)
        all_of_them = phase._losses(batch._replace(replayed=torch.ones(8, dtype=torch.bool)), logs, near, None)
        assert none["replay"] == 0
        assert all_of_them["neighbours"] == 0
        torch.testing.assert_close(all_of_them["replay"], F.nll_loss(logs, batch.labels))
        torch.testing.assert_close(none["neighbours"], disagreement(logs, near).mean())

    def test_channels_of_other_domains_stay_bit_for_bit(self):
        method, source, targets = checks.build_method(NAME)
        method.fit_source(source)
        # channels 0 to 2 are the source's; 3 is the second target's; 4 and 5 nobody else's
        settle_masks(method, [[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
        before = checks.snapshot(method.network.state_dict())
        (phase,) = method.target_phases(targets[0])
        phase.begin()
        record = phase.begin_epoch(0)
        assert record["free_channels"] == pytest.approx(2 / 6)
        for _ in range(4):
            phase.step()
        after = method.network.state_dict()
        for name, tensors in {"classifier.weight": lambda t: t.T, "bottleneck.3.weight": lambda t: t}.items():
            same = (tensors(after[name]) == tensors(before[name])).all(dim=1)
            assert same.tolist() == [True] * 4 + [False] * 2, name
        assert torch.equal(after["bottleneck.3.bias"][:4], before["bottleneck.3.bias"][:4])
        assert torch.equal(after["bottleneck.3.domains"], before["bottleneck.3.domains"])

    def test_a_half_used_channel_learns_half(self):
        """With everything else the same, what it learns is multiplied by 1 − a, decay included."""
        moves = []
        for other in (-1.0, 0.0):  # σ(100·0) = ½
            method, source, targets = checks.build_method(NAME, slots=2, **{"sgd.weight_decay": 0.5})
            method.fit_source(source)
            with torch.no_grad():
                method.gate.domains.copy_(torch.stack([torch.full((6,), other), torch.ones(6)]))
            (phase,) = method.target_phases(targets[0])
            phase.begin()
            phase.begin_epoch(0)
            before = method.network.prototypes.detach().clone()
            phase.step()
            moves.append(method.network.prototypes.detach() - before)
        torch.testing.assert_close(moves[1], moves[0] / 2, rtol=1e-3, atol=1e-8)

    def test_batch_norm_bottleneck_and_classifier_learn(self):
        method, source, targets = checks.build_method(NAME)
        method.fit_source(source)
        settle_masks(method, [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0] * 6, [0] * 6])
        before = checks.snapshot(method.state())
        method.adapt(targets[0])
        after = method.state()
        assert all_finite(after)
        names = [n for n in before if n.startswith("network.") and n.endswith(("weight", "bias", "domains"))]
        norms = tuple(f"network.backbone.{place}." for place in (1, 5, 9))
        expected = {n for n in names if n.startswith((*norms, "network.bottleneck", "network.classifier"))}
        assert {n for n in names if not torch.equal(before[n], after[n])} == expected - {"network.bottleneck.3.domains"}

    def test_the_last_predictions_go_to_the_memory(self):
        method, source, targets = checks.build_method(NAME)
        method.fit_source(source)
        method.adapt(targets[0])
        new = method.memory.domains == 1
        assert new.any()
        assert torch.equal(method.predict(method.memory.images[new]).argmax(dim=1), method.memory.labels[new])


class TestMasks:
    def test_every_stage_has_its_mask_and_late_ones_share_the_last(self):
        names = dict.fromkeys(("ink", "mud", "fog", "dew"), 12)
        method, source, targets = checks.build_method(NAME, toy_domains(**names), slots=3)
        method.fit_source(source)
        slots = [method.gate.slot.item()]
        for target in targets:
            method.adapt(target)
            slots.append(method.gate.slot.item())
        assert slots == [0, 1, 2, 2]
        assert all_finite(method.state())

    def test_latest_mask_predicts_all_domains_by_default(self):
        method, source, targets = checks.build_method(NAME)
        method.fit_source(source)
        assert torch.equal(method.predict(source.images), method.predict_for_domain(source.images, 0))
        method.adapt(targets[0])
        latest = method.predict(source.images)
        assert torch.equal(latest, method.predict_for_domain(source.images, 1))
        oracle = method.predict_for_domain(source.images, 0)
        assert not torch.equal(oracle, latest)
        assert torch.equal(method.predict(source.images), latest)
        network = method.network.eval()
        with torch.no_grad(), method.gate.unmasked():
            z = network(method.scaling(source.images)).embedding
        expected = z * domain_masks(method.gate.domains[0]) @ network.prototypes.T
        torch.testing.assert_close(oracle, expected.detach())

    def test_run_records_accuracy_with_known_domains(self, tmp_path):
        run = Run(toy_plan(NAME), tmp_path / "run")
        ends = run.execute().events("stage_finished")
        names = run.stream.order
        assert [tuple(end["accuracy_as_told"]) for end in ends] == [names[: stage + 1] for stage in range(len(names))]
        for end in ends:
            assert end["accuracy_as_told"][end["domain"]] == end["accuracy"][end["domain"]]
        tests = dict(zip(names, run.stream.tests, strict=True))
        for stage, name in enumerate(names):
            right = run.method.predict_for_domain(tests[name].images, stage).argmax(dim=1) == tests[name].labels
            assert ends[-1]["accuracy_as_told"][name] == pytest.approx(100 * right.float().mean().item())

    def test_a_stage_that_is_undone_has_no_mask_and_others_keep_theirs(self, tmp_path):
        """Blank images come second; the domains after them are predicted with the masks they were learnt with."""
        domains = toy_domains()
        blank = replace(domains[1], name="blank", images=torch.zeros_like(domains[1].images))
        plan = replace(toy_plan(NAME, [domains[0], blank, *domains[1:]], changes={"slots": 4}), guard="act")
        run = Run(plan, tmp_path / "run")
        ends = run.execute().events("stage_finished")
        assert [end.get("guard", {}).get("rolled_back") for end in ends[:2]] == [None, True]
        learnt = [end["domain"] for end in ends if not end.get("guard", {}).get("rolled_back")]
        assert len(learnt) > 1 and list(ends[-1]["accuracy_as_told"]) == learnt
        tests = dict(zip(run.stream.order, run.stream.tests, strict=True))
        for stage, name in enumerate(learnt):
            right = run.method.predict_for_domain(tests[name].images, stage).argmax(dim=1) == tests[name].labels
            assert ends[-1]["accuracy_as_told"][name] == pytest.approx(100 * right.float().mean().item())

    def test_one_slot_leaves_everything_free(self):
        method, source, targets = checks.build_method(NAME, slots=1)
        method.fit_source(source)
        (phase,) = method.target_phases(targets[0])
        phase.begin()
        assert phase.begin_epoch(0)["free_channels"] == 1
        assert used_elsewhere(domain_masks(method.gate.domains), 0).sum() == 0

    def test_asking_for_phases_changes_nothing(self):
        method, source, targets = checks.build_method(NAME)
        method.fit_source(source)
        before = checks.snapshot(method.state())
        method.target_phases(targets[0])
        assert same_tensors(method.state(), before)


def test_every_replay_gives_numbers():
    checks.check_every_replay_gives_numbers(NAME)


def test_small_domains():
    checks.check_small_domains(NAME)


def test_steps_can_be_captured():
    checks.check_steps_can_be_captured(NAME)


def test_it_adapts():
    checks.check_it_adapts(NAME)


def test_a_batch_of_two_and_of_one_class():
    domains = [toy_domain("ink"), toy_domain("mud", 9, classes=(2,))]
    method, source, targets = checks.build_method(NAME, domains, batch=2)
    method.fit_source(source)
    method.adapt(targets[0])
    assert all_finite(method.state())


def test_resnets_learn():
    """BatchNorm of shortcuts is found too."""
    changes = {"network.backbone": "resnet18", "network.width": 1, "batch": 4, "steps": 1, "epochs": 1}
    plan = toy_plan(NAME, changes=changes)
    assert plan.config.backbone_rate == 0.1
    setting = Setting(plan.recipe, ("a", "b", "c", "d"), (64, 64), Randomness(1), torch.device("cpu"))
    method = GSFDA(setting, plan.config)
    images = torch.randint(256, (8, 3, 64, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    source = LabelledDomain("made", images, torch.arange(8) % 4, setting.classes)
    method.fit_source(source)
    before = checks.snapshot(method.network.state_dict())
    method.adapt(source.unlabelled())
    after = method.network.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert "backbone.layer2.0.downsample.1.weight" in changed
    assert "backbone.layer2.0.downsample.0.weight" not in changed
    assert all_finite(method.state())


@pytest.mark.parametrize(("stream", "slots"), [("demo", 4), ("digits", 5), ("pacs", 4), ("domainnet10", 6)])
def test_streams_have_a_slot_for_each_domain(stream, slots):
    assert GSFDA.stream_values[stream, "official"]["slots"] == slots
