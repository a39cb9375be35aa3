"""RaTP's two ways to take a step: copying some images of a batch, or all and leaving out the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import toy_method, toy_plan
from ratp.functional.norm import supports_row_masks
from ratp.networks.backbones import ChannelDropout
from ratp.networks.network import NetworkConfig

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
SWITCHES = [
    {},
    {"joint_batch": False},
    {"joint_batch": False, "distill.data": "target"},
    {"distill.data": "target"},
    {"distill.data": "target", "distill.student": "eval"},
    {"distill.student": "eval"},
    {"distill.student": "eval", "distill.on": "embedding", "joint_batch": False},
    {"distill.on": "embedding"},
    {"distill.weight": 0.0},
    {"memory.replay": "separate"},
    {"memory.replay": "separate", "joint_batch": False},
    {"memory.replay": "none"},
    {"memory": 0},
    {"augment_replay": False},
    {"augment_replay": False, "joint_batch": False, "distill.data": "target"},
    {"strict": False},
    {"pca.negatives": "all", "pca.form": "published"},
    {"pca.similarity": "dot", "pca.form": "published"},
    {"pca.weight": 0.0},
    {"randmix.noise_per": "batch", "randmix.weights_per": "sample"},
    {"randmix.colour_branch": False, "randmix.input_noise": 0.0, "randmix.redraw_adain": True},
    {"sgd.momentum": 0.9, "lr": 0.002},
]
BATCH = 12


@pytest.fixture(autouse=True)
def _double(monkeypatch):
    """Everything in double precision: what is left are sums in another order."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def prepared(changes, backbone="dtn"):
    """RaTP after a source stage, its dropout off: compact and static batches differ in the rows it draws for."""
    plan = toy_plan(changes={"batch": BATCH, "memory": 40, "lr": 0.02, **changes})
    if backbone != "dtn":
        plan = replace(plan, recipe=replace(plan.recipe, network=NetworkConfig(backbone, hidden=12, dim=6)))
    method, source, targets = toy_method(plan)
    for layer in method.network.modules():
        if isinstance(layer, ChannelDropout):
            layer.probability = 0.0
    method.fit_source(source)
    return method, source, targets[0].unlabelled()


def middling(method, domain, share=0.5):
    """The confidence that a share of the images does not reach."""
    if share == 1:
        return 1.0
    confidence = method.predict(domain.images).softmax(dim=1).amax(dim=1)
    return confidence.quantile(share).item()


def walk(changes, *, static, share=0.5, steps=4, on="target", backbone="dtn"):
    """What some steps report, and the network after them."""
    method, source, target = prepared(changes, backbone)
    method.config = replace(method.config, r_con=middling(method, target, share))
    (phase,) = method.source_phases(source) if on == "source" else method.target_phases(target)
    phase._static = static
    phase.begin()
    phase.begin_epoch(0)
    return [phase.step() for _ in range(steps)], method.network


def assert_alike(changes, **options):
    (compact, one), (static, other) = (walk(changes, static=static, **options) for static in (False, True))
    for there, here in zip(compact, static, strict=True):
        torch.testing.assert_close(here, there, **CLOSE)
    torch.testing.assert_close(dict(other.state_dict()), dict(one.state_dict()), **CLOSE)
    return compact


@pytest.mark.parametrize(
    "changes",
    [pytest.param(changes, marks=pytest.mark.slow if k % 5 else ()) for k, changes in enumerate(SWITCHES)],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()) or "official",
)
def test_both_ways_lead_to_the_same_numbers(changes):
    records = assert_alike(changes)
    shares = [record["confident"].item() for record in records]
    assert any(0 < share < 1 for share in shares), shares


@pytest.mark.slow
def test_with_a_residual_network():
    """Its activations work in place on what BatchNorm gave."""
    records = assert_alike({"steps": 1, "lr": 0.001}, backbone="resnet18", steps=2)
    assert any(0 < record["confident"].item() < 1 for record in records)


@pytest.mark.parametrize("joint_batch", [True, False])
def test_on_the_source_too(joint_batch):
    assert_alike({"joint_batch": joint_batch}, on="source")


@pytest.mark.parametrize("joint_batch", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.9, 1.0], ids=["nearly all", "few", "none"])
def test_however_many_are_confident(share, joint_batch):
    assert_alike({"joint_batch": joint_batch}, share=share)


def test_a_step_without_any_leaves_the_statistics_of_copies_alone():
    """Apart from the clean images, copies that nobody asked for pass through BatchNorm and leave no trace."""
    records = assert_alike({"joint_batch": False}, share=1.0)
    assert all(record["confident"].item() == 0 for record in records)


def test_unrequested_copies_have_no_influence(monkeypatch):
    """Whatever numbers they consist of."""
    ends = []
    for spoilt in (False, True):
        method, _, target = prepared({})
        method.config = replace(method.config, r_con=middling(method, target))
        (phase,) = method.target_phases(target)
        phase._static = True
        phase.begin()
        phase.begin_epoch(0)
        if spoilt:
            real, chosen = type(method.randmix).__call__, []
            pick = type(phase)._confident
            monkeypatch.setattr(
                type(phase), "_confident", lambda *given, p=pick, c=chosen: c.append(p(*given)) or c[-1]
            )

            def spoil(*given, r=real, c=chosen):
                copies = r(*given)
                copies[~c[-1]] = torch.nan
                return copies

            monkeypatch.setattr(type(method.randmix), "__call__", spoil)
        record = phase.step()
        assert 0 < record["confident"].item() < 1
        ends.append((record, dict(method.network.state_dict())))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_labels_are_refreshed_where_they_are():
    """A captured step reads them there."""
    method, _, target = prepared({"refresh": 1})
    (phase,) = method.target_phases(target)
    phase.begin()
    phase.begin_epoch(0)
    place, before = phase._labels.data_ptr(), phase._labels.clone()
    with torch.no_grad():
        method.network.classifier.weight.copy_(method.network.classifier.weight.roll(1, dims=0))
    phase.begin_epoch(1)
    assert phase._labels.data_ptr() == place
    assert not torch.equal(phase._labels, before)


def test_it_is_static_where_it_pays_and_can_be():
    method, source, target = prepared({})
    assert supports_row_masks(method.network)
    for phases in (method.source_phases(source), method.target_phases(target)):
        assert not phases[0].captures
        assert len(phases[0].generators) == len(set(phases[0].generators)) == 4
