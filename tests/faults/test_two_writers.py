"""Two processes that want one directory."""

from __future__ import annotations

import platform
import re
import signal
import time

import pytest
from warm import assert_same

from ratp._core.locks import LOCK_FILE

pytestmark = pytest.mark.slow


@pytest.mark.faults(17, "the second process says which process uses the folder, and a killed one blocks nothing")
def test_second_process_learns_who_holds_the_folder(warm, command, undisturbed, tmp_path):
    folder = tmp_path / "run"
    long = [{"epochs=4": "epochs=400"}.get(word, word) for word in command]
    first = warm.start(*long, "--out", folder)
    started = time.monotonic()
    while not (folder / "checkpoint.safetensors").exists():
        assert time.monotonic() - started < 60
        time.sleep(0.01)
    second = warm.run(*long, "--quiet", "--out", folder)
    first.kill(signal.SIGKILL)
    first.wait()
    assert second.code == 2
    holder = rf"process {first.pid} on {re.escape(platform.node())} since \d{{4}}-\d\d-\d\d"
    assert re.search(rf"^error: .*run is in use by {holder}.*--out", second.err), second
    assert str(first.pid) in (folder / LOCK_FILE).read_text()  # left behind, and no hindrance
    other = warm.run(*command, "--quiet", "--out", folder)
    assert other.code == 2 and "epochs: 400 there, 4 requested" in other.err
    for item in folder.iterdir():
        if item.name != LOCK_FILE:
            item.unlink()
    assert warm.run(*command, "--out", folder).code == 0
    assert_same(undisturbed.folder, folder)
