"""``ratp run --after RUN --targets NEW``: everything else comes from the run, and old images may be gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers import ratp, same_tensors, tensors_of
from own_images import OPTIONS, assert_ok, config_of, image_files, run_folders, write_files

METHOD = "shot"
pytestmark = pytest.mark.filterwarnings("ignore:continues")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(("day", "rain", "fog")):
        write_files(Path(name), image_files(count=6, seed=k))
    assert_ok(run_folders("day", "rain", out="a", method=METHOD, more=["--seed", 7]))


def matrix(folder):
    return json.loads(Path(folder, "matrix.json").read_text())


def after(*more):
    return ratp("run", "--after", "a", "--targets", "fog", "--out", "b", "--device", "cpu", *more)


def test_the_run_says_everything_else():
    assert_ok(after())
    assert_ok(run_folders("day", "rain", "fog", out="whole", method=METHOD, more=["--seed", 7]))
    assert same_tensors(tensors_of(Path("b"), "weights"), tensors_of(Path("whole"), "weights"))
    for key in ("recipe", "switches", "method", "seed", "data", "guard", "changed"):
        assert config_of("b")[key] == config_of("whole")[key]
    assert matrix("b")["accuracy"][2] == matrix("whole")["accuracy"][2]
    assert "nothing to train" in assert_ok(after()).err


def test_the_plan_says_that_only_the_new_domain_is_trained_on():
    plan = assert_ok(after("--dry-run")).out
    assert "in all, only on fog" in plan
    assert "reusing a source network" not in plan


@pytest.mark.parametrize("gone", ["day", "rain"])
def test_old_images_may_be_gone(gone):
    shutil.rmtree(gone)
    result = assert_ok(after())
    assert f"note: {gone}: its images are gone" in result.err
    found = matrix("b")
    place = found["domains"].index(gone)
    assert found["accuracy"][1][place] is not None and found["accuracy"][2][place] is None
    assert all(value is not None for k, value in enumerate(found["accuracy"][2]) if k != place)
    assert found["metrics"]["TDA"]["domains"][gone] == found["accuracy"][place][place]
    assert f"{gone} is not measured after the stage of rain" in " ".join(result.out.split())
    if gone == "rain":  # what is trained does not depend on it
        write_files(Path("rain"), image_files(count=6, seed=1))
        assert_ok(ratp("run", "--after", "a", "--targets", "fog", "--out", "c", "--device", "cpu"))
        assert same_tensors(tensors_of(Path("b"), "weights"), tensors_of(Path("c"), "weights"))


def test_the_next_but_one():
    shutil.rmtree("rain")
    assert_ok(after())
    write_files(Path("snow"), image_files(count=6, seed=4, flat=True))
    assert_ok(ratp("run", "--after", "b", "--targets", "snow", "--out", "c", "--device", "cpu"))
    assert config_of("c")["order"] == ["day", "rain", "fog", "snow"]
    assert Path("c/predictions-snow.csv").exists() and not Path("c/predictions-rain.csv").exists()


def test_refused():
    for words, message in (
        (("--set", "epochs=9"), "another value of epochs"),
        (("--seed", 8), "another seed"),
    ):
        result = after(*words)
        assert result.code == 2 and message in result.err and not Path("b").exists()
    assert "needs the new domains" in ratp("run", "--after", "a", *OPTIONS).err
    assert "does not exist" in ratp("run", "--after", "a", "--targets", "mist").err
