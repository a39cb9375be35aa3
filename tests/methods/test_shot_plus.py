"""SHOT+: SHOT, and a head that tells by how many quarters an image was turned."""

from __future__ import annotations

import pytest
import torch

import source_free_checks as checks
from helpers import same_tensors
from ratp.errors import ConfigError
from ratp.methods.shared.rotation import RotationTask, rotate

NAME = "shot+"


def start_target(**changes):
    method, source, targets = checks.build_method(NAME, **changes)
    method.fit_source(source)
    return method, method.target_phases(targets[0])


def test_the_classifier_stays_and_the_rest_learns():
    checks.check_the_classifier_stays_and_the_rest_learns(NAME, lambda name: True)


def test_every_replay_gives_numbers():
    checks.check_every_replay_gives_numbers(NAME)


def test_small_domains():
    checks.check_small_domains(NAME)


def test_steps_can_be_captured():
    checks.check_steps_can_be_captured(NAME)


def test_new_labels_are_written_in_place():
    checks.check_new_labels_are_written_in_place(NAME)


@pytest.mark.slow
def test_it_adapts():
    checks.check_it_adapts(NAME)


@pytest.mark.parametrize("replay", checks.REPLAYS)
def test_without_the_task_it_is_shot_bit_for_bit(replay):
    mine, theirs = (checks.states_after_stages(n, replay=replay, **c) for n, c in ((NAME, {"gamma": 0}), ("shot", {})))
    assert len(mine) == len(theirs) == 3
    assert all(same_tensors(a, b) for a, b in zip(mine, theirs, strict=True))


def test_with_it_it_is_not():
    mine, theirs = checks.states_after_stages(NAME), checks.states_after_stages("shot")
    assert same_tensors(mine[0], theirs[0])
    assert not same_tensors(mine[1], theirs[1])


def test_the_head_learns_first_for_as_many_steps():
    _, phases = start_target()
    assert checks.steps_of(phases) == {"rotation": checks.all_steps(), "target": checks.all_steps()}


def test_the_heads_training_changes_nothing_of_the_network():
    method, (rotation, _) = start_target()
    state, head = checks.snapshot(method.state()), checks.snapshot(rotation._head.state_dict())
    checks.run_phases([rotation])
    assert same_tensors(method.state(), state)
    assert not same_tensors(rotation._head.state_dict(), head)


def test_the_best_head_stays():
    _, (rotation, target) = start_target()
    measured = []
    real = rotation._measure

    def noted():
        measured.append((real(), checks.snapshot(rotation._head.state_dict())))
        return measured[-1][0]

    rotation._measure = noted
    (record,) = checks.run_phases([rotation])
    best = max(accuracy for accuracy, _ in measured)
    assert len(measured) == rotation.epochs
    assert record == {"rotation_accuracy": best}
    assert same_tensors([head for a, head in measured if a == best][-1], rotation._head.state_dict())
    assert target._rotation.head is rotation._head


def test_the_head_learns_on_in_the_stage():
    _, (rotation, target) = start_target()
    head = checks.snapshot(rotation._head.state_dict())
    checks.run_phases([target])
    assert not same_tensors(rotation._head.state_dict(), head)


def test_the_loss_passes_the_turned_image_only():
    method, _ = start_target()
    task = RotationTask(method.setting, 1, 0.2)
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    upright = method.network.eval()(images).embedding
    state = task.generator.get_state()
    loss = task.loss(method.network, images, upright)
    assert torch.autograd.grad(loss, upright, allow_unused=True, retain_graph=True) == (None,)
    gradients = torch.autograd.grad(loss, [*method.network.bottleneck.parameters(), *task.head.parameters()])
    assert all(gradient.abs().sum() > 0 for gradient in gradients)

    turns = torch.randint(4, (6,), generator=torch.Generator().set_state(state))
    turned = method.network(rotate(images, turns)).embedding
    logits = task.head(torch.cat([upright, turned], dim=1))
    torch.testing.assert_close(loss, 0.2 * torch.nn.functional.cross_entropy(logits, turns))


def test_every_stage_has_a_new_head():
    method, _ = start_target()
    one, again, other = (RotationTask(method.setting, stage, 0.2).head.weight for stage in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_images_must_be_square():
    from dataclasses import replace

    method, _ = start_target()
    with pytest.raises(ConfigError, match="32×16 cannot be rotated"):
        RotationTask(replace(method.setting, image_size=(32, 16)), 1, 0.2)
