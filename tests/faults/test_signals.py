"""Ctrl-C and SIGTERM, sent to a real process at any moment."""

from __future__ import annotations

import random
import signal
import time

import pytest
from warm import assert_same

from helpers import journal_of

DEADLINE = 60.0


def rarely(command):
    """The command, with checkpoints as often as by default."""
    return command[: command.index("--save-every")] + command[command.index("--save-every") + 2 :]


@pytest.mark.faults(18, "SIGTERM and Ctrl-C keep the step a run was at, exit with 143 and 130, and say how to go on")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_in_the_middle_of_a_stage(warm, command, untouched, number, tmp_path):
    folder = tmp_path / "run"
    process = warm.start(*rarely(command), "--out", folder)
    journal, started = folder / "journal.jsonl", time.monotonic()
    while not (journal.exists() and '"event": "epoch"' in journal.read_text()):
        assert time.monotonic() - started < DEADLINE
        time.sleep(0.002)
    process.kill(number)
    ended = process.wait()
    assert ended.code == 128 + number, ended
    assert "Interrupted. The same command goes on where it was." in ended.err and "Traceback" not in ended.err
    assert (folder / "checkpoint.safetensors").exists()
    ended = warm.run(*rarely(command), "--out", folder)
    assert ended.code == 0, ended
    assert journal_of(folder, "stage_resumed")[0]["done"] >= 3
    assert_same(untouched.folder, folder)


@pytest.mark.faults(18, "stopped at any moment, while it starts too, a run ends without a traceback and can go on")
def test_at_any_moment(warm, command, untouched, tmp_path):
    chance, folder = random.Random(4), tmp_path / "run"
    for number in (signal.SIGINT, signal.SIGTERM) * 6:
        process = warm.start(*rarely(command), "--out", folder)
        time.sleep(untouched.seconds * chance.uniform(0.0, 0.3))
        process.kill(number)
        ended = process.wait()
        assert ended.code in (128 + number, -number, 0), ended  # before anything was begun, the system ends it
        assert "Traceback" not in ended.err, ended
    ended = warm.run(*rarely(command), "--out", folder)
    assert ended.code == 0, ended
    assert_same(untouched.folder, folder)
