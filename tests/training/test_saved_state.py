"""Every phase and method saves all that changes within a stage: nothing that can be reached differs after loading."""

from __future__ import annotations

import json

import pytest
import torch

from helpers import QUICK, REPRESENTATIVES, same_tensors, slow, toy_method, toy_plan
from ratp._core import state as state_module
from ratp._core.files import read_tensors, write_tensors
from ratp._core.state import StateError, join_tensors, split_tensors
from ratp.methods import METHODS
from ratp.methods.rehearsal import unsaved, values_of
from ratp.training.phase import Progress, Tick, load_stage, save_stage, train

SIZES = {"epochs": 2, "steps": 2}
COPIES = {"augment": True, "r_con": 0.2}
OWN_HEAD = {"network.bottleneck": "one", "network.bias": True, "network.weight_norm": True}
# Switches that add state, or keep it elsewhere.
VARIANTS = [
    ("ratp", {"preset": "paper"}),
    ("ratp", {"alignment": "pl"}),
    ("ratp", {"labelling": "truth"}),
    ("ratp", {"memory.replay": "separate", "sgd.schedule": "per-step"}),
    ("ratp", {"t2pl.class_mix": "em"}),
    ("arc", {"class_mix": "em", "refresh": 1, "memory": 40}),
    ("arc", {"consistency.kind": "js", "augmentation": "both", "average_old": 0.3, "statistics": "reestimated"}),
    ("shot", {**COPIES, "sgd.momentum": 0.9}),
    ("shot", {**OWN_HEAD, "source_sgd.momentum": 0.9}),
    ("shot+", {"gamma": 0}),
    ("shot++", {"mixmatch.new_classifier": True, "replay": "separate"}),
    ("shot++", {**OWN_HEAD, "mixmatch.new_classifier": True}),
    ("gsfda", {**COPIES, "replay": "separate", "source_masks": "sharp", "self_neighbour": True}),
    ("bmd", {"extractor": True, "dynamic_gradient": True}),
    ("aucid", {"replay": "none"}),
    ("snr", {**COPIES, "dual_weight": 0.01}),
    ("pcl", COPIES),
    ("l2d", OWN_HEAD),
    ("pden", {"source_generators": 2, "target_generators": 2, "frozen": 0.5, "epochs": 4}),
    ("adabn", {"eval_bn": "running"}),
    ("tent", {"step.optimiser": "sgd"}),
    ("t3a", {"exemplars": True, "reset": True}),
    ("t3a", {"network.weight_norm": True}),
    ("eata", {"weighted": False}),
    ("cotta", {"step.optimiser": "sgd"}),
    ("adacon", {"first_look": False, "decay": "constant", "reset": True}),
    ("codag", {"replay": "union", "adapter_r_con": 0.2, "predicts": "adapter", "length": 2, "sgd.momentum": 0.9}),
    ("codag", {"augment": False, "selnlpl.history": 1, "labelling": "centroids"}),
    ("mpm", {**OWN_HEAD, "learns_through": "fused", "new_head": "source", "bige": "batch", "length": 1.5}),
    ("mpm", {"adaptation_statistics": "batch", "fusion": "mean", "memory": 0}),
    ("sar", {"margin": 2.0}),
    ("sar", {"margin": 2.0, "recover_below": 100.0, "step.optimiser": "sgd"}),
    ("rmt", {"projector": 0, "step.optimiser": "sgd"}),
    ("roid", {"step.optimiser": "sgd"}),
    ("deyo", {"margin": 2.0, "plpd": -1.0}),
]
# From the method's generators when the next one begins; by every step.
RECOMPUTED = {("PDENStage", "_pool"), ("SHOTPhase", "_counts")}
CASES = [(name, {}) for name in METHODS] + VARIANTS
every_case = pytest.mark.parametrize(
    ("name", "changes"),
    [
        slow(n, c, unless=n in REPRESENTATIVES, name=" ".join([n, *(f"{k}={v}" for k, v in c.items())]))
        for n, c in CASES
    ],
)


def stage_of(name, changes, start):
    """A method at the beginning of its source stage, or of a target's; with the phases of that stage."""
    changes = {**SIZES, **QUICK.get(name, {}), **changes}
    plan = toy_plan(name, preset=changes.pop("preset", "official"), changes=changes)
    method, source, targets = toy_method(plan)
    if start is None:
        return method, method.source_phases(source)
    method.load_state(start)
    if plan.method.uses_target_labels(plan.config):
        return method, method.labelled_target_phases(targets[0])
    return method, method.target_phases(targets[0].unlabelled())


def through_a_file(state, folder):
    plain, tensors = split_tensors(state)
    write_tensors(folder / "state", tensors, {"state": json.dumps(plain)})
    tensors, about = read_tensors(folder / "state")
    return join_tensors(json.loads(about["state"]), tensors, torch.device("cpu"))


def finished(method, phases, progress):
    for _ in train(phases, progress=progress):
        pass
    return method.state()


@every_case
def test_a_stage_continues_with_the_same_bits(name, changes, tmp_path):
    start = None
    for _ in range(2):
        method, phases = stage_of(name, changes, start)
        before, progress, others = values_of(method, phases), Progress(), []
        for moment in train(phases, progress=progress):
            other, later = stage_of(name, changes, start), Progress()
            load_stage(through_a_file(save_stage(method, phases, progress), tmp_path), *other, later)
            differing = unsaved(before, values_of(method, phases), values_of(*other)).keys()
            assert differing <= RECOMPUTED
            if not isinstance(moment, Tick) or (moment.epoch, moment.step) in ((0, 1), (1, 1)):
                others.append((*other, later))
        start = {key: tensor.clone() for key, tensor in method.state().items()}
        for other in others:
            assert same_tensors(finished(*other), start)


@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        ("ratp", "labels"),
        ("ratp", "generators"),
        ("arc", "_mix"),
        ("shot+", "_head"),
        ("shot++", "_progress"),
        ("gsfda", "_bank"),
        ("gsfda", "_done"),
        ("bmd", "_centres"),
        ("aucid", "_means"),
        ("pden", "_generator"),
        ("tent", "_next"),
        ("eata", "_shown"),
        ("cotta", "_changes"),
        ("cotta", "_optimiser"),
        ("adacon", "bank"),
        ("codag", "_history"),
        ("mpm", "_history"),
        ("sar", "_shown"),
        ("rmt", "_changes"),
        ("roid", "_changes"),
        ("deyo", "_order"),
    ],
)
def test_unsaved_state_is_detected(name, forgotten, monkeypatch):
    names = state_module._saved_names
    monkeypatch.setattr(state_module, "_saved_names", lambda kind: [one for one in names(kind) if one != forgotten])
    changed = {
        "shot+": {"sgd.momentum": 0.9},
        "cotta": {"sgd.momentum": 0.9},
        "deyo": {"margin": 2.0},
        "arc": {"class_mix": "em"},
    }
    changes = changed.get(name, {})
    found, start = set(), None
    for _ in range(2):
        method, phases = stage_of(name, changes, start)
        before, progress = values_of(method, phases), Progress()
        for _ in train(phases, progress=progress):
            other = stage_of(name, changes, start)
            try:
                load_stage(save_stage(method, phases, progress), *other, Progress())
            except StateError:
                found.add(forgotten)
            found |= {attribute for _, attribute in unsaved(before, values_of(method, phases), values_of(*other))}
        start = {key: tensor.clone() for key, tensor in method.state().items()}
    assert found
