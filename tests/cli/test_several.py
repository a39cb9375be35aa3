"""Several seeds, orders or methods in one command."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import TINY, TINY_OPTIONS, files_of, journal_of, ratp, same_tensors, tensors_of
from ratp.cli import progress
from ratp.runs import plan
from ratp.runs.run import Run

OPTIONS = ["--device", "cpu", *TINY_OPTIONS]
BOTH = ["--method", "ratp", "--method", "source-only"]
IN_TURN = ["--jobs", "1"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


class TestRun:
    @pytest.mark.slow
    def test_seeds_and_methods_at_once(self):
        """Each where and what it would be alone; compared at the end."""
        result = ratp("run", *OPTIONS, *BOTH, "--seed", 1, "--seed", 2, "--jobs", 2)
        assert (result.code, len(os.listdir("runs"))) == (0, 4)
        assert "Comparison" in result.out
        assert "2 seeds" in result.out
        assert result.err.splitlines()[-1].startswith("Next: ratp report runs/demo-ratp-1-")
        before = {name: files_of(Path("runs") / name) for name in os.listdir("runs")}
        for method in ("ratp", "source-only"):
            again = ratp("run", *OPTIONS, "--method", method, "--seed", 2)
            assert "is complete already" in again.err
        assert {name: files_of(Path("runs") / name) for name in os.listdir("runs")} == before
        assert ratp("run", *OPTIONS, "--seed", 2, "--out", "alone", "--quiet").code == 0
        (beside,) = Path("runs").glob("demo-ratp-2-*")
        assert same_tensors(tensors_of(beside), tensors_of(Path("alone")))

    @pytest.mark.parametrize("seeds", [["--seed", 1], ["--seed", 1, "--seed", 2]])
    def test_runs_are_labelled_by_differences_from_defaults(self, seeds):
        words = ["run", *OPTIONS, "-m", "source-only", *IN_TURN]
        assert ratp(*words, "--seed", 1, "--seed", 2, "-q").code == 0
        for path in Path("runs").glob("*/config.json"):
            config = json.loads(path.read_text())
            path.write_text(json.dumps({**config, "changed": {"sgd.momentum": 0.125}}))
        result = ratp(*words, *seeds)
        assert "complete already" in result.err
        assert "momentum" not in result.out and "source-only (network.width=" in result.out

    def test_orders(self):
        result = ratp("run", *OPTIONS, "-m", "source-only", "--order", "default", "--order", "reverse", *IN_TURN)
        assert (result.code, len(os.listdir("runs"))) == (0, 2)
        assert "source-only scan>photo>font>street stage 1/4 scan" in result.err
        assert "source-only street>font>photo>scan stage 1/4 street" in result.err

    def test_one_folder_for_all_runs(self):
        result = ratp("run", *OPTIONS, "-m", "source-only", "--seed", 1, "--seed", 2, "--out", "my runs", *IN_TURN)
        assert result.code == 0
        assert sorted(name.rpartition("-")[0] for name in os.listdir("my runs")) == [
            "demo-source-only-1",
            "demo-source-only-2",
        ]
        assert "Next: ratp report 'my runs'" in result.err
        assert os.listdir() == ["my runs"]
        assert ratp("report", "my runs", "--out", "report", "-q").code == 0

    def test_quiet_json_prints_only_json(self):
        words = ["run", *OPTIONS, "-m", "source-only", "--seed", 1, "--seed", 2, *IN_TURN]
        quiet = ratp(*words, "--quiet")
        assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
        result = ratp(*words, "--json")
        assert (result.code, result.err) == (0, "")
        data = json.loads(result.out)
        assert [run["config"]["seed"] for run in data["runs"]] == [1, 2]
        assert data["failed"] == []

    def test_failed_run_is_reported_last(self):
        words = ["run", *OPTIONS, "-m", "source-only", "--seed", 1, "--seed", 2, *IN_TURN, "--out", "out"]
        assert ratp(*words, "-q").code == 0
        (folder,) = Path("out").glob("*-1-*")
        (folder / "config.json").write_text("{}")
        result = ratp(*words)
        assert result.code == 2
        assert "source-only" in result.out
        assert result.err.splitlines()[-1].startswith(
            f"error: {folder}: {folder} holds a config.json that ratp did not"
        )
        assert f"Next: ratp report out/{next(Path('out').glob('*-2-*')).name}" in result.err
        (failed,) = json.loads(ratp(*words, "--json").out)["failed"]
        assert failed["folder"] == str(folder)
        assert ratp(*words, "--quiet").err.startswith("error: ")

    def test_all_runs_fail(self):
        words = ["run", *OPTIONS, "-m", "source-only", "--seed", 1, "--seed", 2, *IN_TURN, "--set", "lr=1e30"]
        result = ratp(*words)
        assert (result.code, result.out) == (2, "")
        assert result.err.count("A smaller learning rate") == 2
        assert "Traceback" not in result.err

    def test_half_finished_set_is_resumed(self, monkeypatch):
        words = ["run", *OPTIONS, *BOTH, "--seed", 1, "--seed", 2, *IN_TURN, "--no-reuse-source"]
        real, count = Run.events, []

        def interrupted(self):
            for event in real(self):
                yield event
                count.append(event)
                if len(count) == 20:
                    raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Run, "events", interrupted)
            result = ratp(*words)
        assert result.code == 130
        assert "same command" in result.err
        assert "Traceback" not in result.err
        assert len(os.listdir("runs")) == 1
        assert ratp(*words, "-q").code == 0
        (first,) = Path("runs").glob("demo-ratp-1-*")
        assert len(journal_of(first, "run_resumed")) == 1
        assert len(list(Path("runs").glob("*/weights.safetensors"))) == 4


class TestMistakes:
    def test_all_mistakes_are_reported_before_start(self):
        words = ["--seed", "one", "--seed", "two", "--order", "sideways", "--order", "default", "--jobs", "many"]
        result = ratp("run", *words, "--method", "ratb", "--method", "ratp", "--set", "epochs", "--device", "abacus")
        assert result.code == 2
        for part in ("'one'", "'two'", "'sideways'", "'ratb'", "--set takes", "--jobs takes auto", "'abacus'"):
            assert result.err.count(part) == 1, part
        assert all(line.startswith("error: ") for line in result.err.splitlines())
        assert os.listdir() == []

    def test_switch_unknown_to_one_method(self):
        result = ratp("run", *OPTIONS, *BOTH, "--set", "pca.scale=8")
        assert result.code == 2
        assert result.err.startswith("error: source-only: unknown switch 'pca.scale'")
        assert len(result.err.splitlines()) == 1

    @pytest.mark.parametrize("again", [["--seed", "1"], ["--seed", "01"]])
    def test_the_same_run_twice(self, again):
        result = ratp("run", *OPTIONS, "--seed", "1", *again)
        assert result.code == 2
        assert "the same run is requested twice" in result.err
        assert os.listdir() == []

    @pytest.mark.parametrize("jobs", ["0", "-1", "two", "1.5", "", "²"])
    @pytest.mark.parametrize("command", ["run", "demo"])
    def test_jobs(self, jobs, command):
        result = ratp(command, f"--jobs={jobs}")
        assert result.code == 2
        assert result.err.startswith("error: --jobs takes auto or a number of runs, 1 or more, got ")
        assert os.listdir() == []

    def test_missing_images(self):
        result = ratp("run", "pacs", "--data", "nowhere", "--seed", 1, "--seed", 2, "--weights", "none")
        assert result.code == 2
        assert len(result.err.splitlines()) == len(set(result.err.splitlines()))
        assert os.listdir() == []


class TestDemo:
    @pytest.fixture(autouse=True)
    def _tiny(self, monkeypatch):
        real = plan.resolve
        monkeypatch.setattr(plan, "resolve", lambda request: real(replace(request, changes=TINY)))

    def test_several_seeds(self):
        result = ratp("demo", "--out", "out", "--seed", 1, "--seed", 2, "--device", "cpu", *IN_TURN)
        assert result.code == 0
        assert sorted(os.listdir("out")) == ["ratp-1", "ratp-2", "report", "source-only-1", "source-only-2"]
        assert "2 seeds" in result.out
        assert "ratp 2 stage 1/4 scan" in result.err

    @pytest.mark.slow
    def test_one_seed_is_unchanged(self, monkeypatch):
        monkeypatch.setattr(progress, "follow_all", None)
        assert ratp("demo", "--out", "out", "--device", "cpu", "--quiet").code == 0

    @pytest.mark.slow
    def test_foreign_folder(self):
        Path("out/ratp-1").mkdir(parents=True)
        Path("out/ratp-1/mine.txt").write_text("mine")
        result = ratp("demo", "--out", "out", "--seed", 1, "--seed", 2, "--device", "cpu", *IN_TURN)
        assert result.code == 2
        assert "error: out/ratp-1: " in result.err
        assert Path("out/report/index.html").exists()
