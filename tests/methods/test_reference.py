"""The fast path against the plain one: the same random numbers in, the same numbers out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ratp
from helpers import toy_domain, toy_method, toy_plan
from ratp.evaluation.accuracy import accuracy
from ratp.functional.transforms import OBJECTS
from ratp_reference.images import ImagesInMemory, read_folder, write_folder
from ratp_reference.method import PlainRaTP

DOUBLE = {"rtol": 1e-9, "atol": 1e-9}
SINGLE = {"rtol": 1e-5, "atol": 1e-5}
STEPS = 5
# Enough votes for a label, so that few hang on which of two equally distant images comes first.
SIZES = {
    "network.width": 0.1,
    "batch": 24,
    "memory": 24,
    "lr": 0.005,
    "t2pl.r_knn": 3,
    "epochs": 3,
    "steps": STEPS,
    "refresh": 1,
}


@pytest.fixture
def _double(monkeypatch):
    """Everything in double precision: what is left are sums in another order."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def both(preset="official", **changes):
    """Fast and plain method, untrained, with the source's training part and the targets."""
    domains = [toy_domain("ink", 60), toy_domain("mud", 64), toy_domain("fog", 57)]
    plan = toy_plan(domains=domains, preset=preset, changes={**SIZES, **changes})
    fast, source, targets = toy_method(plan)
    return fast, PlainRaTP(fast.setting, fast.config), source, targets


def in_memory(domain):
    return ImagesInMemory(domain.images)


def stages(fast, plain, domain, *, is_target):
    """The two trainings on one domain."""
    if is_target:
        (phase,) = fast.target_phases(domain.unlabelled())
        return phase, plain.target_stage(in_memory(domain))
    (phase,) = fast.source_phases(domain)
    return phase, plain.source_stage(in_memory(domain), domain.labels)


def assert_same_weights(fast, plain, close):
    """Parameters and BatchNorm statistics."""
    torch.testing.assert_close(dict(fast.network.state_dict()), dict(plain.network.state_dict()), **close)


def assert_same_labels(phase, stage):
    """An image among the neighbours under two classes may vote for either: with that choice both paths go on alike."""
    labels = phase._labels.tolist()
    if stage.labelling is not None:
        choices = stage.labelling.possible_labels()
        assert all(label in possible for label, possible in zip(labels, choices, strict=True))
        assert np.mean([len(possible) == 1 for possible in choices]) > 0.8
        stage.labels = labels
    assert labels == stage.labels


def epoch(phase, stage, number, close, steps=STEPS):
    """One epoch on both paths, every loss compared; returns what the steps reported."""
    if number == 0:
        phase.begin()
    phase.begin_epoch(number)
    stage.begin_epoch(number)
    assert_same_labels(phase, stage)
    reports = []
    for batch in stage.batches(steps):
        found = {name: value.item() for name, value in phase.step().items()}
        expected = stage.step(batch)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=close["rtol"], atol=close["atol"], err_msg=name)
        reports.append(expected)
    return reports


def finish(fast, phase, stage):
    """Ends a stage on both paths and compares the memories."""
    phase.finish()
    stage.finish()
    memory, plain = fast.memory, stage.method.memory
    stored = [
        (images[place], label, index)
        for index, domain in enumerate(plain)
        for label, exemplars in enumerate(domain)
        for images, place in exemplars
    ]
    assert memory.domains.tolist() == [index for _, _, index in stored]
    assert memory.labels.tolist() == [label for _, label, _ in stored]
    assert all(torch.equal(image, exemplar) for image, (exemplar, _, _) in zip(memory.images, stored, strict=True))


