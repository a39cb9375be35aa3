"""SHOT++: SHOT+, then MixMatch from the images it is sure about to the others."""

from __future__ import annotations

import pytest
import torch

import source_free_checks as checks
from helpers import all_finite, same_tensors, tensors_of, toy_domains, toy_plan
from ratp.runs.run import Run

NAME = "shot++"


def start_target(**changes):
    """A method after its source, and the last phase of its first target."""
    method, source, targets = checks.build_method(NAME, **changes)
    method.fit_source(source)
    return method, method.target_phases(targets[0])[-1]


def test_the_classifier_stays_and_the_rest_learns():
    checks.check_the_classifier_stays_and_the_rest_learns(NAME, lambda name: True)


def test_every_replay_gives_numbers():
    checks.check_every_replay_gives_numbers(NAME)


def test_small_domains():
    checks.check_small_domains(NAME)


def test_steps_can_be_captured():
    checks.check_steps_can_be_captured(NAME)


def test_it_adapts():
    checks.check_it_adapts(NAME)


def test_the_stage_is_that_of_shot_plus_and_as_many_steps_again():
    method, source, targets = checks.build_method(NAME)
    method.fit_source(source)
    steps = checks.all_steps()
    assert checks.steps_of(method.target_phases(targets[0])) == {"rotation": steps, "target": steps, "mixmatch": steps}
    plus, _, _ = checks.build_method("shot+")
    plus.fit_source(source)
    checks.run_phases(method.target_phases(targets[0])[:-1])
    checks.run_phases(plus.target_phases(targets[0]))
    assert same_tensors(method.network.state_dict(), plus.network.state_dict())
    assert method.stage == 1  # exemplars come with the last phase


def test_exemplars_have_what_the_model_predicts_in_the_end():
    method, source, targets = checks.build_method(NAME)
    method.fit_source(source)
    method.adapt(targets[0])
    assert method.stage == 2
    own = method.memory.domains == 1
    assert own.any()
    assert torch.equal(method.predict(method.memory.images[own]).argmax(dim=1), method.memory.labels[own])


def test_the_domain_is_split_once():
    _, phase = start_target()
    phase.begin()
    assert 0 < phase.begin_epoch(0)["labelled"] < 1
    assert len(phase._sure) + len(phase._unsure) == 32
    assert set(phase._sure.tolist()).isdisjoint(phase._unsure.tolist())
    assert phase.begin_epoch(1).keys() == {"lr"}


def test_the_weight_of_the_squared_error_grows_from_nothing():
    _, phase = start_target()
    phase.begin()
    phase.begin_epoch(0)
    seen = [phase.step()["consistency"].item() for _ in range(2)]
    assert seen[0] == 0 < seen[1]
    assert phase._progress.item() == pytest.approx(2 / (phase.epochs * phase.steps))


@pytest.mark.parametrize("replay", checks.REPLAYS)
@pytest.mark.parametrize("sure", [False, True], ids=["none", "all"])
def test_with_one_part_empty_the_steps_do_nothing(sure, replay, monkeypatch):
    import ratp.methods.shot_plus_plus as module

    monkeypatch.setattr(module, "confident_split", lambda e, *_: torch.full(e.shape, sure))
    method, phase = start_target(replay=replay, **{"mixmatch.new_classifier": True})
    before = checks.snapshot(method.network.state_dict())
    (record,) = checks.run_phases([phase])
    assert record["exemplars"] > 0
    assert same_tensors(method.network.state_dict(), before)


def test_a_new_classifier_is_trained():
    method, source, targets = checks.build_method(NAME, **{"mixmatch.new_classifier": True})
    method.fit_source(source)
    old = method.network.classifier.weight.clone()
    phases = method.target_phases(targets[0])
    phases[-1].begin()
    phases[-1].begin_epoch(0)
    new = method.network.classifier.weight.clone()
    assert not torch.equal(new, old)
    phases[-1].step()
    assert not torch.equal(method.network.classifier.weight, new)
    assert all_finite(method.state())


def test_exemplars_count_as_labelled():
    method, phase = start_target()
    phase.begin()
    phase.begin_epoch(0)
    method.memory.labels.fill_(3)
    phase._labels.fill_(1)
    _, targets = phase._draw_labelled(2000)
    share = len(method.memory) / (len(method.memory) + len(phase._sure))
    assert targets[:, 3].mean().item() == pytest.approx(share, abs=0.05)
    assert (targets[:, 1] + targets[:, 3] == 1).all()


def test_without_mixing_it_is_cross_entropy_and_squared_error(monkeypatch):
    """λ = 1: the labelled batch has its labels, and the guesses are those of the same images."""
    import ratp.methods.shot_plus_plus as module

    monkeypatch.setattr(module, "draw_ratio", lambda *_: torch.tensor(1.0))
    seen = []
    monkeypatch.setattr(module, "soft_cross_entropy", lambda logits, targets: seen.append(targets) or logits.sum() * 0)
    _, phase = start_target()
    phase.begin()
    phase.begin_epoch(0)
    phase.step()
    assert set(seen[0].unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(("events", "phase"), [(9, "rotation"), (13, "target"), (17, "mixmatch")])
def test_a_run_stopped_in_any_phase_ends_as_if_it_was_not(events, phase, tmp_path):
    """In the rotation head's training, in SHOT's, in MixMatch's; its folder may have the method's name."""
    plan = toy_plan(NAME, toy_domains(ink=40, mud=32))
    Run(plan, tmp_path / "untouched shot++").execute()
    stopped = Run(plan, tmp_path / "shot++").events()
    taken = [next(stopped) for _ in range(events)]
    stopped.close()
    assert taken[-1].tick.phase.name == phase
    Run(plan, tmp_path / "shot++").execute()
    assert same_tensors(tensors_of(tmp_path / "shot++"), tensors_of(tmp_path / "untouched shot++"))
