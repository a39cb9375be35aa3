"""Messages that name what was wrong, before anything long begins."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from helpers import ratp
from own_images import OPTIONS, assert_error, assert_ok, image_files, run_folders, write_files
from ratp.cli import doctor, progress
from ratp.errors import RatpError
from ratp.networks import weights
from ratp.training.phase import Tick


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(("day", "rain")):
        write_files(Path(name), image_files(count=4, seed=k))


def run(*targets, source="day", options=OPTIONS):
    return ratp("run", "folders", "--source", source, "--targets", *targets, "--out", "a", *options)


def test_a_source_of_one_class_is_the_source_s_mistake():
    write_files(Path("one"), image_files(("north",), count=6))
    result = run("rain", source="one")
    assert_error(result, "the source 'one' has a single class (north)")
    assert "rain" not in result.err


@pytest.mark.parametrize("target", ["rian", "empty"])
def test_all_folders_are_looked_at_before_any_image_is_decoded(target):
    Path("empty").mkdir()
    result = run(target, "rain")
    assert_error(result, f"domain '{target}'")
    assert "decoding" not in result.err


def test_an_empty_folder_is_noticed_before_a_download(monkeypatch):
    def refuse(*_):
        raise RatpError("downloads")

    monkeypatch.delenv("RATP_WEIGHTS", raising=False)
    monkeypatch.setattr("ratp.runs.plan.find_weights", refuse)
    Path("empty").mkdir()
    result = run("empty", options=["--backbone", "resnet18", "--device", "cpu"])
    assert_error(result, "empty has no images")
    assert "downloads" not in result.err
    assert "downloads" in run("rain", options=["--backbone", "resnet18", "--device", "cpu"]).err


class TestAfterARun:
    @pytest.fixture(autouse=True)
    def _run(self):
        assert_ok(run_folders("day", "rain", out="a", method="source-only"))

    def test_a_missing_matrix_has_a_way_out(self):
        Path("a/matrix.json").unlink()
        assert_error(ratp("report", "a"), "a/matrix.json is missing. The command that started the run writes it again.")
        assert_ok(run_folders("day", "rain", out="a", method="source-only"))
        assert_ok(ratp("report", "a"))

    @pytest.mark.filterwarnings("ignore:named more than once")
    def test_a_file_named_twice_is_predicted_once(self):
        lines = assert_ok(ratp("predict", "a", "rain/north/0.png", "rain", "./rain/north/0.png")).out.splitlines()
        assert len(lines) == 1 + 16
        with pytest.warns(match="named more than once, read once"):
            ratp("predict", "a", "rain/north/0.png", "rain")


def test_doctor_does_not_tick_what_is_absent(monkeypatch, capsys):
    monkeypatch.setenv("RATP_DATA", ".")
    found = [finding for finding in doctor.data(thorough=False) if finding.what == "digits"]
    doctor._print(found)
    shown = capsys.readouterr().out
    assert "0 of 5 domains" in shown and "✓" not in shown


def test_a_line_without_a_loss(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    plan = SimpleNamespace(method=SimpleNamespace(name="t3a"), order=("a",))
    lines = progress._Lines(SimpleNamespace(plan=plan), Console())
    phase = SimpleNamespace(name="target", epochs=1, steps=2)
    lines.step(Tick(phase, 0, 2, 1, dict, {}, epoch_done=True), 0.5, 3.0, None)
    assert capsys.readouterr().out == "  target epoch 1/1: 3.0 steps/s, 50 % of the run\n"


def test_a_hub_s_retries_are_not_shown(monkeypatch, caplog):
    def create_model(*_, **__):
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
        raise OSError("no connection")

    library = SimpleNamespace(list_pretrained=lambda name: ["x"], create_model=create_model)
    monkeypatch.setattr(weights, "timm_library", lambda: library)
    with pytest.raises(RatpError, match="could not get timm's published weights"):
        weights._published_by_timm.__wrapped__("timm:x")
    assert not caplog.records
