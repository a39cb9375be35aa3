"""A file from ``ratp export`` predicts as ratp does, without ratp."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import TINY, each_method, ratp, toy_domain, toy_plan
from own_images import assert_error, assert_ok, image_files, write_files
from ratp.deploy import export as exporting
from ratp.deploy.deployment import Deployment
from ratp.deploy.export import export
from ratp.errors import RatpError
from ratp.runs.load import load
from ratp.runs.run import Run

onnxruntime = pytest.importorskip("onnxruntime")

IMAGES = toy_domain("elsewhere", 20).images
# Layers of ratp's own: BatchNorm with ReLU fused, one-layer bottleneck, weight norm, rows that T3A replaces.
OWN_LAYERS = {"network.bottleneck": "one", "network.weight_norm": True, "lr": 0.05, "steps": 6}


def trained(folder, method="t3a", **changes):
    Run(toy_plan(method, changes={**OWN_LAYERS, **changes}), folder).execute()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("export") / "run")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("pictures"), image_files(count=5))


@pytest.fixture(scope="module")
def files(run, pictures):
    """All files in ONNX, by the command line, with what it printed as JSON."""
    out = run.parent / "model.onnx"
    words = ("--images", pictures, "--labelled", pictures, "--half", "--int8", "--json")
    result = ratp("export", run, "--out", out, *words)
    assert_ok(result)
    return {item["precision"]: item for item in json.loads(result.out)}


def predict(path, images):
    return onnxruntime.InferenceSession(path).run(None, {"images": images.numpy()})


class TestOnnx:
    @pytest.mark.parametrize("count", [1, 2, 20])
    def test_any_number_of_images_gets_the_logits_of_the_run(self, run, files, count):
        probabilities, logits = predict(files["fp32"]["path"], IMAGES[:count])
        expected = load(run, device="cpu").predict(IMAGES[:count])
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        np.testing.assert_allclose(probabilities, expected.softmax(dim=1), atol=1e-5)
        assert np.ptp(logits, axis=1).min() > 1e-3  # or any model would do

    def test_it_knows_its_classes_and_where_it_comes_from(self, run, files):
        found = onnxruntime.InferenceSession(files["fp32"]["path"]).get_modelmeta().custom_metadata_map
        config = json.loads((run / "config.json").read_text())
        assert json.loads(found["classes"]) == config["classes"]
        assert found["fingerprint"] == config["fingerprint"]
        assert json.loads(found["image_size"]) == [32, 32]

    def test_smaller_files_say_what_they_cost(self, run, files, pictures):
        expected = load(run, device="cpu").predict(IMAGES)
        assert max(files["int8"]["size"], files["fp16"]["size"]) < files["fp32"]["size"]
        for kind, allowed in (("fp16", 0.02), ("int8", 0.5)):
            item = files[kind]
            assert Path(item["path"]).name == f"model-{kind}.onnx"
            assert 0 < item["difference"] < allowed
            np.testing.assert_allclose(predict(item["path"], IMAGES)[1], expected, atol=2 * allowed)
            before, after = item["accuracy"][pictures.name]
            assert before == files["fp32"]["accuracy"][pictures.name][0] > 50
            assert abs(before - after) <= 10


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_the_printed_program_predicts_as_ratp_does(run, pictures, tmp_path, monkeypatch, capsys, to):
    monkeypatch.chdir(tmp_path)
    result = ratp("export", run, "--to", to, "--images", pictures)
    assert_ok(result)
    image = sorted(pictures.rglob("*.png"))[0]
    found = {}
    program = result.out[result.out.index("import json, numpy") :].replace("IMAGE.jpg", str(image))
    capsys.readouterr()
    exec(program, found)
    printed = capsys.readouterr().out
    (asked,) = json.loads(ratp("predict", run, image, "--json").out)["predictions"]
    assert float(found["probabilities"].max()) == pytest.approx(asked["confidence"], abs=1e-4)
    assert load(run).classes[int(found["logits"].argmax())] == asked["class"]
    assert printed.startswith(f"{asked['class']} ")


def test_deployment_exports_the_version_that_answers(run, tmp_path):
    source = toy_domain("ink", 80)
    with Deployment.create(run, tmp_path / "deployed", source, device="cpu") as model:
        model._use(model._store.add({**model._model.method.state(), **changed(model)}, model._references, "x").number)
        expected = model.predict(IMAGES)
        (file,) = export(tmp_path / "deployed", tmp_path / "it.pt2", to="torch")
    assert (file.images, file.origin) == (64, "ink")
    about = {"ratp.json": ""}
    found = torch.export.load(tmp_path / "it.pt2", extra_files=about).module()(IMAGES)[1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (load(run, device="cpu").predict(IMAGES) - expected).abs().max() > 0.1
    assert json.loads(about["ratp.json"])["version"] == "2"


def changed(model):
    """Other rows of the classifier than the run's."""
    name = "network.classifier.direction"
    return {name: -model._model.method.state()[name]}


