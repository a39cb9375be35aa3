"""Source-only training: cross-entropy and nothing else, on the source and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import TINY, accuracy_of, same_tensors, toy_domain, toy_method, toy_plan
from ratp._core.environment import Randomness
from ratp.functional.optim import lr_multiplier
from ratp.networks.network import Network
from ratp.runs.events import StageStarted, Trained
from ratp.runs.run import Run


def build_method(**changes):
    method, source, targets = toy_method(toy_plan("source-only", changes=changes))
    return method, source, [target.unlabelled() for target in targets]


def test_targets_change_nothing():
    method, source, targets = build_method()
    method.fit_source(source)
    before = {name: tensor.clone() for name, tensor in method.state().items()}
    for target in targets:
        assert list(method.target_phases(target)) == []
        method.adapt(target)
    assert same_tensors(method.state(), before)


def test_matrix_repeats_one_row(tmp_path):
    run = Run(toy_plan("source-only"), tmp_path / "run")
    events = list(run.events())
    rows = accuracy_of(run.folder)
    assert rows == [rows[0]] * 3
    assert [e.steps for e in events if isinstance(e, StageStarted)] == [TINY["epochs"] * TINY["steps"], 0, 0]
    assert sum(isinstance(e, Trained) for e in events) == TINY["epochs"] * TINY["steps"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_plain_gradient_descent_on_cross_entropy(momentum):
    """The whole stage once more, written out: parameters move by the rate times gradient plus decay."""
    method, source, _ = build_method(**{"sgd.momentum": momentum, "epochs": 3})
    start = {name: tensor.clone() for name, tensor in method.network.state_dict().items()}
    method.fit_source(source)

    network = Network(method.setting.recipe.network, 4)
    network.load_state_dict(start)
    randomness = Randomness(2022)
    batches = randomness.generator("batches", 0)
    network.use_generator(randomness.generator("dropout", 0))
    network.train()
    velocity = {}
    for epoch in range(3):
        rate = method.setting.recipe.lr * lr_multiplier("inverse", epoch, 3)
        for _ in range(TINY["steps"]):
            index = torch.randint(len(source), (TINY["batch"],), generator=batches)
            inputs = (source.images[index].float() / 255 - 0.5) / 0.5
            log_p = F.log_softmax(network(inputs).logits, dim=1)
            loss = -log_p[torch.arange(TINY["batch"]), source.labels[index]].mean()
            names, parameters = zip(*network.named_parameters(), strict=True)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
                    velocity[name] = momentum * velocity.get(name, 0) + gradient + 5e-4 * parameter
                    parameter -= rate * velocity[name]
    for name, tensor in method.network.state_dict().items():
        torch.testing.assert_close(tensor, network.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)
    assert not torch.equal(start["classifier.weight"], network.state_dict()["classifier.weight"])


def test_it_learns_the_toy():
    sizes = {"network.width": 0.25, "network.hidden": 32, "network.dim": 16, "epochs": 5, "steps": 12, "batch": 32}
    method, source, _ = build_method(**sizes, lr=0.03)
    method.fit_source(source)
    unseen = toy_domain("ink", 200).subset(torch.arange(40, 200))
    assert (method.predict(unseen.images).argmax(dim=1) == unseen.labels).float().mean() > 0.9


def test_it_keeps_no_memory_and_no_old_model():
    method, source, _ = build_method()
    method.fit_source(source)
    assert all(name.startswith("network.") for name in method.state())


def test_its_loss_is_all_it_reports():
    method, source, _ = build_method()
    (phase,) = method.source_phases(source)
    phase.begin()
    assert phase.begin_epoch(0) == {"lr": method.setting.recipe.lr}
    assert phase.step().keys() == {"total"}
    assert phase.finish() == {}
