"""Ctrl-C and SIGTERM, sent to a real process at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm import assert_same

from helpers import journal_of

pytestmark = pytest.mark.slow

DEADLINE = 60.0
WAYS = {
    "module": ["-m", "ratp"],
    "script": ["-c", "from ratp.__main__ import main; main()"],
}


def rarely(command):
    """The command, with checkpoints as often as by default."""
    return command[: command.index("--save-every")] + command[command.index("--save-every") + 2 :]


@pytest.mark.faults(18, "after SIGTERM or Ctrl-C, the run saves the current step and says how to continue")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_the_middle_of_a_stage(warm, command, undisturbed, number, tmp_path):
    folder = tmp_path / "run"
    process = warm.start(*rarely(command), "--out", folder)
    journal, started = folder / "journal.jsonl", time.monotonic()
    while not (journal.exists() and '"event": "epoch"' in journal.read_text()):
        assert time.monotonic() - started < DEADLINE
        time.sleep(0.002)
    process.kill(number)
    ended = process.wait()
    assert ended.code == 128 + number, ended
    assert "Interrupted. The same command continues from there." in ended.err and "Traceback" not in ended.err
    assert (folder / "checkpoint.safetensors").exists()
    ended = warm.run(*rarely(command), "--out", folder)
    assert ended.code == 0, ended
    assert journal_of(folder, "stage_resumed")[0]["done"] >= 3
    assert_same(undisturbed.folder, folder)


@pytest.mark.faults(18, "a run that is stopped at any moment prints no traceback and can continue")
def test_stopped_at_any_moment(warm, command, undisturbed, tmp_path):
    chance, folder = random.Random(4), tmp_path / "run"
    for number in (signal.SIGINT, signal.SIGTERM) * 6:
        process = warm.start(*rarely(command), "--out", folder)
        time.sleep(undisturbed.seconds * chance.uniform(0.0, 0.3))
        process.kill(number)
        ended = process.wait()
        assert ended.code in (128 + number, -number, 0), ended  # before it started, the system ends it
        assert "Traceback" not in ended.err, ended
    ended = warm.run(*rarely(command), "--out", folder)
    assert ended.code == 0, ended
    assert_same(undisturbed.folder, folder)


@pytest.mark.faults(18, "SIGTERM to all processes, as systemd and Slurm send it, stops every run after a step")
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_sigterm_to_the_process_group(devices, command, tmp_path):
    """One by one in processes of their own, and in those of two devices."""
    changed = {"epochs=4": "epochs=100000", "cpu": devices}
    words = [changed.get(word, word) for word in map(str, rarely(command))]
    words += ["--seed", "1", "--seed", "2", "--jobs", "2" if devices == "cpu" else "1", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, *WAYS["module"], *words], env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    started = time.monotonic()
    try:
        while sum('"event": "epoch"' in journal.read_text() for journal in tmp_path.glob("*/journal.jsonl")) < 2:
            assert process.poll() is None and time.monotonic() - started < DEADLINE
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        output = process.communicate(timeout=DEADLINE)[1].decode()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, output
    assert output.endswith("Interrupted. The same command continues from there.\n") and "Traceback" not in output
    assert len(list(tmp_path.glob("*/checkpoint.safetensors"))) == 2


def wait_for(process, library):
    """Waits until a process starts to load a library: Python itself is running by then."""
    maps, started = Path(f"/proc/{process.pid}/maps"), time.monotonic()
    while library not in maps.read_text():
        assert process.poll() is None and time.monotonic() - started < DEADLINE
        time.sleep(0.002)


@pytest.mark.faults(18, "a process that is stopped while it imports ratp ends at once without a traceback")
@pytest.mark.parametrize("way", WAYS)
def test_stopped_while_importing(way, command, tmp_path):
    """Real processes, from the first of torch's libraries on to what comes after all imports."""
    chance, moments = random.Random(way), []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for number, most in ((signal.SIGINT, 0.1), (signal.SIGTERM, 1.0), (signal.SIGINT, 1.5), (signal.SIGINT, 4.0)):
        words = [sys.executable, *WAYS[way], *map(str, command), "--out", str(tmp_path / "run")]
        with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
            wait_for(process, "torch")
            time.sleep(chance.uniform(0.0, most))
            process.send_signal(number)
            output = process.stderr.read()
        moments.append((process.returncode, output))
        assert process.returncode in (-number, 128 + number, 0), moments
        assert "Traceback" not in output and "KeyboardInterrupt" not in output, moments
    assert moments[0] in ((-signal.SIGINT, ""), (128 + signal.SIGINT, "")), moments


def test_background_process_ignores_ctrl_c():
    """Shells have it ignore Ctrl-C."""
    words = [sys.executable, *WAYS["module"], "methods", "show", "ratp"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ignoring = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv({words[0]!r}, {words!r})"
    with subprocess.Popen([sys.executable, "-c", ignoring], env=environment, stdout=subprocess.PIPE) as process:
        wait_for(process, "torch")
        process.send_signal(signal.SIGINT)
        assert b"RandMix" in process.stdout.read()
    assert process.returncode == 0
