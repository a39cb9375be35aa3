"""A full, too small or missing disk gives a one-line error, loses nothing, and the same command resumes."""

from __future__ import annotations

import os
import random
import subprocess

import pytest
from warm import assert_same

pytestmark = pytest.mark.slow

WORDS = {"ENOSPC": "No space left on device", "EROFS": "Read-only file system", "EIO": "Input/output error"}


def assert_told(ended, folder, words):
    """It ended with one line that names the place and the reason."""
    assert ended.code == 2, ended
    (line,) = [line for line in ended.err.splitlines() if not line.startswith("note: ")]
    assert line.startswith("error: cannot ")
    assert str(folder) in line and words in line


@pytest.mark.faults(3, "if the folder becomes read-only or fails, the run stops and names the path and the reason")
@pytest.mark.faults(4, "if the disk is full, the run stops, and with space it continues to the same result")
@pytest.mark.parametrize("kind", WORDS)
def test_disk_failing_at_random_points(warm, command, undisturbed, kind, tmp_path):
    chance, folder = random.Random(kind), tmp_path / "run"
    for _ in range(5):
        at = chance.randint(1, undisturbed.points // 5)
        ended = warm.run(*command, "--quiet", "--out", folder, within=folder, at=at, then=kind)
        assert_told(ended, folder, WORDS[kind])
    ended = warm.run(*command, "--out", folder)
    assert ended.code == 0, ended
    assert_same(undisturbed.folder, folder)


@pytest.mark.faults(4, "if a file cannot grow any more, the run says so and never uses the partial file")
@pytest.mark.parametrize("largest", [1_500, 6_000, 20_000, 60_000])
def test_file_size_limit(warm, command, undisturbed, largest, tmp_path):
    folder = tmp_path / "run"
    assert_told(warm.run(*command, "--quiet", "--out", folder, largest=largest), folder, "File too large")
    ended = warm.run(*command, "--out", folder)
    assert ended.code == 0, ended
    assert_same(undisturbed.folder, folder)


@pytest.fixture
def small_disk(tmp_path):
    """A separate small disk."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False)
    except OSError:
        pytest.skip("there is no mount")
    if mounted.returncode:
        pytest.skip("disks may not be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.faults(4, "if a real disk fills up, the last good checkpoint stays intact")
def test_real_disk_fills_up(warm, command, undisturbed, small_disk):
    folder, filler = small_disk / "run", small_disk / "filler"
    for room in (2_000, 60_000, 200_000):
        left = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        filler.write_bytes(bytes(max(left - room, 0)))
        assert_told(warm.run(*command, "--quiet", "--out", folder), folder, "No space left on device")
        filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
    ended = warm.run(*command, "--out", folder)
    assert ended.code == 0, ended
    assert_same(undisturbed.folder, folder)


@pytest.mark.faults(4, "if a cache cannot be written, the run continues without it and prints a note")
def test_full_cache_disk(warm, command, undisturbed, tmp_path):
    words = [word for word in command if word != "--no-reuse-source"]
    cache, folder = tmp_path / "cache", tmp_path / "run"
    env = {"RATP_CACHE": str(cache)}
    ended = warm.run(*words, "--quiet", "--out", folder, env=env, within=cache, at=1, then="ENOSPC")
    assert ended.code == 0, ended
    assert all(line.startswith("note: ") for line in ended.err.splitlines())
    assert "source network" in ended.err and WORDS["ENOSPC"] in ended.err
    assert_same(undisturbed.folder, folder)
