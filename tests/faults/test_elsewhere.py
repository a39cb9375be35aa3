"""A run that goes on with other versions, or on another device, than it began with."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from helpers import TINY_OPTIONS, journal_of, ratp, tiny_plan, toy_domains, toy_plan
from ratp._core.environment import changes, describe_environment
from ratp._core.files import read_json, write_json
from ratp.runs.events import StageFinished
from ratp.runs.record import read_run
from ratp.runs.run import EnvironmentWarning, Run

pytestmark = pytest.mark.slow


def plan():
    return toy_plan("shot", toy_domains(ink=24, mud=20), changes={"epochs": 1, "steps": 2})


@pytest.fixture
def stopped_run(tmp_path):
    """A run stopped after its first stage, which its record says ran on a GPU with an older torch."""
    events = Run(plan(), tmp_path / "run").events()
    next(event for event in events if isinstance(event, StageFinished))
    events.close()
    path = tmp_path / "run" / "environment.json"
    about = read_json(path)
    about |= {"device": "cuda", "device_name": "NVIDIA H200", "packages": about["packages"] | {"torch": "2.0"}}
    write_json(path, about)
    return tmp_path / "run"


@pytest.mark.faults(20, "if a run continues on another machine, the journal and every report list the differences")
def test_changed_environment_is_recorded_and_reported(stopped_run, tmp_path):
    with pytest.warns(EnvironmentWarning, match=r"began in another environment: .*device cuda → cpu.*torch 2\.0 → "):
        Run(plan(), stopped_run).execute()
    (event,) = journal_of(stopped_run, "run_resumed")
    assert event["environment"]["device"] == ["cuda", "cpu"]
    assert event["environment"].keys() == {"device", "device_name", "torch"}
    assert read_json(stopped_run / "environment.json")["device"] == "cuda"  # the device it started with
    read_run(stopped_run).export(tmp_path / "result.json")
    for path in (stopped_run, tmp_path / "result.json"):
        (move,) = read_run(path).moves
        assert "device cuda → cpu" in move
    output = ratp("report", stopped_run, "--out", tmp_path / "report")
    assert "seed 2022: continued in another environment: device cuda → cpu" in " ".join(output.out.split())


def test_unchanged_environment_is_not_reported(tmp_path):
    events = Run(plan(), tmp_path / "run").events()
    next(event for event in events if isinstance(event, StageFinished))
    events.close()
    Run(plan(), tmp_path / "run").execute()
    assert "environment" not in json.dumps(journal_of(tmp_path / "run", "run_resumed"))
    assert read_run(tmp_path / "run").moves == ()


@pytest.mark.faults(20, "if a run continues on another kind of processor, ratp says so")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="there is no simpler kind")
def test_other_instructions_are_reported(tmp_path):
    events = Run(tiny_plan("source-only"), tmp_path / "run").events()
    next(event for event in events if isinstance(event, StageFinished))
    events.close()
    words = ["run", "demo", "--method", "source-only", *TINY_OPTIONS, "--device", "cpu", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-m", "ratp", *words, "--quiet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert (
        f"this run began in another environment: instructions {torch.backends.cpu.get_cpu_capability()} → DEFAULT"
        in said
    )
    assert done.stderr.count("another environment") == 1


CPU, GPU = torch.device("cpu"), {"device": "cuda", "device_name": "NVIDIA H200", "instructions": None}


@pytest.mark.faults(20, "a run that did not record its processor continues without a false alarm")
def test_older_record_lacks_the_processor():
    now = describe_environment(CPU)
    older = {name: value for name, value in now.items() if name != "instructions"} | {"device_name": "x86_64"}
    assert changes(older, now) == {}
    assert changes(older, now | GPU).keys() == {"device", "device_name"}
    assert changes(now | {"device_name": "another"}, now) == {"device_name": ["another", now["device_name"]]}
