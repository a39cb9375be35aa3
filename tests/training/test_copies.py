"""RandMix copies for other methods: of all source images, of confident target images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import all_finite, same_tensors, tensors_of, toy_method, toy_plan
from ratp.errors import ConfigError
from ratp.networks.backbones import ChannelDropout
from ratp.networks.network import NetworkConfig
from ratp.runs.events import StageFinished
from ratp.runs.run import Run
from ratp.training.phase import train

COPYING = pytest.mark.parametrize("method", ["shot", "pcl", "gsfda", "snr"])


def build_method(method, **changes):
    return toy_method(toy_plan(method, changes={"augment": True, **changes}))


@COPYING
def test_the_network_sees_twice_the_images(method, monkeypatch):
    trainer, source, targets = build_method(method, r_con=0.0)
    seen = []
    trainer.network.backbone.register_forward_hook(
        lambda module, inputs, _: seen.append((module.training, len(inputs[0])))
    )
    batch = trainer.setting.recipe.batch
    (phase,) = trainer.source_phases(source)
    phase.begin()
    phase.begin_epoch(0)
    phase.step()
    assert seen == [(True, 2 * batch)]
    list(train([phase]))
    (phase,) = trainer.target_phases(targets[0].unlabelled())
    phase.begin()
    phase.begin_epoch(0)
    seen.clear()
    phase.step()
    assert seen == [(False, batch), (True, 2 * batch)]


@COPYING
def test_copies_of_images_nobody_is_confident_about_have_no_influence(method):
    """The step equals that of a run without copies, whatever the copies look like."""
    ends = []
    for changes in ({"r_con": 1.0}, {"augment": False}):
        trainer, _, targets = build_method(method, **changes)
        for layer in trainer.network.modules():  # it draws other numbers for more images
            if isinstance(layer, ChannelDropout):
                layer.probability = 0.0
        (phase,) = trainer.target_phases(targets[0].unlabelled())
        phase.begin()
        phase.begin_epoch(0)
        record = phase.step()
        ends.append((record["total"].detach(), dict(trainer.network.state_dict())))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


@COPYING
def test_copies_matter(method):
    trainer, source, targets = build_method(method, r_con=0.0)
    plain, _, _ = build_method(method, augment=False)
    for each in (trainer, plain):
        each.fit_source(source)
        each.adapt(targets[0].unlabelled())
    assert all_finite(trainer.state())
    shared = {name: tensor for name, tensor in trainer.state().items() if not name.startswith("randmix")}
    assert not same_tensors(shared, plain.state())


@COPYING
def test_interrupted_run_resumes_with_the_same_layers(method, tmp_path):
    plan = toy_plan(method, changes={"augment": True, "r_con": 0.3})
    Run(plan, tmp_path / "whole").execute()
    events = Run(plan, tmp_path / "cut").events()
    next(event for event in events if isinstance(event, StageFinished))
    events.close()
    Run(plan, tmp_path / "cut").execute()
    assert same_tensors(tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "cut"))


@COPYING
def test_kernels_must_fit(method):
    with pytest.raises(ConfigError, match="kernel of 99 does not fit into images of 32×32"):
        build_method(method, **{"randmix.kernel_sizes": "5,99"})


@COPYING
def test_batchnorm_must_be_able_to_leave_images_out(method):
    pytest.importorskip("timm")
    plan = toy_plan(method, changes={"augment": True})
    network = NetworkConfig("timm:test_resnet", hidden=8, dim=4)
    with pytest.raises(ConfigError, match="cannot leave images out"):
        toy_method(replace(plan, recipe=replace(plan.recipe, network=network)))


@COPYING
def test_it_is_off_by_default(method):
    trainer, _, _ = toy_method(toy_plan(method))
    assert trainer.randmix is None
    assert not any(name.startswith("randmix") for name in trainer.state())
