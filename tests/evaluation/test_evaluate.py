"""Accuracy is what it says, and measuring it changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import each_method, same_tensors, toy_domain, toy_method, toy_plan
from ratp.errors import TrainingError
from ratp.evaluation.accuracy import accuracy
from ratp.training.recipe import chunk_size

every_method = pytest.mark.parametrize("method", each_method())


class Oracle:
    """Returns preset answers."""

    def __init__(self, answers):
        self.answers = answers

    def predict(self, images):
        assert images.dtype == torch.uint8
        return torch.nn.functional.one_hot(self.answers[: len(images)], 4).float()


@pytest.mark.parametrize(("wrong", "percent"), [(0, 100.0), (1, 97.5), (10, 75.0), (40, 0.0)])
def test_accuracy_is_the_share_of_right_answers_in_percent(wrong, percent):
    domain = toy_domain("ink", 40)
    answers = domain.labels.clone()
    answers[:wrong] = (answers[:wrong] + 1) % 4
    assert accuracy(Oracle(answers), domain) == percent


@every_method
@pytest.mark.parametrize("training", [True, False])
def test_predicting_changes_nothing(method, training):
    built, source, targets = toy_method(toy_plan(method))
    built.fit_source(source)
    built.network.train(training)
    state = {name: tensor.clone() for name, tensor in built.state().items()}
    modes = [module.training for module in built.network.modules()]
    chance = torch.random.get_rng_state()

    first = built.predict(targets[0].images)
    accuracy(built, targets[1])
    assert torch.equal(built.predict(targets[0].images), first)
    assert same_tensors(built.state(), state)
    assert [module.training for module in built.network.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), chance)
    assert not first.requires_grad
    assert all(p.requires_grad for p in built.network.parameters())


@every_method
def test_predicting_in_the_middle_of_a_stage_does_not_change_its_end(method):
    ends = []
    for measured in (False, True):
        built, source, targets = toy_method(toy_plan(method))
        for phase in built.source_phases(source):
            phase.begin()
            for epoch in range(phase.epochs):
                phase.begin_epoch(epoch)
                for _ in range(phase.steps):
                    phase.step()
                    if measured:
                        accuracy(built, targets[0])
            phase.finish()
        ends.append(built.state())
    assert same_tensors(*ends)


@every_method
def test_prediction_is_independent_of_the_batch(method):
    built, source, _ = toy_method(toy_plan(method))
    built.fit_source(source)
    chunk = chunk_size(torch.Size((3, 32, 32)), torch.device("cpu"))
    some = [0, chunk - 1, chunk, chunk + 39]
    many = toy_domain("crowd", chunk + 40)
    together = built.predict(many.images)
    assert together.shape == (chunk + 40, 4)
    alone = torch.cat([built.predict(many.images[i : i + 1]) for i in some])
    torch.testing.assert_close(together[some], alone, rtol=1e-4, atol=1e-6)


def test_labels_of_a_domain_are_read_by_position():
    domain = toy_domain("ink", 8)
    turned = replace(domain, labels=domain.labels.flip(0))
    assert accuracy(Oracle(domain.labels), domain) == 100
    assert accuracy(Oracle(domain.labels), turned) == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_predictions_are_an_error(bad):
    class Broken(Oracle):
        def predict(self, images):
            logits = super().predict(images)
            logits[5, 2] = bad
            return logits

    domain = toy_domain("ink", 8)
    with pytest.raises(TrainingError, match="ink"):
        accuracy(Broken(domain.labels), domain)


def test_one_scalar_is_read_from_the_device():
    class Watched(torch.Tensor):
        """Notes what would make a GPU wait, or move its numbers to the host."""

        waits: tuple[str, ...] = ()

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "")
            if name in ("cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
                cls.waits = (*cls.waits, name)
            return super().__torch_function__(function, types, args, kwargs or {})

    class Far(Oracle):
        def predict(self, images):
            return super().predict(images).as_subclass(Watched)

    domain = toy_domain("ink", 40)
    assert accuracy(Far(domain.labels), domain) == 100
    assert Watched.waits == ("__int__",)