def middling(fast, domain):
    """A confidence half of the images reach, and none has."""
    confidence = fast.predict(domain.images).softmax(dim=1).amax(dim=1).sort().values
    return confidence[len(confidence) // 2 - 1 :][:2].mean().item()


def train_on_source(fast, plain, source, steps=25):
    """On the fast path, long enough for labels that mean something; the plain one goes on from there."""
    (phase,) = fast.source_phases(source)
    phase.begin()
    phase.begin_epoch(0)
    for _ in range(steps):
        phase.step()
    stage = plain.source_stage(in_memory(source), source.labels)
    plain.network.load_state_dict(fast.network.state_dict())
    finish(fast, phase, stage)


def prepare_target(fast, plain, target):
    """Both trainings on a target, half of whose images the model is confident about."""
    fast.config = plain.config = replace(fast.config, r_con=middling(fast, target))
    return stages(fast, plain, target, is_target=True)


def test_both_begin_with_the_same_weights():
    fast, plain, _, _ = both()
    assert_same_weights(fast, plain, {"rtol": 0, "atol": 0})


def test_five_steps_on_the_source_in_single_precision():
    fast, plain, source, _ = both()
    phase, stage = stages(fast, plain, source, is_target=False)
    epoch(phase, stage, 0, SINGLE)
    assert_same_weights(fast, plain, SINGLE)


def test_five_steps_on_a_target_in_single_precision():
    fast, plain, source, targets = both()
    train_on_source(fast, plain, source)
    phase, stage = prepare_target(fast, plain, targets[0])
    epoch(phase, stage, 0, SINGLE)
    assert_same_weights(fast, plain, SINGLE)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("preset", ["official", "paper"])
def test_five_steps_on_the_source(preset):
    fast, plain, source, _ = both(preset)
    phase, stage = stages(fast, plain, source, is_target=False)
    epoch(phase, stage, 0, DOUBLE)
    assert_same_weights(fast, plain, DOUBLE)
    finish(fast, phase, stage)


@pytest.mark.slow
@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("preset", ["official", "paper"])
def test_source_and_two_targets(preset):
    """Memory and distillation, labels refreshed, exemplars of earlier domains cut back, the rate lowered."""
    fast, plain, source, targets = both(preset)
    train_on_source(fast, plain, source, steps=50)
    for target in targets:
        phase, stage = prepare_target(fast, plain, target)
        reports = epoch(phase, stage, 0, DOUBLE)
        assert any(0 < report["confident"] < 1 for report in reports)
        assert all(report["distill"] > 0 for report in reports[1:])
        assert_same_weights(fast, plain, DOUBLE)
        epoch(phase, stage, 2, DOUBLE, steps=2)
        finish(fast, phase, stage)
    assert_same_weights(fast, plain, DOUBLE)
    assert len({tuple(map(len, domain)) for domain in plain.memory}) == 1
    for domain in (source, *targets):
        assert accuracy(fast, domain) == plain.accuracy(in_memory(domain), domain.labels)


@pytest.mark.slow
@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize(
    "changes",
    [
        {"network.width": 0.1, "randmix.kernel_sizes": "5,9,13,17", "batch": 6},
        {"randmix.noise_per": "batch", "randmix.weights_per": "sample"},
        {"refresh": 0, "pca.old_weight": 0.5, "sgd.momentum": 0.9},
        {"pca.weight": 0.0, "distill.weight": 0.0, "memory": 0},
    ],
    ids=["the published kernels", "other rows", "other weights", "parts left out"],
)
def test_other_switches(changes):
    fast, plain, source, targets = both(**changes)
    train_on_source(fast, plain, source)
    phase, stage = prepare_target(fast, plain, targets[0])
    epoch(phase, stage, 0, DOUBLE, steps=3)
    assert_same_weights(fast, plain, DOUBLE)


def test_with_random_transforms():
    """torchvision's, image by image, agree within 1e-4 an image."""
    fast, plain, source, _ = both()
    recipe = replace(fast.setting.recipe, source_transform=OBJECTS)
    fast.setting = replace(fast.setting, recipe=recipe)
    plain.setting, plain.recipe = fast.setting, recipe
    phase, stage = stages(fast, plain, source, is_target=False)
    epoch(phase, stage, 0, {"rtol": 0, "atol": 2e-3}, steps=3)


def test_image_files_give_what_memory_gives(tmp_path):
    fast, plain, source, _ = both()
    write_folder(tmp_path, source.images, source.labels, source.classes)
    images, labels = read_folder(tmp_path, source.classes, 32)
    assert torch.equal(labels, source.labels)
    assert all(torch.equal(images[place], image) for place, image in enumerate(source.images))
    other = PlainRaTP(fast.setting, fast.config)
    reports = []
    for method, stage in (
        (plain, plain.source_stage(in_memory(source), source.labels)),
        (other, other.source_stage(images, labels)),
    ):
        reports.append([stage.step(batch) for batch in stage.batches(2)])
        stage.finish()
        assert len(method.memory) == 1
    assert reports[0] == reports[1]
    assert [[place for _, place in exemplars] for exemplars in plain.memory[0]] == [
        [place for _, place in exemplars] for exemplars in other.memory[0]
    ]


def test_a_whole_run_is_its_stages():
    """Driven by hand above; here as one reads it."""
    fast, plain, source, targets = both(epochs=1, steps=2)
    fast.fit_source(source)
    plain.source_stage(in_memory(source), source.labels).run()
    fast.adapt(targets[0].unlabelled())
    plain.target_stage(in_memory(targets[0])).run()
    assert_same_weights(fast, plain, SINGLE)


def test_the_package_knows_nothing_of_it():
    files = list(Path(ratp.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    assert not [path.name for path in files if "ratp_reference" in path.read_text(encoding="utf-8")]


def test_unsupported_settings_are_refused():
    with pytest.raises(ValueError, match=r"joint_batch=False, memory\.replay=none"):
        both(joint_batch=False, **{"memory.replay": "none"})
