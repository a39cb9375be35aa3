"""A run loaded from Python: what it offers, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ratp
from helpers import same_tensors, tensors_of, toy_domain, toy_domains, toy_plan
from ratp.data.read.paths import decode_part, list_images
from ratp.errors import RatpError

KEPT = Path(__file__).parents[1] / "fixtures" / "runs"
IMAGES = toy_domain("sand", 20).images


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for method in ("ratp", "tent"):
        ratp.Run(toy_plan(method, toy_domains(ink=40, mud=32)), folder / method).execute()
    return folder


class TestLoad:
    @pytest.mark.parametrize("method", ["ratp", "tent"])
    def test_loads_the_method_of_the_run(self, runs, method):
        plan = toy_plan(method, toy_domains(ink=40, mud=32))
        run = ratp.Run(plan, runs / method)
        run.execute()
        found = ratp.load(runs / method, device="cpu")
        assert same_tensors(found.method.state(), tensors_of(runs / method))
        assert torch.equal(found.predict(IMAGES), run.method.predict(IMAGES))
        assert (found.classes, found.image_size, found.stages) == (run.stream.classes, (32, 32), ("ink", "mud"))
        assert found.together == (method == "tent")
        assert found.config["method"] == method

    def test_predicting_changes_nothing(self, runs):
        found = ratp.load(str(runs / "tent"))
        first = found.predict(IMAGES)
        assert torch.equal(found.predict(IMAGES), first)
        assert same_tensors(found.method.state(), tensors_of(runs / "tent"))

    @pytest.mark.parametrize("form", ["unversioned", "versioned"])
    def test_loads_runs_of_earlier_versions(self, form):
        found = ratp.load(KEPT / form / "finished", device="cpu")
        height, width = found.image_size
        logits = found.predict(torch.zeros((2, 3, height, width), dtype=torch.uint8))
        assert logits.shape == (2, len(found.classes))

    def test_unfinished_run_warns(self):
        with pytest.warns(RuntimeWarning, match="is unfinished: using its method after"):
            ratp.load(KEPT / "versioned" / "between-stages", device="cpu")

    def test_predict_files_from_python(self, runs, tmp_path):
        Image.fromarray(np.zeros((40, 20, 3), np.uint8)).save(tmp_path / "a.png")
        (tmp_path / "b.png").write_bytes(b"")
        reported = []
        found = ratp.load(runs / "ratp").predict_files(
            tmp_path, on_bad="skip", progress=lambda *at: reported.append(at)
        )
        ((file, label, share),) = found
        assert found[0] == found.predictions[0]
        assert (file, [name for name, _ in found.left_out]) == (str(tmp_path / "a.png"), [str(tmp_path / "b.png")])
        assert label in ratp.load(runs / "ratp").classes
        assert 0 < share <= 1
        assert reported[-1] == (2, 2)

    def test_unknown_bad_image_option(self, runs, tmp_path):
        with pytest.raises(ratp.ConfigError, match="skip"):
            ratp.load(runs / "ratp").predict_files([tmp_path], on_bad="mend")


def test_no_room_for_decoded_images(tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ratp.data.decode.worker.write_at", full)
    with pytest.raises(RatpError, match=r"No space left on device\. Set TMPDIR"):
        decode_part(list_images([tmp_path]), 0, 1, (8, 8))


class TestWrongImages:
    """Each was predicted before, and wrongly, or ended in an error of torch."""

    @pytest.mark.parametrize(
        ("images", "expected"),
        [
            (IMAGES / 255, r"got torch\.float32 of shape \(20, 3, 32, 32\)\. From values of 0 to 1: \(255"),
            (IMAGES.long(), r"got torch\.int64 of shape"),
            (IMAGES[:, :1], r"got torch\.uint8 of shape \(20, 1, 32, 32\)\. Grey: images\.expand"),
            (IMAGES.permute(0, 2, 3, 1), r"of shape \(20, 32, 32, 3\)\.$"),
            (IMAGES[0], r"of shape \(3, 32, 32\)\.$"),
            (IMAGES[:, :, :16], r"of shape \(20, 3, 16, 32\)\. Resize them first\.$"),
            (IMAGES.numpy(), r"got ndarray\.$"),
        ],
        ids=["floats", "long", "grey", "channels last", "one image", "size", "array"],
    )
    @pytest.mark.parametrize("method", ["ratp", "tent"])
    def test_wrong_images_are_refused(self, runs, method, images, expected):
        run = ratp.load(runs / method)
        calls = [run.method.predict, run.method.embed]
        for ask in calls + ([run.method.observe] if method == "tent" else []):
            with pytest.raises(RatpError, match=rf"must be a uint8 tensor of shape \(N, 3, 32, 32\), .*{expected}"):
                ask(images)

    def test_advice_works(self, runs):
        run = ratp.load(runs / "ratp")
        scores = run.method.predict(IMAGES)
        assert torch.equal(run.method.predict((255 * (IMAGES / 255)).round().to(torch.uint8)), scores)
        assert run.method.predict(IMAGES[:, :1].expand(-1, 3, -1, -1)).shape == (20, 4)

    def test_a_run_converts_images(self, runs):
        run = ratp.load(runs / "ratp")
        scores = run.predict(IMAGES)
        for images in (IMAGES / 255, IMAGES.permute(0, 2, 3, 1).numpy(), list(IMAGES), [(i, 0) for i in IMAGES]):
            assert torch.equal(run.predict(images), scores)
        assert run.predict(IMAGES[:, :1, :16]).shape == (20, 4)
        with pytest.raises(RatpError, match=r"images must be uint8 or floats of 0 to 1, got torch.int64"):
            run.predict(IMAGES.long())
