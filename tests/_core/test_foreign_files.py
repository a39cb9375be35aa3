"""Lock files, pipes and permissions in folders that somebody else made; and what is on the disk when power fails."""

from __future__ import annotations

import os
import re
import stat

import pytest

from helpers import toy_plan
from ratp._core import files
from ratp._core.files import make_folder, read_about, read_bytes, read_tensors, sha256_of, write_json
from ratp._core.locks import LOCK_FILE, acquire, exclusive, is_held, is_locked
from ratp._core.toml import read_toml
from ratp.errors import RatpError
from ratp.networks.torch_checkpoint import import_checkpoint
from ratp.networks.weights import find_weights
from ratp.runs.run import Run
from ratp.studies.sources import _mark

MINE = b"my own words"


@pytest.mark.faults(22, "ratp neither follows a link called .lock nor changes what it leads to")
@pytest.mark.parametrize("make", ["symlink_to", "hardlink_to"])
def test_linked_lock_is_refused(make, tmp_path):
    mine, folder = tmp_path / "mine", tmp_path / "run"
    mine.write_bytes(MINE)
    folder.mkdir()
    getattr(folder / LOCK_FILE, make)(mine)
    with pytest.raises(RatpError, match=r"its \.lock is a link, a pipe or a device.*--out"), exclusive(folder):
        pass
    with pytest.raises(OSError, match="is a link"):
        acquire(folder / LOCK_FILE)
    assert not is_held(folder)
    assert mine.read_bytes() == MINE


@pytest.mark.faults(22, "ratp creates no file through a link called .lock")
def test_lock_linked_to_nothing_is_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / LOCK_FILE).symlink_to(tmp_path / "nothing")
    with pytest.raises(RatpError, match="is a link"), exclusive(folder):
        pass
    assert not (tmp_path / "nothing").exists()


@pytest.mark.faults(22, "ratp does not wait for a pipe called .lock")
def test_pipe_as_lock(tmp_path):
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(RatpError, match="a pipe or a device"), exclusive(tmp_path):
        pass
    assert not is_locked(tmp_path / LOCK_FILE)


@pytest.mark.faults(22, "ratp locks a file called .lock that holds something else, and keeps its contents")
@pytest.mark.parametrize("content", [MINE, b'{"pid": ' + b" " * 5000])
def test_contents_of_another_kind_are_kept(content, tmp_path):
    (tmp_path / LOCK_FILE).write_bytes(content)
    with exclusive(tmp_path), pytest.raises(RatpError, match="in use by"), exclusive(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).read_bytes() == content


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    return tmp_path / "pipe.safetensors"


READERS = {
    "text": read_bytes,
    "tensors": read_tensors,
    "metadata": read_about,
    "weights": lambda path: find_weights(str(path), "small"),
    "checkpoint": lambda path: import_checkpoint(path, path.with_name("new.safetensors")),
    "study": lambda path: read_toml(path, "study"),
}


@pytest.mark.faults(23, "ratp refuses a pipe in place of any file that it reads, and does not wait for it")
@pytest.mark.parametrize("reader", READERS)
def test_pipe_is_refused(reader, pipe):
    with pytest.raises(RatpError, match=r"pipe\.safetensors.* is a pipe or a device"):
        READERS[reader](pipe)


def test_pipe_has_no_hash(pipe):
    with pytest.raises(OSError, match="a pipe or a device"):
        sha256_of(pipe)
    assert _mark(pipe) == ""


@pytest.mark.faults(23, "a run with a pipe in place of a state, matrix or journal stops and names it")
@pytest.mark.parametrize("name", ["state.safetensors", "config.json", "journal.jsonl"])
def test_run_with_a_pipe(name, tmp_path):
    events = Run(toy_plan("source-only"), tmp_path).events()
    next(events)
    events.close()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(RatpError, match=rf"{re.escape(name)}: it (is a pipe or a device|exists and is not a file)"):
        Run(toy_plan("source-only"), tmp_path).execute()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        write_json(tmp_path / "file", {})
        with exclusive(tmp_path):
            pass
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}


@pytest.fixture
def synced(monkeypatch):
    """The paths that are written through to the disk, in order."""
    paths, usual = [], os.fsync

    def noted(handle):
        paths.append(os.readlink(f"/proc/self/fd/{handle}"))
        usual(handle)

    monkeypatch.setattr(files.os, "fsync", noted)
    return paths


@pytest.mark.faults(24, "new folders are on the disk, and so is the journal at the end of a stage and of the run")
def test_folders_and_journal_reach_the_disk(synced, tmp_path):
    plan = toy_plan("source-only")
    Run(plan, tmp_path / "a" / "b").execute()
    assert synced[:2] == [str(tmp_path / "a"), str(tmp_path)]
    assert synced.count(str(tmp_path / "a" / "b" / "journal.jsonl")) == len(plan.order) + 1


def test_present_folder_is_left_alone(synced, tmp_path):
    make_folder(tmp_path)
    assert synced == []
