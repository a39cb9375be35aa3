"""Classifiers of a user's own class: adopted with their head, found again only with the class."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import CLASSES, ratp
from own_images import image_files, write_files
from ratp.errors import ConfigError, RatpError
from ratp.networks.adopted import TOLERANCE, Adopted, adopt
from ratp.networks.backbones import NAMES, REGISTRY
from ratp.runs.load import load
from ratp.training.recipe import Scaling, classify

CODE = """
from torch import nn, relu

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 5, 4), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.hidden, self.fc = nn.Linear(24, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.fc(relu(self.hidden(self.body(x).flatten(1))))

class Other(Net):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(24, 16)
        self.fc = nn.Linear(16, 4)
"""
HALF = (0.5, 0.5, 0.5)
HOW = {"size": 32, "mean": HALF, "std": HALF}
WORDS = ["--size", "32", "--mean", *HALF, "--std", *HALF]


@pytest.fixture(autouse=True)
def _registry():
    yield
    forget()


def forget():
    """As if the process had started anew."""
    for name in set(REGISTRY) - set(NAMES):
        del REGISTRY[name]


namespace = {"__name__": "shop"}
exec(CODE, namespace)
Net, Other = namespace["Net"], namespace["Other"]


class Scaled(Net):
    def forward(self, x):
        return super().forward(x).softmax(dim=1)


class Doubled(Net):
    def forward(self, x):
        return 2 * super().forward(x)


def net(kind=Net):
    torch.manual_seed(0)
    return kind()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A checkpoint, its class in a file, and images of two domains."""
    (tmp_path / "shop.py").write_text(CODE)
    torch.save(net().state_dict(), tmp_path / "net.pth")
    write_files(tmp_path / "day", image_files(count=24))
    write_files(tmp_path / "rain", image_files(count=16, seed=1))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_same_answers_in_another_process_that_has_the_class(tmp_path):
    model = net()
    adopt(model, CLASSES, **HOW).save(tmp_path / "model.safetensors")
    forget()
    with pytest.raises(ConfigError, match=r"a backbone of your own, shop:Net.*from shop import Net"):
        Adopted.load(tmp_path / "model.safetensors")
    with pytest.raises(RatpError, match="trained with shop:Net without fc, and the one given has other layers"):
        Adopted.load(tmp_path / "model.safetensors", backbone=Other)
    found = Adopted.load(tmp_path / "model.safetensors", backbone=Net)
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    scaling = Scaling(HALF, HALF, torch.device("cpu"))
    with torch.no_grad():
        expected = model.eval()(scaling(images))
    assert (classify(found.network(), images, scaling) - expected).abs().max() <= TOLERANCE
    assert found.config.dim == 12


def test_the_command_line_from_a_checkpoint_to_predictions(place):
    kind = ["--backbone", "shop.py:Net"]
    done = ratp("adopt", "net.pth", "m.safetensors", *kind, "--classes", ",".join(CLASSES), *WORDS)
    assert done.code == 0 and "--backbone shop.py:Net" in done.err, done
    few = ["-m", "tent", "--epochs", 1, "--steps", 1, "--batch", 8, "--device", "cpu", "--quiet", "--out", "run"]
    words = ["run", "folders", "--model", "m.safetensors", "--source", "day", "--targets", "rain", *few]
    forget()
    refused = ratp(*words)
    assert refused.code == 2 and "--backbone shop.py:Net, in Python" in refused.err
    done = ratp(*words, *kind)
    assert done.code == 0, done
    forget()
    assert load("run", device="cpu", backbone="shop.py:Net").classes == CLASSES


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (Net, {"head": "hidden"}, "'hidden' is not the head"),
        (Net, {"head": "last"}, "no linear layer 'last'.*Its linear layers: hidden, fc"),
        (Net, {"classes": ["ant", "bee"]}, "has 4 classes, and 2 names"),
        (Net, {"mean": None, "std": None}, "give mean, std as it was trained with"),
        (Scaled, {}, "head cannot be found.*without a softmax.*hidden, fc"),
        (Doubled, {"head": "fc"}, "differs from the original by .* not the output of the layer 'fc'"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 32), nn.Flatten()), {}, "It has no linear layer"),
    ],
)
def test_mistakes_are_named(kind, changes, said):
    given = {"classes": CLASSES, **HOW, **changes}
    with pytest.raises(RatpError, match=said):
        adopt(net(kind), given.pop("classes"), **given)


def test_a_checkpoint_of_another_class(place):
    refused = ratp("adopt", "net.pth", "m.safetensors", "--backbone", "shop.py:Other", "--classes", "day", *WORDS)
    assert refused.code == 2 and "net.pth is not a shop.py:Other" in refused.err


class TestWithoutSource:
    """A run with an adopted model of whose source no image is there."""

    def words(self, *more):
        adopt(net(), CLASSES, backbone="shop.py:Net", **HOW).save("m.safetensors")
        model = ["--model", "m.safetensors", "--backbone", "shop.py:Net", "--targets", "rain"]
        few = ["--epochs", 1, "--steps", 1, "--batch", 8, "--device", "cpu", "--quiet", "--out", "run"]
        return ["run", "folders", *model, *few, *more]

    @pytest.mark.parametrize("method", ["tent", "t3a", "shot"])
    def test_it_starts_with_the_model_and_says_that_the_guard_is_off(self, place, method):
        done = ratp(*self.words("-m", method))
        assert done.code == 0 and "the guard is off" in done.err, done
        loaded = load("run", device="cpu", backbone="shop.py:Net")
        assert loaded.stages == ("no source", "rain")

    def test_methods_that_need_source_images_say_so(self, place):
        refused = ratp(*self.words("-m", "ratp"))
        assert refused.code == 2 and "ratp needs source images: give --source" in refused.err
        refused = ratp(*self.words("-m", "eata"))
        assert refused.code == 2 and "(source-only, shot" in refused.err

    def test_no_exemplar_is_made_up(self, place):
        assert ratp(*self.words("-m", "source-only")).code == 0
        state = load("run", device="cpu", backbone="shop.py:Net").method.state()
        assert not any(name.startswith("memory") for name in state)
