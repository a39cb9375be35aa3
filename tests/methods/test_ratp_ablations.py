"""What takes the place of RaTP's parts in ablations."""

from __future__ import annotations

import warnings

import pytest
import torch

from helpers import all_finite, same_tensors, toy_method, toy_plan
from ratp.errors import RatpError
from ratp.functional import pseudo_labels
from ratp.functional.pseudo_labels import SlowWarning
from ratp.methods.ratp import RaTPPhase

SEPARATED = torch.eye(4).repeat_interleave(6, dim=0) + 0.01
TRUTH = torch.arange(4).repeat_interleave(6)


def target_phase(**changes):
    method, source, targets = toy_method(toy_plan(changes=changes))
    method.fit_source(source)
    (phase,) = method.target_phases(targets[0].unlabelled())
    return phase


@pytest.mark.parametrize("labelling", ["t2pl", "softmax", "shot", "bmd"])
def test_separated_features_are_labelled_right(labelling):
    phase = target_phase(labelling=labelling)
    assert phase._pseudo_labels(SEPARATED, (9 * SEPARATED).softmax(dim=1)).tolist() == TRUTH.tolist()


def test_softmax_keeps_the_errors_that_t2pl_mends():
    """On the worked example of T2PL: truth is six of each class."""
    angles = torch.tensor([0, 5, 10, 15, 20, 40, 50, 70, 75, 80, 85, 90]).deg2rad()
    second = torch.tensor([0.02, 0.05, 0.10, 0.6, 0.2, 0.45, 0.40, 0.8, 0.3, 0.9, 0.95, 0.98])
    features, probabilities = torch.stack([angles.cos(), angles.sin()], dim=1), torch.stack([1 - second, second], dim=1)
    truth = torch.arange(12) // 6
    found = target_phase(labelling="softmax")._pseudo_labels(features, probabilities)
    assert (found != truth).nonzero().flatten().tolist() == [3, 6, 8]
    assert target_phase(**{"t2pl.r_knn": 3})._pseudo_labels(features, probabilities).equal(truth)


def test_truth_needs_labels():
    method, source, targets = toy_method(toy_plan(changes={"labelling": "truth"}))
    method.fit_source(source)
    with pytest.raises(RatpError, match="labelling=truth, ratp needs the labels of 'mud'"):
        method.target_phases(targets[0].unlabelled())
    (phase,) = method.labelled_target_phases(targets[0])
    phase.begin()
    phase.begin_epoch(0)
    assert phase._labels.equal(targets[0].labels)


def test_without_randmix_the_batch_is_clean(monkeypatch):
    method, source, targets = toy_method(toy_plan(changes={"augment": False}))
    monkeypatch.setattr(type(method.randmix), "__call__", lambda *_: pytest.fail("a copy was made"))
    seen = []
    real = RaTPPhase._forward
    monkeypatch.setattr(RaTPPhase, "_forward", lambda p, x, valid: seen.append((len(x), valid)) or real(p, x, valid))
    method.fit_source(source)
    method.adapt(targets[0].unlabelled())
    assert seen == [(method.setting.recipe.batch, None)] * len(seen)
    assert all_finite(method.state())


@pytest.mark.parametrize("alignment", ["pl", "scl", "pcl"])
def test_static_and_compact_steps_agree(alignment):
    """A captured step leaves copies out by a mask."""
    ends = []
    for static in (False, True):
        method, source, targets = toy_method(toy_plan(changes={"alignment": alignment, "r_con": 0.3}))
        method.fit_source(source)
        (phase,) = method.target_phases(targets[0].unlabelled())
        phase._static = static
        phase.begin()
        phase.begin_epoch(0)
        ends.append({name: value.detach() for name, value in phase.step().items()})
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def test_prototypes_come_from_the_domain_and_from_the_memory_of_others():
    phase = target_phase(alignment="pl")
    phase.begin()
    phase.begin_epoch(0)
    assert phase._has_prototype.all()
    place = phase._prototypes.data_ptr()
    before = phase._prototypes.clone()
    memory = phase.memory
    memory.images = 255 - memory.images
    phase._update_prototypes()
    assert phase._prototypes.data_ptr() == place
    assert not torch.equal(phase._prototypes, before)


def test_prototypes_are_refreshed_with_the_labels():
    phase = target_phase(alignment="pl", refresh=2)
    taken = []
    phase._update_prototypes = lambda: taken.append(epoch)
    for epoch in range(5):
        phase.begin_epoch(epoch)
    assert taken == [0, 2, 4]


def test_each_alignment_is_another_loss():
    ends = [dict(target_phase(alignment=kind).network.state_dict()) for kind in ("pca", "pl", "scl", "pcl")]
    assert not any(same_tensors(ends[i], ends[j]) for i in range(4) for j in range(i))


@pytest.mark.faults(32, "on a CPU, the run estimates how long labelling takes and says so before it begins")
def test_labels_of_many_images_are_announced(monkeypatch):
    changes = {"epochs": 1, "steps": 1}
    unannounced, announced = target_phase(**changes), target_phase(**changes)
    unannounced.begin_epoch(0)
    monkeypatch.setattr(pseudo_labels, "MANY", 10)
    with pytest.warns(SlowWarning, match=r"T2PL of 3\d images takes about 0 s: .* --set refresh=0") as said:
        announced.begin_epoch(0)
    assert len(said) == 1
    assert announced._labels.equal(unannounced._labels)
    with warnings.catch_warnings(action="error"):
        announced.begin_epoch(2)
        target_phase(labelling="softmax", **changes).begin_epoch(0)
