"""Classifiers trained elsewhere give the same answers here."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from helpers import CLASSES, ratp
from own_images import image_files, write_files
from ratp.errors import ConfigError, RatpError, RunDirectoryError
from ratp.networks.adopted import TOLERANCE, Adopted, adopt
from ratp.runs.load import load
from ratp.runs.record import read_run
from ratp.training.method import unpack
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny classifier of the four classes, and images of two domains."""
    place = tmp_path_factory.mktemp("adopted")
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=4)
    save_file(model.state_dict(), place / "checkpoint.safetensors")
    write_files(place / "day", image_files(count=12))
    write_files(place / "rain", image_files(count=8, seed=1))
    names = ",".join(CLASSES)  # in another order than the alphabet's
    files = place / "checkpoint.safetensors", place / "model.safetensors"
    done = ratp("adopt", *files, "--classes", names, "--backbone", "timm:test_resnet", "--size", "32")
    assert done.code == 0, done.err
    return place


def words(place, *more):
    few = ["--epochs", "1", "--steps", "2", "--batch", "8", "--device", "cpu", "--quiet"]
    domains = ["--source", place / "day", "--targets", place / "rain"]
    return ["run", "folders", "--model", place / "model.safetensors", *domains, *few, *more]


class TestRuns:
    def test_the_run_starts_with_its_answers(self, folders, tmp_path):
        assert ratp(*words(folders, "-m", "source-only", "--out", tmp_path / "run")).code == 0
        model = Adopted.load(folders / "model.safetensors")
        images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
        expected = classify(model.network(), images, Scaling(model.mean, model.std, torch.device("cpu")))
        loaded = load(tmp_path / "run", device="cpu")
        assert loaded.classes == CLASSES and torch.allclose(loaded.predict(images), expected)

    @pytest.mark.usefixtures("_no_processes")
    def test_several_methods_in_one_command(self, folders, tmp_path):
        asked = ["-m", "tent", "-m", "shot", "-m", "ratp"]
        assert ratp(*words(folders, *asked, "--out", tmp_path / "runs")).code == 0
        first = [read_run(path).matrix.accuracy[0] for path in sorted((tmp_path / "runs").iterdir())]
        assert len(first) == 3 and len(set(first)) == 1  # all start with the same network

    def test_a_memory_of_the_source(self, folders, tmp_path):
        assert ratp(*words(folders, "-m", "ratp", "--out", tmp_path / "run")).code == 0
        assert len(unpack(load(tmp_path / "run", device="cpu").method.state())["memory"]["labels"]) > 0

    @pytest.mark.parametrize(
        ("method", "said"),
        [("pden", "in its own way"), ("gsfda", "needs a bottleneck")],
    )
    def test_methods_that_cannot_say_so(self, folders, tmp_path, method, said):
        refused = ratp(*words(folders, "-m", method, "--out", tmp_path / "run"))
        assert refused.code == 2 and said in refused.err

    def test_what_belongs_to_the_model_cannot_be_changed(self, folders, tmp_path):
        refused = ratp(*words(folders, "--size", "64", "--weights", "imagenet", "--out", tmp_path / "run"))
        assert refused.code == 2 and "leave out size, weights" in refused.err

    def test_another_model_is_named(self, folders, tmp_path):
        assert ratp(*words(folders, "-m", "source-only", "--out", tmp_path / "run")).code == 0
        torch.manual_seed(1)
        other = timm.create_model("test_resnet", num_classes=4)
        path = tmp_path / "other.safetensors"
        adopt(other, CLASSES, backbone="timm:test_resnet", size=32).save(path)
        again = words(folders, "-m", "source-only", "--out", tmp_path / "run", "--model", path)
        assert "It differs in adopted" in ratp(*again).err

    def test_a_file_of_options_finds_it_from_anywhere(self, folders, tmp_path, monkeypatch):
        monkeypatch.chdir(folders)
        model = ["--model", "model.safetensors", "--source", "day", "--targets", "rain", "-m", "source-only"]
        assert ratp("run", "folders", *model, "--save-config", tmp_path / "run.toml").code == 0
        monkeypatch.chdir(tmp_path)
        assert ratp("run", "run.toml", "--dry-run").code == 0

    @pytest.mark.filterwarnings("ignore:continues")
    def test_the_next_domain_needs_neither_model_nor_source(self, folders, tmp_path):
        assert ratp(*words(folders, "-m", "source-only", "--out", tmp_path / "run")).code == 0
        write_files(tmp_path / "fog", image_files(count=4, seed=2))
        after = ["--after", tmp_path / "run", "--targets", tmp_path / "fog", "--out", tmp_path / "next"]
        assert ratp("run", *after, "--device", "cpu", "--quiet").code == 0

    def test_other_classes(self, folders, tmp_path):
        write_files(tmp_path / "day", image_files(["cat", "dog"], count=4))
        refused = ratp(*words(folders)[:5], tmp_path / "day", *words(folders)[6:], "--out", tmp_path / "run")
        assert refused.code == 2 and "cat" in refused.err


class TestMistakes:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"classes": ["ant", "bee"]}, "has 3 classes, and 2 names"),
            ({"classes": ["ant", "ant", "bee"]}, "each different"),
            ({"classes": "abc"}, "a list of names"),
            ({"backbone": "resnet18"}, "timm:NAME, torchvision:NAME, .* got 'resnet18'"),
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
