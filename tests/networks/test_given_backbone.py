"""A backbone of one's own, given as a module, a class, a function or in a file: trained, resumed, loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import ratp
from helpers import ratp as command
from helpers import same_tensors, tensors_of, toy_domains
from ratp.errors import ConfigError, RatpError
from ratp.networks.backbones import NAMES, REGISTRY
from ratp.networks.own import register_own
from ratp.runs.plan import with_current_defaults
from ratp.runs.record import fingerprint_of, read_run

SIZES = {"epochs": 2, "steps": 3, "batch": 8, "network.hidden": 8, "network.dim": 4}
TINY = "Sequential(nn.Conv2d(3, 6, 5, 4), nn.BatchNorm2d(6), nn.Dropout(0.3), nn.Flatten())"


class Tiny(nn.Sequential):
    def __init__(self, width=6):
        super().__init__(nn.Conv2d(3, width, 5, 4), nn.BatchNorm2d(width), nn.Dropout(0.3), nn.Flatten())


def build_tiny():
    return Tiny()


@pytest.fixture(autouse=True)
def _registry():
    yield
    forget()


def forget():
    """As if the process had started anew."""
    for name in set(REGISTRY) - set(NAMES):
        del REGISTRY[name]


def plan(backbone, **options):
    source, *targets = toy_domains()
    request = ratp.RunRequest(method="source-only", changes=SIZES, device="cpu", **options)
    return ratp.resolve(request, stream=ratp.own_stream(source, targets), backbone=backbone)


IMAGES = toy_domains()[1].images


@pytest.mark.parametrize(
    "backbone", [Tiny, build_tiny, lambda: Tiny(), Tiny()], ids=["class", "def", "lambda", "module"]
)
def test_every_kind_trains_and_loads_again(backbone, tmp_path):
    run = ratp.Run(plan(backbone), tmp_path / "run")
    run.execute()
    expected = run.method.predict(IMAGES)
    assert torch.equal(ratp.load(tmp_path / "run").predict(IMAGES), expected)
    forget()
    with pytest.raises(RatpError, match=r"a backbone of your own, .*ratp never imports it by itself"):
        ratp.load(tmp_path / "run")
    assert torch.equal(ratp.load(tmp_path / "run", backbone=Tiny()).predict(IMAGES), expected)


def test_messages_say_how_to_get_it(tmp_path):
    for backbone, advice in (
        (Tiny, "from test_given_backbone import Tiny; ratp.load(path, backbone=Tiny)"),
        (lambda: Tiny(), "It was defined in a function: build it again in the same way"),
    ):
        folder = tmp_path / advice[:5]
        ratp.Run(plan(backbone), folder).execute()
        forget()
        with pytest.raises(ConfigError) as caught:
            ratp.load(folder)
        assert advice in str(caught.value) and "\n" not in str(caught.value)


def test_another_backbone_is_refused(tmp_path):
    ratp.Run(plan(Tiny), tmp_path / "run").execute()
    with pytest.raises(RatpError, match="the one given has other layers or shapes"):
        ratp.load(tmp_path / "run", backbone=lambda: Tiny(7))
    ratp.Run(plan(None), tmp_path / "usual").execute()
    with pytest.raises(ConfigError, match="has the backbone dtn, which needs none of your own"):
        ratp.load(tmp_path / "usual", backbone=Tiny)


def test_a_module_gives_its_weights_and_stays_as_it_is(tmp_path):
    module = Tiny()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    made = plan(module)
    method = made.build_method(made.load_stream())
    assert torch.equal(method.state()["network.backbone.0.weight"], before["0.weight"])
    ratp.Run(made, tmp_path / "run").execute()
    assert same_tensors(before, dict(module.state_dict()))
    with pytest.raises(RatpError, match="holds another run"):
        ratp.Run(plan(Tiny()), tmp_path / "run").execute()  # other initial weights


@pytest.mark.parametrize("backbone", [Tiny, Tiny()], ids=["class", "module"])
def test_an_interrupted_run_ends_like_an_undisturbed_one(backbone, tmp_path):
    ratp.Run(plan(backbone), tmp_path / "whole").execute()
    events = ratp.Run(plan(backbone), tmp_path / "cut").events()
    for _ in range(6):
        next(events)
    events.close()
    forget()
    torch.rand(7)
    ratp.Run(plan(backbone), tmp_path / "cut").execute()
    assert same_tensors(tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "cut"))


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        (lambda: nn.Conv2d(3, 6, 5, 4), r"gives no feature vectors but 6×7×7.*nn\.Flatten\(\)"),
        (lambda: nn.Linear(3, 4), "cannot work on 32×32 images"),
        (lambda: 3, "must build an nn.Module, got int"),
        (lambda width: Tiny(width), r"cannot be built: TypeError.*lambda: TinyNet\(64\)"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), "has lazy layers"),
        (3, "a backbone must be a name, a module, or a class or function that builds one, got int"),
        ("none.py:Tiny", r"backbone file 'none\.py' does not exist"),
        ("none.pyc", "is no backbone of your own: give FILE.py:NAME"),
    ],
)
def test_mistakes(backbone, expected, tmp_path):
    with pytest.raises(RatpError, match=expected):
        ratp.Run(plan(backbone), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_given_weights_contradict_those_of_a_module():
    with pytest.raises(ConfigError, match="has weights of its own: leave out the weights"):
        plan(Tiny(), weights="imagenet")


class TestFiles:
    @pytest.fixture
    def file(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        marker = "__import__('pathlib').Path('ran').touch()"
        Path("net.py").write_text(f"from torch import nn\n{marker}\ndef tiny():\n    return nn.{TINY}\n")
        return "net.py:tiny"

    def test_on_the_command_line(self, file):
        changes = [word for name, value in SIZES.items() for word in ("--set", f"{name}={value}")]
        options = ["--method", "source-only", *changes, "--device", "cpu", "--out", "run"]
        done = command("run", "demo", "--set", f"network.backbone={file}", *options)
        assert done.code == 0, done
        Path("ran").unlink()
        forget()
        Path("images").mkdir()
        Image.new("RGB", (32, 32)).save("images/black.png")
        refused = command("predict", "run", "images")
        assert refused.code == 2 and "--backbone net.py:tiny, in Python" in " ".join(refused.err.split())
        assert not Path("ran").exists()
        done = command("predict", "run", "images", "--backbone", file)
        assert done.code == 0 and "black.png" in done.out and Path("ran").exists()


def test_a_run_never_runs_its_backbone(tmp_path, monkeypatch):
    """Not even if its record names a file in the form that runs one."""
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("__import__('pathlib').Path('ran').touch()\ndef net():\n    pass\n")
    for folder in ("run", "done"):
        ratp.Run(plan(Tiny), tmp_path / folder).execute()
    done = tmp_path / "done"
    for name in ("evil.py:net", "evil.py:net#0123456789ab", "evil:net#0123456789ab"):
        path = tmp_path / "run" / "config.json"
        config = json.loads(path.read_text())
        config["recipe"]["network.backbone"] = name
        path.write_text(json.dumps({**config, "fingerprint": fingerprint_of(config)}))
        with pytest.raises(RatpError):
            ratp.load(tmp_path / "run")
        with pytest.raises(ConfigError, match="unknown backbone"):
            ratp.resolve(ratp.RunRequest(changes={"network.backbone": name}, device="cpu"))
        values = {"recipe": {"network.backbone": name}, "stream": "demo", "method": "source-only", "preset": "official"}
        record = replace(read_run(done), config={**read_run(done).config, **values})
        assert with_current_defaults(record) is record
    assert not Path("ran").exists()


def test_dropout_draws_from_the_runs_generators():
    module = REGISTRY[register_own(Tiny).name].build()
    layer = module[2]
    images = torch.ones(64, 3, 32, 32)
    for generators in ((1, 1, True), (1, 2, False)):
        found = []
        for seed in generators[:2]:
            layer.generator = torch.Generator().manual_seed(seed)
            found.append(module.train()(images))
        assert torch.equal(*found) is generators[2]
    kept = (layer(torch.ones(1000, 10)) > 0).float().mean()
    assert abs(kept - 0.7) < 0.03
