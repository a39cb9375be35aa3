"""CoDAG: an adapter that fits a target and labels it, and a keeper that learns from the labels."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import noisy_label_checks as checks
from helpers import TINY, journal_of, same_tensors, toy_domain, toy_domains, toy_plan
from ratp.errors import ConfigError
from ratp.methods.codag import effective_classes
from ratp.runs.run import Run
from source_free_checks import build_method, snapshot

NAME = "codag"


def test_a_target_stage_has_two_phases():
    checks.check_length_of_a_target(NAME, "adapter", "keeper")


@pytest.mark.slow
def test_small_domains():
    checks.check_small_domains(NAME)


def test_a_class_without_labels_gives_no_exemplars(monkeypatch):
    checks.check_a_class_without_labels_gives_no_exemplars(NAME, monkeypatch)


@pytest.mark.slow
def test_steps_can_be_captured():
    checks.check_steps_can_be_captured(NAME)
    checks.check_steps_can_be_captured(NAME, replay="union", adapter_r_con=0.3)


@pytest.mark.slow
def test_large_networks():
    checks.check_large_networks(NAME)


@pytest.mark.slow
def test_a_stream_of_six():
    checks.check_a_stream_of_six(NAME)


@pytest.mark.slow
def test_labels_stay():
    checks.check_labels_stay(NAME)


def test_the_history_averages_the_last_epochs():
    checks.check_the_history_averages_the_last_epochs(NAME)


def test_the_source_is_learned_with_copies():
    checks.check_the_source_is_learned_with_copies(NAME)


def weights(network):
    return snapshot(network.state_dict())


def test_the_adapter_is_trained_by_shot_and_the_keeper_waits():
    method, targets = checks.trained(NAME)
    shot, _, _ = build_method("shot", replay="none")
    start = weights(method.network)
    shot.network.load_state_dict(start)
    shot.memory.seen = 1
    checks.drive(shot.target_phases(targets[0])[0])
    adapts, learns = method.target_phases(targets[0])
    assert same_tensors(weights(method.adapter), start)
    checks.drive(adapts)
    assert same_tensors(weights(method.adapter), weights(shot.network))
    assert same_tensors(weights(method.network), start)
    after = weights(method.adapter)
    checks.drive(learns)
    assert same_tensors(weights(method.adapter), after)
    changed = {n for n, p in method.network.named_parameters() if not torch.equal(p, start[n])}
    assert changed == {n for n, _ in method.network.named_parameters()}


def test_the_next_adapter_begins_as_the_keeper():
    method, targets = checks.trained(NAME, 2)
    assert not same_tensors(weights(method.adapter), weights(method.network))
    method.target_phases(targets[1])
    assert same_tensors(weights(method.adapter), weights(method.network))


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_step_of_the_keeper_written_out(epoch):
    """In each third of the phase; every term from the logits of one pass."""
    changes = {"epochs": 3, "replay_memory.distill": 0.7}
    method, targets = checks.trained(NAME, **changes)
    twin, _ = checks.trained(NAME, **changes)
    old = twin.network.frozen_copy()
    phase = method.target_phases(targets[0])[1]
    phase.begin()
    for number in range(epoch + 1):
        phase.begin_epoch(number)
    found = phase.step()

    count, randomness = TINY["batch"], twin.setting.randomness
    labels = twin.predict(targets[0].images).argmax(dim=1)  # the adapter still is the keeper
    place = torch.randint(32, (count,), generator=(batches := randomness.generator("keeper batches", 1)))
    kept = torch.randint(len(twin.memory), (count,), generator=batches)
    clean = twin.scaling(torch.cat([targets[0].images[place], twin.memory.images[kept]]))
    copies = twin.randmix(clean, randomness.generator("keeper randmix", 1))
    twin.network.use_generator(randomness.generator("keeper dropout", 1))
    logits = twin.network.train()(torch.cat([clean, copies])).logits.detach()
    rows = [*range(count), *range(2 * count, 3 * count)]
    own, y = logits[rows], labels[place].repeat(2)
    shift = torch.randint(1, 4, y.shape, generator=randomness.generator("keeper complementary labels", 1))
    start = old(twin.scaling(targets[0].images)).logits.softmax(dim=1)
    sizes = labels.bincount(minlength=4)
    negative, positive = [], []
    for i, (row, label) in enumerate(zip(own, y.tolist(), strict=True)):
        p, confidence = row.softmax(dim=0), start[place[i % count], label]
        if epoch == 0 or (epoch == 1 and confidence >= 1 / 4):
            loss = -torch.log(1 - p[(label + shift[i]) % 4]) * sizes.max() / sizes[label]
            negative.append(loss)
        if epoch == 2 and confidence >= 0.5:
            positive.append(-torch.log(p[label]))
    expected = {
        "negative": sum(negative) / max(len(negative), 1),
        "positive": sum(positive) / max(len(positive), 1),
    }
    stored = [*range(count, 2 * count), *range(3 * count, 4 * count)]
    expected["replay"] = F.cross_entropy(logits[stored], twin.memory.labels[kept].repeat(2))
    before, now = old(clean[count:]).logits.softmax(dim=1), logits[count : 2 * count].log_softmax(dim=1)
    expected["distill"] = 0.7 * (before * (before.log() - now)).sum(dim=1).mean()
    assert found.keys() == {"total", *expected}
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(float(value), rel=1e-3, abs=1e-6), name
    assert found["total"].item() == pytest.approx(sum(float(value) for value in expected.values()), rel=1e-3)


def test_nothing_is_learned_from_labels_when_none_is_sure():
    method, targets = checks.trained(NAME, epochs=3, memory=0, **{"selnlpl.threshold": 1.0})
    phase = method.target_phases(targets[0])[1]
    phase.begin()
    phase.begin_epoch(0)
    assert phase.begin_epoch(2)["positive_images"] == 0
    assert phase.step()["total"].item() == 0


def collapse(network):
    """Makes a network predict one class for every image."""
    torch.nn.init.zeros_(network.bottleneck[3].weight)
    torch.nn.init.ones_(network.bottleneck[3].bias)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0.5, 0.0])
def test_a_collapsed_adapter_does_not_label(limit):
    method, targets = checks.trained(NAME, collapse=limit, epochs=8, steps=20, lr=0.1)
    images = targets[0].images
    assert len(method.predict(images).argmax(dim=1).unique()) > 2  # or the keeper were no better
    phase = method.target_phases(targets[0])[1]
    collapse(method.adapter)
    phase.begin()
    record = phase.begin_epoch(0)
    assert record["adapter_collapsed"] == float(limit > 0)
    labeller = method.network if limit else method.adapter
    with torch.no_grad():
        assert torch.equal(phase._labels, labeller.eval()(method.scaling(images)).logits.argmax(dim=1))


def test_a_sound_adapter_labels():
    method, targets = checks.trained(NAME)
    adapts, learns = method.target_phases(targets[0])
    checks.drive(adapts)
    learns.begin()
    assert learns.begin_epoch(0)["adapter_collapsed"] == 0
    with torch.no_grad():
        predicted = method.adapter.eval()(method.scaling(targets[0].images)).logits.argmax(dim=1)
    assert torch.equal(learns._labels, predicted)


@pytest.mark.parametrize("sizes", [[5, 5, 5, 5], [20, 0, 0, 0], [12, 6, 2, 0]])
def test_effective_classes(sizes):
    labels = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    shares = [size / 20 for size in sizes if size]
    expected = math.exp(-sum(share * math.log(share) for share in shares))
    assert effective_classes(labels, 4).item() == pytest.approx(expected, rel=1e-5)


def test_either_network_predicts_after_the_same_training():
    keeper, targets = checks.trained(NAME, 2)
    adapter, _ = checks.trained(NAME, 2, predicts="adapter")
    assert same_tensors(keeper.state(), adapter.state())
    images = targets[0].images
    for method, network in ((keeper, keeper.network), (adapter, adapter.adapter)):
        with torch.no_grad():
            output = network.eval()(method.scaling(images))
        torch.testing.assert_close(method.predict(images), output.logits)
        torch.testing.assert_close(method.embed(images), output.embedding)
    assert torch.equal(keeper.predict_for_domain(images, 1), adapter.predict(images))
    assert keeper.predict_for_domain(images, 0) is None


def test_before_a_target_the_keeper_predicts_whatever_the_switch_says():
    method, targets = checks.trained(NAME, predicts="adapter")
    keeper, _ = checks.trained(NAME)
    assert torch.equal(method.predict(targets[0].images), keeper.predict(targets[0].images))
    assert method.predict_for_domain(targets[0].images, 0) is None


def test_a_run_records_the_accuracies_of_both(tmp_path):
    plan = toy_plan(NAME, toy_domains(ink=40, mud=32, fog=36), changes=checks.KERNELS)
    run = Run(plan, tmp_path / "run")
    run.execute()
    stages = journal_of(tmp_path / "run", "stage_finished")
    assert [list(stage.get("accuracy_as_told", {})) for stage in stages] == [[], ["mud"], ["fog"]]
    fog = toy_domain("fog", 36)
    correct = run.method.predict_for_domain(fog.images, 2).argmax(dim=1) == fog.labels
    assert stages[2]["accuracy_as_told"]["fog"] == pytest.approx(100 * correct.float().mean().item())


def test_an_earlier_state_has_no_adapter():
    method, targets = checks.trained(NAME)
    start = snapshot(method.state())
    method.adapt(targets[0])
    method.load_state(start)
    assert method.adapter is None
    assert same_tensors(method.state(), start)


def test_batch_norm_that_cannot_mask_is_refused_only_where_it_must():
    from torch import nn

    from ratp.networks.backbones import REGISTRY, register_backbone

    def plain():
        return nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())

    register_backbone("plain-codag", plain)
    try:
        changes = {"network.backbone": "plain-codag", "network.width": 1.0}
        checks.trained(NAME, 2, **changes)
        with pytest.raises(ConfigError, match="augment: BatchNorm of plain-codag cannot leave images out"):
            checks.build(NAME, adapter_r_con=0.5, **changes)
    finally:
        del REGISTRY["plain-codag"]
