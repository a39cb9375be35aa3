"""Checks shared by CoDAG and MPM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from helpers import all_finite, same_tensors, toy_domain, toy_method, toy_plan
from ratp.networks.network import NetworkConfig
from ratp.training.phase import train
from read_back import ReadBack
from source_free_checks import all_steps, build_method, steps_of

KERNELS = {"randmix.kernel_sizes": "3,5"}


def build(name, domains=None, **changes):
    """A method, its source and its targets without labels."""
    return build_method(name, domains, **{**KERNELS, **changes})


def trained(name, stages=1, domains=None, **changes):
    """A method after its first stages, and the targets."""
    method, source, targets = build(name, domains, **changes)
    method.fit_source(source)
    for target in targets[: stages - 1]:
        method.adapt(target)
    return method, targets


def drive(phase):
    """Trains one phase to its end."""
    return [moment for moment in train([phase]) if isinstance(moment, dict)].pop()


def check_length_of_a_target(name, first, second):
    """Two phases as long as a stage of any other method."""
    method, targets = trained(name)
    assert steps_of(method.target_phases(targets[0])) == {first: all_steps(), second: all_steps()}
    longer, _ = trained(name, length=2)
    assert steps_of(longer.target_phases(targets[0])) == {first: all_steps(), second: 2 * all_steps()}


def check_small_domains(name, **changes):
    """One image, fewer images than classes, one class; no memory, no copies, a memory that holds too few."""
    tiny = [toy_domain("ink"), toy_domain("mud", 1), toy_domain("fog", 3), toy_domain("dew", 9, classes=(2,))]
    for more in ({}, {"memory": 0}, {"memory": 4}, {"augment": False, "selnlpl.order": "sum"}):
        method, targets = trained(name, 4, tiny, **more, **(changes if more.get("memory", 1) else {}))
        assert all_finite(method.state())
        assert method.predict(targets[0].images).isfinite().all()
        assert method.predict(targets[0].images).shape == (1, 4)


def check_a_class_without_labels_gives_no_exemplars(name, monkeypatch):
    """Here all images of the target are labelled as class 1."""
    method, targets = trained(name)
    phase = method.target_phases(targets[0])[-1]
    labels = torch.ones(len(targets[0]), dtype=torch.int64)
    monkeypatch.setattr(phase, "label", lambda: (labels, F.one_hot(labels, 4).float(), {}))
    drive(phase)
    assert method.memory.labels[method.memory.domains == 1].unique().tolist() == [1]
    assert sorted(method.memory.labels[method.memory.domains == 0].unique().tolist()) == [0, 1, 2, 3]


def check_steps_can_be_captured(name, **changes):
    """No step reads anything back; it draws from the generators it lists, and from no other; masks stay in place."""
    for more in ({}, {"memory": 0}, {"augment": False}, {"selnlpl.order": "sum", "target_transform.flip": 0.5}):
        method, targets = trained(name, 2, epochs=3, **{**changes, **more})
        for phase in method.target_phases(targets[1]):
            assert phase.captures
            phase.begin()
            for epoch in range(3):
                phase.begin_epoch(epoch)
                phase.step()
                before = [generator.get_state() for generator in phase.generators]
                modes = [module.training for module in method.network.modules()]
                chance = torch.random.get_rng_state()
                with ReadBack():
                    values = phase.step()
                assert all(value.isfinite() for value in values.values())
                assert torch.equal(torch.random.get_rng_state(), chance)
                assert [module.training for module in method.network.modules()] == modes
            if phase.name in ("keeper", "generalisation") and not more:
                # all but that of the transforms, of which there are none
                moved = [not torch.equal(g.get_state(), b) for g, b in zip(phase.generators, before, strict=True)]
                assert moved == [generator is not phase._views.generators[1] for generator in phase.generators]


def check_large_networks(name):
    """A ResNet learns, predicts and is restored."""
    plan = toy_plan(name, changes={**KERNELS, "epochs": 1, "steps": 2})
    plan = replace(plan, recipe=replace(plan.recipe, network=NetworkConfig("resnet18", hidden=16, dim=8)))
    method, source, targets = toy_method(plan)
    method.fit_source(source)
    method.adapt(targets[0].unlabelled())
    assert all_finite(method.state())
    again, _, _ = toy_method(plan)
    again.load_state(method.state())
    assert torch.equal(again.predict(source.images), method.predict(source.images))
    assert dict(plan.method.large) == {"beta": 0.3, "backbone_rate": 0.1}


def check_a_stream_of_six(name):
    """The state of every stage is that of a method built from it."""
    names = ("ink", "mud", "fog", "dew", "ash", "oil")
    method, source, targets = build(name, [toy_domain(n, 24) for n in names], epochs=1)
    method.fit_source(source)
    for target in targets:
        method.adapt(target)
        again, _, _ = build(name)
        again.load_state({key: tensor.clone() for key, tensor in method.state().items()})
        assert same_tensors(again.state(), method.state())
        assert torch.equal(again.predict(source.images), method.predict(source.images))
    assert method.memory.domains.unique().tolist() == list(range(6))
    assert all_finite(method.state())


def check_labels_stay(name):
    """From the first epoch to the exemplars."""
    method, targets = trained(name)
    *first, phase = method.target_phases(targets[0])
    for other in first:
        drive(other)
    assert method.stage == 1  # exemplars come with the last phase
    phase.begin()
    record = phase.begin_epoch(0)
    labels = phase._labels.clone()
    place = phase._labels.data_ptr(), phase._negative.data_ptr(), phase._positive.data_ptr()
    assert record["negative_images"] == 1.0
    assert record["positive_images"] == 0.0
    phase.step()
    phase.begin_epoch(1)
    assert torch.equal(phase._labels, labels)
    assert (phase._labels.data_ptr(), phase._negative.data_ptr(), phase._positive.data_ptr()) == place
    phase.finish()
    known = {bytes(i.flatten()): label for i, label in zip(targets[0].images, labels, strict=True)}
    own = method.memory.domains == 1
    assert own.any()
    for image, label in zip(method.memory.images[own], method.memory.labels[own], strict=True):
        assert known[bytes(image.flatten())] == label


def check_the_history_averages_the_last_epochs(name):
    """With two epochs remembered, the third forgets the first."""
    method, targets = trained(name, **{"selnlpl.history": 2, "epochs": 6})
    phase = method.target_phases(targets[0])[-1]
    phase.begin()
    seen = []
    for epoch in range(6):
        record = phase.begin_epoch(epoch)
        own = [row[label].item() for row, label in zip(phase.probabilities(), phase._labels, strict=True)]
        seen.append(own)
        mean = [sum(values) / len(values) for values in zip(*seen[-2:], strict=True)]
        assert record["negative_images"] == pytest.approx(
            (1.0, 1.0, *[sum(m >= 0.25 for m in mean) / len(mean)] * 2, 0.0, 0.0)[epoch]
        )
        assert record["positive_images"] == pytest.approx(
            sum(m >= 0.5 for m in mean) / len(mean) if epoch >= 4 else 0.0
        )
        phase.step()


def check_the_source_is_learned_with_copies(name):
    """Cross-entropy of the images and of a RandMix copy of each."""
    method, source, _ = build(name)
    twin, _, _ = build(name)
    (phase,) = method.source_phases(source)
    phase.begin()
    phase.begin_epoch(0)
    loss = phase.step()["total"]

    randomness = twin.setting.randomness
    twin.network.use_generator(randomness.generator("dropout", 0))
    index = torch.randint(len(source), (twin.setting.recipe.batch,), generator=randomness.generator("batches", 0))
    clean = twin.scaling(source.images[index])
    copies = twin.randmix(clean, randomness.generator("randmix", 0))
    logits = twin.network.train()(torch.cat([clean, copies])).logits
    torch.testing.assert_close(loss, F.cross_entropy(logits, source.labels[index].repeat(2)).detach())