class TestRefused:
    def test_predictions_that_depend_on_the_batch(self, tmp_path):
        folder = trained(tmp_path / "run", "tent")
        result = ratp("export", folder, "--out", tmp_path / "it.onnx")
        assert_error(
            result, "tent cannot be exported", "which images come together", "eval_bn=running", out=tmp_path / "it.onnx"
        )

    def test_running_statistics_instead(self, tmp_path):
        folder = trained(tmp_path / "run", "tent", eval_bn="running")
        assert export(folder, tmp_path / "it.pt2", to="torch")[0].difference < 1e-3

    def test_a_file_that_predicts_otherwise_is_not_written(self, run, tmp_path, monkeypatch):
        out = tmp_path / "it.onnx"
        out.write_text("before")
        usual = exporting.run_onnx
        monkeypatch.setattr(exporting, "run_onnx", lambda model, images: usual(model, images) + 2e-3)
        with pytest.raises(RatpError, match=r"differ by up to 0\.002; 0\.001 is allowed\. Nothing was written"):
            export(run, out)
        assert out.read_text() == "before"
        assert list(tmp_path.iterdir()) == [out]

    def test_a_missing_library_gives_the_command(self, run, tmp_path, monkeypatch):
        usual = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else usual(name))
        result = ratp("export", run, "--out", tmp_path / "it.onnx")
        assert_error(
            result, 'needs onnxscript, which is not installed: pip install "ratp-cdsl[onnx]"', out=tmp_path / "it.onnx"
        )

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--to", "onx"), "unknown format 'onx'. Did you mean 'onnx'?"),
            (("--to", "torch", "--half"), "--half and --int8 are for ONNX"),
            (("--int8",), "int8 needs real images"),
            (("--images", "nothing"), "nothing"),
            (("--out", "no/folder/it.onnx"), "there is no folder"),
            (("--out", "-"), "cannot write -"),
        ],
    )
    def test_a_mistake_gets_an_answer(self, run, tmp_path, monkeypatch, words, message):
        monkeypatch.chdir(tmp_path)
        assert_error(ratp("export", run, *words), message)
        assert not list(tmp_path.iterdir())

    def test_random_images_are_admitted(self, run, tmp_path):
        result = ratp("export", run, "--to", "torch", "--out", tmp_path / "it.pt2")
        assert_ok(result)
        assert "random images (name real ones with --images)" in result.err

    def test_no_run(self, tmp_path):
        with pytest.raises(RatpError, match=r"config\.json"):
            export(tmp_path, to="torch")


@pytest.mark.slow
@pytest.mark.parametrize("method", each_method())
def test_every_method_exports_or_says_why_not(tmp_path, method):
    folder = tmp_path / "run"
    Run(toy_plan(method, changes={"lr": 0.05}), folder).execute()
    loaded = load(folder, device="cpu")
    if loaded.together:
        with pytest.raises(RatpError, match=f"{method} cannot be exported: its predictions depend on which images"):
            export(folder, tmp_path / "it.pt2", to="torch")
    else:
        assert export(folder, tmp_path / "it.pt2", to="torch")[0].difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["resnet18", "resnet50", "timm:vit_tiny_patch16_224"])
def test_large_networks(tmp_path, backbone):
    day, rain = (write_files(tmp_path / name, image_files(count=4, seed=k)) for k, name in enumerate(("day", "rain")))
    sizes = {**TINY, "network.width": 1, "epochs": 1, "steps": 1, "network.backbone": backbone}
    options = [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")]
    words = ("--source", day, "--targets", rain, "--method", "source-only", "--weights", "none", "--guard", "off")
    assert_ok(ratp("run", "folders", *words, "--out", tmp_path / "run", "--device", "cpu", *options))
    (found,) = export(tmp_path / "run", tmp_path / "it.onnx", images=[rain])
    assert found.difference < 1e-3
