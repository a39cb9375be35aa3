"""Classifiers trained elsewhere give the same answers here."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from ratp.deploy.adopt import TOLERANCE, Adopted, adopt
from ratp.errors import ConfigError, RatpError, RunDirectoryError
from ratp.training.recipe import Scaling, classify

NAMES = ["ant", "bee", "cat"]
SIDE = 64
KINDS = ["timm:resnet18", "timm:convnext_atto", "torchvision:mobilenet_v3_small"]
SLOW = ["timm:vit_tiny_patch16_224", "timm:efficientnet_b0", "torchvision:vit_b_16", "torchvision:convnext_tiny"]


def model_of(kind: str, classes: int = 3) -> nn.Module:
    """A classifier as its library builds it, with statistics of its own."""
    library, _, name = kind.partition(":")
    torch.manual_seed(0)
    build = timm.create_model if library == "timm" else torchvision.models.get_model
    model = build(name, num_classes=classes)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 2)
    return model


@pytest.fixture(scope="module")
def resnet():
    return model_of("timm:resnet18")


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_the_same_answers_as_before(kind, tmp_path):
    model, side = model_of(kind), 224 if "vit" in kind else SIDE
    adopt(model, NAMES, backbone=kind, size=side).save(tmp_path / "model.safetensors")
    found = Adopted.load(tmp_path / "model.safetensors")
    images = torch.randint(256, (4, 3, side, side), dtype=torch.uint8)
    scaling = Scaling(found.mean, found.std, torch.device("cpu"))
    with torch.no_grad():
        expected = model.eval()(scaling(images))
    assert (classify(found.network(), images, scaling) - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert found.classes == tuple(NAMES)


@pytest.mark.parametrize("form", ["safetensors", "pth", "wrapped"])
def test_from_a_checkpoint(resnet, form, tmp_path):
    state = {name: tensor.clone() for name, tensor in resnet.state_dict().items()}
    path = tmp_path / ("model.safetensors" if form == "safetensors" else "model.pth")
    if form == "safetensors":
        save_file(state, path)
    elif form == "pth":
        torch.save(state, path)
    else:
        torch.save({"epoch": 3, "state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, path)
    found = adopt(path, NAMES, backbone="timm:resnet18", size=SIDE)
    assert found.sha256 == adopt(resnet, NAMES, backbone="timm:resnet18", size=SIDE).sha256


def test_the_model_stays_as_it_is(resnet):
    before = {name: tensor.clone() for name, tensor in resnet.state_dict().items()}
    resnet.train()
    adopt(resnet, NAMES, backbone="timm:resnet18", size=SIDE)
    assert resnet.training
    assert all(torch.equal(before[name], tensor) for name, tensor in resnet.state_dict().items())


def test_preprocessing_of_its_kind_unless_given(resnet):
    usual = adopt(resnet, NAMES, backbone="timm:resnet18")
    assert usual.size == 224 and usual.mean[0] == pytest.approx(0.485)
    other = adopt(resnet, NAMES, backbone="timm:resnet18", size=SIDE, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    assert (other.size, other.mean, other.std) == (SIDE, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))


class Odd(nn.Module):
    def forward(self, x):
        return x.mean(dim=(2, 3))


class TestMistakes:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"classes": ["ant", "bee"]}, "has 3 classes, and 2 names"),
            ({"classes": ["ant", "ant", "bee"]}, "each different"),
            ({"classes": "abc"}, "a list of names"),
            ({"backbone": "resnet18"}, r"timm:NAME or torchvision:NAME, got 'resnet18'"),
            ({"backbone": "timm:resnet81"}, "Did you mean 'resnet18"),
            ({"std": (1, 0, 1)}, "above 0"),
            ({"mean": (1, 1)}, "three numbers"),
        ],
    )
    def test_named(self, resnet, changes, said):
        given = {"classes": NAMES, "backbone": "timm:resnet18", "size": SIDE, **changes}
        with pytest.raises(ConfigError, match=said):
            adopt(resnet, given.pop("classes"), **given)

    def test_another_kind_than_said(self, resnet):
        with pytest.raises((RatpError, RuntimeError)):
            adopt(resnet, NAMES, backbone="timm:resnet34", size=SIDE)

    def test_not_a_number(self):
        broken = model_of("timm:resnet18")
        with torch.no_grad():
            broken.fc.bias[0] = torch.nan
        with pytest.raises(RatpError, match="NaN"):
            adopt(broken, NAMES, backbone="timm:resnet18", size=SIDE)

    def test_checkpoint_of_other_classes(self, resnet, tmp_path):
        torch.save(resnet.state_dict(), tmp_path / "model.pth")
        with pytest.raises(RatpError, match="with 4 classes"):
            adopt(tmp_path / "model.pth", [*NAMES, "dog"], backbone="timm:resnet18", size=SIDE)

    def test_a_file_of_something_else(self, tmp_path):
        save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
        with pytest.raises(RunDirectoryError, match="no adopted model"):
            Adopted.load(tmp_path / "model.safetensors")
