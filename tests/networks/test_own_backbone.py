"""The user's own backbone: registered, trained, saved, loaded; and the error where it is not registered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ratp
from helpers import ratp as command
from ratp.errors import ConfigError
from ratp.networks.backbones import NAMES, REGISTRY, make_backbone

SETTINGS = {"network.backbone": "tiny", "epochs": 1, "steps": 2, "batch": 8, "network.hidden": 8, "network.dim": 4}
EXAMPLE = Path(__file__).parents[2] / "examples" / "self_training.py"


class Tiny(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 6, 5, stride=4), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    for name in set(REGISTRY) - set(NAMES):
        monkeypatch.delitem(REGISTRY, name)
    yield
    for name in set(REGISTRY) - set(NAMES):
        REGISTRY.pop(name)


def test_its_features_are_measured():
    ratp.register_backbone("tiny", Tiny)
    module, features = make_backbone("tiny", (32, 32))
    assert isinstance(module, Tiny)
    assert features == module.eval()(torch.zeros(1, 3, 32, 32)).shape[1] == 294


@pytest.mark.parametrize("name", ["dtn", "resnet50", "timm:tiny", "", " tiny"])
def test_names_that_are_taken_are_refused(name):
    with pytest.raises(ConfigError, match="choose a name other than dtn"):
        ratp.register_backbone(name, Tiny)


def test_it_trains_on_the_demo_and_its_run_can_be_loaded(tmp_path):
    ratp.register_backbone("tiny", Tiny)
    plan = ratp.resolve(ratp.RunRequest(stream="demo", method="source-only", changes=SETTINGS, device="cpu"))
    assert plan.weights is None
    assert plan.recipe.size == 32
    run = ratp.Run(plan, tmp_path / "run")
    run.execute()
    loaded = ratp.load(tmp_path / "run")
    logits = loaded.predict(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert logits.shape == (2, len(loaded.classes))
    assert logits.isfinite().all()
    del REGISTRY["tiny"]
    with pytest.raises(
        ratp.RatpError, match=r"unknown backbone 'tiny'.*FILE.py:NAME.*registered in this process first"
    ) as caught:
        ratp.load(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_method_file_may_register_one(tmp_path):
    file = tmp_path / "own.py"
    tiny = "lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 6, 5, 4), torch.nn.Flatten())"
    register = f"\n\nfrom ratp import register_backbone\n\nregister_backbone('tiny', {tiny})\n"
    file.write_text(EXAMPLE.read_text(encoding="utf-8") + register, encoding="utf-8")
    changes = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    result = command("run", "demo", "--method", file, *changes, "--device", "cpu", "--out", tmp_path / "run")
    assert result.code == 0, result
    assert '"network.backbone": "tiny"' in (tmp_path / "run" / "config.json").read_text(encoding="utf-8")
