"""SHOT: labels by centroids, certain and diverse predictions, a classifier that stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import source_free_checks as checks
from helpers import TINY, toy_plan
from ratp._core.environment import Randomness
from ratp.functional.optim import SGDConfig
from ratp.functional.pseudo_labels import shot_labels
from ratp.methods.shared.source_free import SHOT_LARGE
from ratp.networks.network import Network

NAME = "shot"


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


def test_it_adapts():
    assert checks.check_it_adapts(NAME) < 0.5


def test_a_target_stage_is_as_long_as_any():
    method, source, targets = checks.build_method(NAME)
    method.fit_source(source)
    assert checks.steps_of(method.target_phases(targets[0])) == {"target": checks.all_steps()}


@pytest.mark.slow
def test_exemplars_have_the_last_labels():
    method, source, targets = checks.build_method(NAME)
    method.fit_source(source)
    assert method.stage == 1
    (phase,) = method.target_phases(targets[0])
    checks.run_phases([phase])
    known = {bytes(i.flatten()): label for i, label in zip(targets[0].images, phase.batches.labels, strict=True)}
    of_target = method.memory.domains == 1
    assert method.stage == 2
    assert of_target.any()
    for image, label in zip(method.memory.images[of_target], method.memory.labels[of_target], strict=True):
        assert known[bytes(image.flatten())] == label


def test_labels_are_smoothed_on_the_source():
    """Targets (1 − ε)·one-hot + ε/K."""
    method, source, _ = checks.build_method(NAME)
    (phase,) = method.source_phases(source)
    network = Network(method.setting.recipe.network, 4)
    network.load_state_dict(method.network.state_dict())
    randomness = Randomness(2022)
    network.use_generator(randomness.generator("dropout", 0))
    index = torch.randint(len(source), (TINY["batch"],), generator=randomness.generator("batches", 0))
    logits = network.train()(method.scaling(source.images[index])).logits
    rows = 0.9 * F.one_hot(source.labels[index], 4) + 0.1 / 4
    expected = -(rows * F.log_softmax(logits, dim=1)).sum(dim=1).mean()
    phase.begin()
    phase.begin_epoch(0)
    torch.testing.assert_close(phase.step()["total"], expected.detach())


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_a_stage_written_out(rate):
    """The whole target stage once more, with SHOT's own optimiser: Nesterov's momentum, a rate that falls by steps."""
    own = {name: value for name, value in SHOT_LARGE.items() if name.startswith("sgd.")}
    method, source, targets = checks.build_method(NAME, backbone_rate=rate, replay="none", **own)
    method.fit_source(source)
    network = Network(method.setting.recipe.network, 4)
    network.load_state_dict(method.network.state_dict())
    method.adapt(targets[0])

    images, randomness = targets[0].images, Randomness(2022)
    inputs, batches = method.scaling(images), randomness.generator("batches", 1)
    network.use_generator(randomness.generator("dropout", 1))
    velocity, done = {}, 0
    for _ in range(TINY["epochs"]):
        with torch.no_grad():
            embedding, logits = network.eval()(inputs)
        labels = shot_labels(embedding, logits.softmax(dim=1))
        for _ in range(TINY["steps"]):
            index = torch.randint(len(images), (TINY["batch"],), generator=batches)
            logits = network.train()(inputs[index]).logits
            p = logits.softmax(dim=1)
            entropy = -(p * (p + 1e-5).log()).sum(dim=1).mean()
            mean = p.mean(dim=0)
            loss = 0.1 * F.cross_entropy(logits, labels[index]) + entropy + (mean * (mean + 1e-5).log()).sum()
            learning = {n: p for n, p in network.named_parameters() if not n.startswith("classifier")}
            gradients = torch.autograd.grad(loss, list(learning.values()))
            lr = method.setting.recipe.lr * (1 + 10 * done / (TINY["epochs"] * TINY["steps"])) ** -0.75
            done += 1
            with torch.no_grad():
                for (name, parameter), gradient in zip(learning.items(), gradients, strict=True):
                    step = gradient + 1e-3 * parameter
                    velocity[name] = 0.9 * velocity.get(name, 0) + step
                    factor = rate if name.startswith("backbone") else 1.0
                    parameter -= lr * factor * (step + 0.9 * velocity[name])
    for name, tensor in method.network.state_dict().items():
        torch.testing.assert_close(tensor, network.state_dict()[name], rtol=1e-3, atol=1e-5, msg=name)


def test_values_for_large_networks():
    """The optimiser is RaTP's: SHOT's own wears this network out."""
    plan = toy_plan(NAME)
    assert (plan.config.beta, plan.config.backbone_rate) == (0.1, 1.0)
    assert plan.config.sgd == SGDConfig()
    assert dict(plan.method.large) == {"beta": 0.3, "backbone_rate": 0.1}
