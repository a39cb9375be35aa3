"""Locks on files that lie there only while they are held."""

from __future__ import annotations

import errno
import threading

import pytest

from ratp._core import locks as file_lock
from ratp._core.locks import acquire, try_acquire
from ratp.training.source_cache import SourceModels


def test_lock_file_exists_while_held_and_excludes_others(tmp_path):
    path = tmp_path / "x.lock"
    with acquire(path) as lock:
        assert path.exists() and lock.keeps_out
        assert try_acquire(path) is None
    assert not path.exists()
    again = try_acquire(path)
    assert again is not None and again.keeps_out
    again.release()
    assert not path.exists()


def test_waiters_acquire_in_turn(tmp_path):
    path, inside, most = tmp_path / "x.lock", [], []

    def work():
        for _ in range(20):
            with acquire(path):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 80
    assert not path.exists()


def test_removed_file_is_not_the_lock(tmp_path, monkeypatch):
    """Whoever waited finds that the holder has removed it, and that another may hold a new one."""
    path, flock, tries = tmp_path / "x.lock", file_lock.fcntl.flock, []

    def late(handle, how):
        tries.append(handle)
        if len(tries) == 1:
            path.unlink()
        flock(handle, how)

    monkeypatch.setattr(file_lock.fcntl, "flock", late)
    with acquire(path):
        assert path.exists()
    assert len(tries) == 2


def test_missing_folder(tmp_path):
    for take in (acquire, try_acquire):
        with pytest.raises(FileNotFoundError):
            take(tmp_path / "none" / "x.lock")


def test_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", unsupported)
    with acquire(tmp_path / "x.lock") as lock:
        assert not lock.keeps_out
    assert [*tmp_path.iterdir()] == []
    models = SourceModels(tmp_path, {})
    assert models.find({}) is None and models.find({}) is None  # no one waits
    assert [*tmp_path.iterdir()] == []
