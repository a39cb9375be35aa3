"""A process that makes runs and hangs when it should end."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch

from helpers import tiny_plan
from ratp.executors import process as process_module
from ratp.executors.process import ProcessGoneError, Worker
from ratp.runs.run import Run

HANGS = "import socket, sys, time; socket.socket(fileno=int(sys.argv[1])).shutdown(2); time.sleep(600)"


@pytest.fixture
def hanging(monkeypatch):
    """Processes that answer nothing and do not end, in place of those that make runs; and how long they may."""
    started = []

    def start(*_):
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", HANGS, str(theirs.fileno())]
            started.append(subprocess.Popen(command, pass_fds=(theirs.fileno(),)))
        return started[-1], ours

    monkeypatch.setattr(process_module, "start_process", start)
    monkeypatch.setattr(process_module, "_PATIENCE", 0.2)
    monkeypatch.setattr(process_module, "_LAST_SECONDS", 0.2)
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_unresponsive_process_is_reported_and_killed(hanging, tmp_path):
    lane = Worker(torch.device("cpu"))
    with pytest.raises(ProcessGoneError, match="no longer answers"):
        list(lane.events(Run(tiny_plan("source-only"), tmp_path / "run")))
    (process,) = hanging
    assert process.poll() is not None
    lane.__enter__()
    lane.__exit__()  # nothing is left to do


def test_next_run_gets_a_new_process(hanging, tmp_path):
    lane = Worker(torch.device("cpu"))
    for name in ("first", "second"):
        with pytest.raises(ProcessGoneError):
            list(lane.events(Run(tiny_plan("source-only"), tmp_path / name)))
    assert len(hanging) == 2 and all(process.poll() is not None for process in hanging)
