"""Options for common switches, files of options, the list of switches, completion, and the plan before the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import TINY_OPTIONS, ratp
from own_images import OPTIONS, assert_error, assert_ok, config_of, image_files, write_files
from ratp.cli.runs import PRESETS
from ratp.methods import METHODS
from ratp.runs import DEFAULT_PRESET, QUICK


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folders():
    for k, name in enumerate(("day", "rain")):
        write_files(Path("pictures", name), image_files(count=4, seed=k))
    return ["folders", "--source", "pictures/day", "--targets", "pictures/rain", *OPTIONS]


SMALL = ["--epochs", 1, "--steps", 2, "--batch", 8, "--memory", 8, "--set", "network.width=0.05", "--device", "cpu"]


class TestShorthands:
    def test_they_are_switches(self):
        assert_ok(ratp("run", "demo", "-m", "source-only", *SMALL, "--lr", 0.25, "--out", "a"))
        recipe = config_of("a")["recipe"]
        assert [recipe[name] for name in ("epochs", "steps", "batch", "memory", "lr")] == [1, 2, 8, 8, 0.25]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--epochs", "many"], "epochs must be a whole number"),
            (["--backbone", "resnet19"], "Did you mean 'resnet18'"),
            (["--epochs", 2, "--set", "epochs=3"], "--epochs 2 and --set epochs=3 set the same"),
            (["--set", "width=2"], "Did you mean 'network.width'"),
            (["--set", "epoch=2"], "Did you mean 'epochs'"),
        ],
    )
    def test_mistakes(self, words, message):
        assert_error(ratp("run", "demo", *words), message)


class TestRunFiles:
    def test_the_file_runs_the_same(self, folders):
        words = ["run", *folders, "-m", "source-only", "--seed", 3, "--out", "a"]
        assert_ok(ratp(*words, "--save-config", "run.toml"))
        assert not Path("a").exists()
        assert_ok(ratp(*words))
        Path("elsewhere").mkdir()
        assert_ok(ratp("run", "run.toml", "--out", "b"))
        assert config_of("a")["fingerprint"] == config_of("b")["fingerprint"]
        assert_ok(ratp("run", "run.toml", "--out", "c", "--seed", 4))  # the command line comes first
        assert config_of("c")["seed"] == 4

    def test_paths_are_relative_to_the_file(self, folders, monkeypatch):
        assert_ok(ratp("run", *folders, "-m", "source-only", "--out", "a", "--save-config", "run.toml"))
        Path("elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        assert_ok(ratp("run", "../run.toml"))
        assert Path("../a/weights.safetensors").exists()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[run]\nstream = 'demo'\nepoch = 2\n", "Did you mean 'epochs'"),
            ("[run]\nstream = 'demo'\n[domains]\na = 'b'\n", "so it cannot have domains"),
            ("[[grid]]\nstream = 'demo'\n", "ratp study run x.toml"),
            ("run = 3\n", "[run] must be a table"),
            ("[run]\nseed = {a = 1}\n", "seed must be a value"),
            ("order = ['a', 'b']\n", "[domains] must name at least two"),
        ],
    )
    def test_mistakes(self, text, message):
        Path("x.toml").write_text(text)
        assert_error(ratp("run", "x.toml"), message)

    def test_ending(self):
        assert_error(ratp("run", "demo", "--save-config", "x.json"), "ends in .toml")


class TestPlan:
    def test_dry_run_writes_nothing(self, folders):
        before = sorted(Path().rglob("*"))
        result = assert_ok(ratp("run", *folders, "--dry-run", "--out", "a"))
        for words in ("day: 12 images to train, 4 to test", "rain: 16 images", "4: east, north", "dtn", "cpu", "time"):
            assert words in result.out, words
        assert sorted(Path().rglob("*")) == before

    def test_as_json(self, folders):
        plan = json.loads(assert_ok(ratp("run", *folders, "--dry-run", "--json", "--out", "a")).out)
        assert [domain["name"] for domain in plan["domains"]] == ["day", "rain"]
        assert plan["steps"] == 8 and plan["seconds"] > 0 and plan["memory_bytes"] > 0
        assert plan["network"]["parameters"] > 0 and not Path("a").exists()

    def test_estimating_changes_no_result(self, folders):
        assert_ok(ratp("run", *folders, "-m", "shot", "--out", "a"))
        ratp("run", *folders, "-m", "shot", "--out", "b", "--dry-run")
        assert_ok(ratp("run", *folders, "-m", "shot", "--out", "b", "--quiet"))
        read = [Path(name, "weights.safetensors").read_bytes() for name in "ab"]
        assert read[0] == read[1]

    def test_a_long_run_on_a_cpu_says_what_is_quicker(self, folders):
        words = ["epochs=9000000" if word == "epochs=2" else word for word in folders]
        result = assert_ok(ratp("run", *words, "--dry-run"))
        assert "--preset quick" in result.out and " h " in result.out


def test_quick_preset(folders):
    words = [word for word in folders if not str(word).startswith(("epochs", "steps"))]
    words = [word for k, word in enumerate(words) if word != "--set" or "=" in str(words[k + 1])]
    assert_ok(ratp("run", *words, "--preset", "quick", "-m", "source-only", "--out", "a"))
    config = config_of("a")
    assert config["preset"] == "quick" and config["recipe"]["epochs"] == 4 and config["recipe"]["steps"] == 10


def test_switches():
    listed = json.loads(assert_ok(ratp("switches", "folders", "tent", "--json")).out)["switches"]
    names = {row["name"] for row in listed}
    assert {"epochs", "network.backbone", "sgd.momentum"} <= names and len(names) == len(listed)
    text = assert_ok(ratp("switches")).out
    assert "pca.scale" in text and "network.frozen" in text and "--backbone" in text
    assert_error(ratp("switches", "demo", "tend"), "Did you mean 'tent'")
    one = assert_ok(ratp("switches", "demo", "tent", "rate")).out
    assert "step.rate" in one and "hold_out" not in one
    assert_error(ratp("switches", "demo", "tent", "hold_uot"), "unknown switch 'hold_uot'. Did you mean 'hold_out'")


def test_completion(monkeypatch):
    assert set(PRESETS) == {DEFAULT_PRESET, QUICK, *(name for method in METHODS.values() for name in method.presets)}
    monkeypatch.setenv("_RATP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "ratp run -m so")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert "source-only" in ratp().out


def test_a_device_by_its_other_name():
    assert_error(ratp("run", "demo", *TINY_OPTIONS, "--device", "gpu"), "Did you mean 'cuda'")
