"""The clock on the wall may say anything: only files are dated by it."""

from __future__ import annotations

import signal

import pytest
from warm import assert_same

pytestmark = pytest.mark.slow

CENTURY = 100 * 365.25 * 86_400


@pytest.mark.faults(1, "if the clock jumps by a century, forwards and back, the run gives the same result")
def test_clock_jumps_change_nothing(warm, command, undisturbed, tmp_path):
    folder = tmp_path / "run"
    killed = warm.run(*command, "--out", folder, clock=CENTURY, within=folder, at=undisturbed.points // 2)
    assert killed.code == -signal.SIGKILL
    ended = warm.run(*command, "--out", folder, clock=-CENTURY / 3)
    assert ended.code == 0, ended
    assert "Traceback" not in ended.err
    assert_same(undisturbed.folder, folder)
