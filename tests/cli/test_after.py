"""``ratp run --after``: the next domain, for a finished run on one's own images."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers import accuracy_of, files_of, ratp, same_tensors, tensors_of
from own_images import OPTIONS, assert_error, assert_ok, config_of, image_files, run_folders, write_files

METHOD = "shot"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(("day", "rain")):
        write_files(Path(name), image_files(count=6, seed=k))
    write_files(Path("fog"), image_files(count=6, seed=2, flat=True))
    assert_ok(run("rain", out="a"))


def run(*targets, out="b", after=None, more=(), method=METHOD):
    return run_folders(
        "day", *targets, out=out, method=method, more=[*more, *(["--after", after] if after is not None else [])]
    )


def test_the_next_domain():
    before = files_of(Path("a"))
    result = assert_ok(run("rain", "fog", after="a"))
    assert "stage 3/3 fog" in result.err and "stage 2/3" not in result.err
    assert "continued" in result.out and "Predictions: b/predictions-fog.csv" in result.err
    assert files_of(Path("a")) == before
    assert_ok(run("rain", "fog", out="whole"))
    for name in ("state", "weights"):
        assert same_tensors(tensors_of(Path("b"), name), tensors_of(Path("whole"), name))
    assert accuracy_of(Path("b")) == accuracy_of(Path("whole"))  # fog has no labels
    assert files_of(Path("b"))["predictions-fog.csv"] == files_of(Path("whole"))["predictions-fog.csv"]
    assert "nothing to train" in assert_ok(run("rain", "fog", after="a")).err
    assert_ok(ratp("report", "b", "whole", "--out", "report"))


def test_stream_can_become_a_file():
    domains = 'order = ["day", "rain", "fog"]\n[domains]\nday = "day"\nrain = "rain"\nfog = "fog"\n'
    Path("yard.toml").write_text(domains)
    assert_ok(ratp("run", "yard.toml", "--after", "a", "--out", "b", "--method", METHOD, *OPTIONS))
    assert (config_of("b")["stream"], config_of("b")["order"]) == ("yard", ["day", "rain", "fog"])


def test_folders_have_distinct_names():
    assert_ok(
        ratp("run", "folders", "--source", "day", "--targets", "rain", "fog", "-m", METHOD, *OPTIONS, "--after", "a")
    )
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-continued")


def test_in_place_the_option_is_named():
    before = files_of(Path("a"))
    result = run("rain", "fog", out="a")
    assert result.code == 2 and "only goes further" in result.err and "--after a" in result.err
    assert files_of(Path("a")) == before


class TestRefused:
    def test_several_runs(self):
        assert_error(
            run("rain", "fog", after="a", more=["--seed", 1, "--seed", 2]), "--after continues from one run", out="b"
        )

    def test_every_difference_is_reported(self):
        write_files(Path("rain"), image_files(count=7, seed=5))
        expected = ("another method: shot there, tent requested", "another seed", "the images of rain are not those")
        assert_error(run("rain", "fog", after="a", method="tent", more=["--seed", 1]), *expected, out="b")

    def test_missing_folder(self):
        assert_error(run("rain", "fog", after="nowhere"), "nowhere does not exist", out="b")

    def test_its_own_folder(self):
        result = run("rain", "fog", out="a", after="./a")
        assert result.code == 2 and "choose another with --out" in result.err

    def test_a_damaged_state(self):
        Path("a/state.safetensors").write_bytes(b"{")
        result = run("rain", "fog", after="a")
        assert result.code == 2 and "no run can continue it" in result.err and "Traceback" not in result.err
        shutil.rmtree("a")
        assert_ok(run("rain", out="a"))
        assert_ok(run("rain", "fog", after="a"))
