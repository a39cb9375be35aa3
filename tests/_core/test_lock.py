"""One writer a run directory, among processes and within one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from helpers import files_of, toy_plan
from ratp._core.locks import LOCK_FILE, exclusive
from ratp.errors import RunDirectoryError
from ratp.runs.run import Run

HOLDER = """
import sys, time
from pathlib import Path
from ratp._core.locks import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder until it is asked or forced to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.faults(17, "a second process cannot use the folder until the first one ends")
def test_other_process_is_excluded_until_holder_dies(holder, tmp_path):
    before = files_of(tmp_path)
    with pytest.raises(RunDirectoryError, match=rf"in use by process {holder.pid} on .* since \d{{4}}-.*--out"):
        Run(toy_plan("source-only"), tmp_path).execute()
    assert files_of(tmp_path) == before == {}

    holder.kill()
    assert holder.wait() == -signal.SIGKILL
    Run(toy_plan("source-only"), tmp_path).execute()
    assert (tmp_path / "weights.safetensors").exists()


def test_second_run_in_same_process_is_excluded(tmp_path):
    first = Run(toy_plan("source-only"), tmp_path).events()
    next(first)
    before = files_of(tmp_path)
    with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
        list(Run(toy_plan("source-only"), tmp_path).events())
    assert files_of(tmp_path) == before
    first.close()
    Run(toy_plan("source-only"), tmp_path).execute()


def test_lock_file_names_holder_and_is_emptied_on_release(tmp_path):
    with exclusive(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert (tmp_path / LOCK_FILE).read_text() == ""


def test_lock_is_released_on_error(tmp_path):
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path):
        raise ZeroDivisionError
    assert (tmp_path / LOCK_FILE).read_text() == ""  # it was not killed
    with exclusive(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", "5", '{"pid": 1}'])
def test_unreadable_holder_info_still_holds(content, tmp_path):
    with exclusive(tmp_path):
        (tmp_path / LOCK_FILE).write_text(content)
        with pytest.raises(RunDirectoryError, match="in use by another process"), exclusive(tmp_path):
            pass


@pytest.mark.parametrize("content", ["", "not json", '{"pid": 1, "host": "elsewhere", "since": "long ago"}'])
def test_leftover_file_does_not_block(content, tmp_path):
    (tmp_path / LOCK_FILE).write_text(content)
    with exclusive(tmp_path):
        pass


def test_non_folder_is_named(tmp_path):
    with (
        pytest.raises(RunDirectoryError, match=r"nowhere: No such file or directory.*--out"),
        exclusive(tmp_path / "nowhere"),
    ):
        pass


def test_unopenable_lock_is_named(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(RunDirectoryError, match=r"cannot write to .*: Is a directory"), exclusive(tmp_path):
        pass
