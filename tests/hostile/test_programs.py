"""Programs that ratp comes across and never runs: named by a study or a run, or lying in the current folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ratp as package
from helpers import ratp
from tiny_study import grid, study_file

IMPORTS = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])}
EVIL = "from pathlib import Path\nPath({mark!r}).touch()\n"


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A file that a program in the current folder creates when it is run."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("m.py").write_text(EVIL.format(mark=str(tmp_path / "run")))
    return tmp_path / "run"


@pytest.mark.faults(29, "`study status`, `study report` and `study run` do not run a program that a study names")
@pytest.mark.filterwarnings("ignore:tiny.toml names programs")
@pytest.mark.parametrize("named", ['methods = ["m.py"]', 'variant = [{ name = "v", method = "m.py" }]'])
@pytest.mark.parametrize("command", ["status", "report", "run"])
def test_programs_of_a_study(mark, command, named):
    file = study_file(Path(), grid(named), grid('methods = ["source-only"]'))
    done = ratp("study", command, file)
    assert not mark.exists()
    if command == "status":
        assert (done.code, "source-only" in done.out) == (0, True)
    elif command == "report":
        assert "no run of tiny is finished" in " ".join(done.err.split())
    else:
        assert done.code == 2
        assert "it names programs as methods: m.py. Read them" in " ".join(done.err.split())
        assert not Path("runs").exists()


@pytest.mark.parametrize(
    "named",
    ['method = ["m.py"]', 'method = "m.py"', 'backbone = "m.py:Net"', '[run.set]\nnetwork.backbone = "m.py:Net"'],
)
def test_programs_of_a_run_file(mark, named):
    Path("run.toml").write_text(f'[run]\nstream = "demo"\n{named}\n')
    done = ratp("run", "run.toml", "--dry-run")
    assert not mark.exists() and done.code == 2
    assert "names a program, m.py" in done.err and "name it on the command line" in done.err
    ratp("run", "run.toml", "--dry-run", "--method", "m.py")
    assert mark.exists() or "backbone" in named


@pytest.mark.faults(29, "with --trust-methods, `study run` runs the programs that a study names")
def test_programs_of_a_trusted_study(mark):
    done = ratp("study", "run", study_file(Path(), grid('methods = ["m.py"]')), "--trust-methods")
    assert mark.exists()
    assert "must define exactly one Method" in " ".join(done.err.split())


@pytest.mark.faults(29, "if a study's folder leads to another study file, ratp does not run its programs")
@pytest.mark.filterwarnings("ignore:tiny.toml names programs")
def test_programs_of_a_folder(mark):
    study_file(Path(), grid('methods = ["m.py"]'))
    Path("runs").mkdir()
    Path("runs/study.json").write_text(json.dumps({"schema": 1, "study": "tiny", "file": "../tiny.toml"}))
    assert ratp("study", "status", "runs").code == 0
    assert not mark.exists()


@pytest.mark.faults(29, "`report`, `predict` and `run` do not run a program that a run directory names")
@pytest.mark.parametrize("words", [["report", "run"], ["predict", "run", "x.png"], ["run", "demo", "--out", "run"]])
def test_programs_of_a_run(mark, words):
    fixture = next((Path(__file__).parents[1] / "fixtures" / "runs").rglob("config.json"))
    config = json.loads(fixture.read_text())
    Path("run").mkdir()
    for name in ("matrix.json", "journal.jsonl"):
        if (fixture.parent / name).exists():
            Path("run", name).write_bytes((fixture.parent / name).read_bytes())
    Path("run/config.json").write_text(json.dumps({**config, "method": "m.py", "method_file": "0" * 64}))
    ratp(*words)
    assert not mark.exists()


@pytest.fixture
def modules(mark):
    """Modules in the current folder that create a file, one by one, when they are imported."""
    for name in ("numpy", "ray", "torch", "typer", "signal", "h5py"):
        Path(f"{name}.py").write_text(EVIL.format(mark=str(mark.parent / f"run-{name}")))
    return lambda: sorted(mark.parent.glob("run*"))


@pytest.mark.faults(30, "`python -m ratp` does not import modules from the current folder")
def test_modules_in_the_current_folder(modules):
    done = subprocess.run([sys.executable, "-m", "ratp", "--version"], env=IMPORTS, capture_output=True, check=False)
    assert (done.returncode, modules()) == (0, [])


@pytest.mark.slow
@pytest.mark.faults(30, "workers on a Ray cluster import neither these modules nor a ratp.py from there")
def test_modules_and_workers(modules, mark):
    pytest.importorskip("ray")
    Path("ratp.py").write_text(EVIL.format(mark=str(mark)))
    file = study_file(Path(), grid('methods = ["source-only"]', "seeds = [1]"))
    words = ["study", "run", file, "--device", "cpu", "--on", "ray", "--ray-address", "local", "-q"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ratp", *words], env=IMPORTS, stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, modules()) == (0, []), done.stderr
