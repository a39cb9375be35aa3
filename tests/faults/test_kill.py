"""A killed process resumes with the same command and ends with the bits of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from warm import assert_same

from helpers import QUICK, TINY, accuracy_of, journal_of
from ratp.methods import METHODS

pytestmark = pytest.mark.slow

KILLED = -signal.SIGKILL
SIZES = {"epochs": 1, "steps": 3}


def kill_at_points(start, count, most, seed):
    """Starts something again and again, each time killed at a random point."""
    chance = random.Random(seed)
    for number in range(count):
        ended = start(at=chance.randint(1, most), then=("kill", "tear")[number % 2]).wait()
        assert ended.code == KILLED, (number, ended)


@pytest.mark.faults(1, "a run that is killed twenty times, mostly while it writes, ends with the same result")
@pytest.mark.faults(2, "ratp never takes a half-written file for a complete one")
def test_killed_at_twenty_points(warm, command, undisturbed, tmp_path):
    """At points where files are opened, synced, linked, renamed and removed; at every second one, half is lost."""
    folder = tmp_path / "run"

    def start(**how):
        return warm.start(*command, "--out", folder, within=folder, **how)

    kill_at_points(start, 20, undisturbed.points // 15, seed=1)
    ended = warm.run(*command, "--out", folder)
    assert ended.code == 0, ended
    assert_same(undisturbed.folder, folder)
    assert [e["stage"] for e in journal_of(folder, "stage_finished")] == [0, 1, 2]


@pytest.mark.faults(2, "a killed run with a damaged state says so, repeats a stage and ends with the same result")
@pytest.mark.parametrize("kind", ["cut", "gone"])
def test_killed_and_state_damaged(warm, command, undisturbed, kind, tmp_path):
    folder = tmp_path / "run"
    killed = warm.run(*command, "--out", folder, within=folder, at=undisturbed.points * 7 // 10)
    assert killed.code == KILLED, killed
    state = folder / "state.safetensors"
    os.truncate(state, state.stat().st_size // 2) if kind == "cut" else state.unlink()
    ended = warm.run(*command, "--quiet", "--out", folder)
    assert ended.code == 0, ended
    (line,) = ended.err.splitlines()
    assert line.startswith(f"note: {state} is ") and "resumes from state-before.safetensors, after 1 of 3" in line
    assert_same(undisturbed.folder, folder)
    assert len(journal_of(folder, "state_lost")) == 1


@pytest.mark.faults(1, "a run that is killed at twenty random moments ends with the same result")
def test_killed_at_twenty_moments(warm, command, undisturbed, tmp_path):
    """A run that comes to its end before it was killed so often, on a faster machine, is followed by another."""
    chance, kills, ends = random.Random(2), 0, 0
    while kills < 20:
        process = warm.start(*command, "--out", tmp_path / str(ends))
        time.sleep(undisturbed.seconds * chance.uniform(0.02, 0.4))
        process.kill(signal.SIGKILL)
        if process.wait().code == KILLED:
            kills += 1
        else:
            assert_same(undisturbed.folder, tmp_path / str(ends))
            ends += 1
    ended = warm.run(*command, "--out", tmp_path / str(ends))
    assert ended.code == 0, ended
    assert_same(undisturbed.folder, tmp_path / str(ends))


@pytest.mark.faults(1, "with every method, a run that is killed three times ends with the same result")
@pytest.mark.parametrize("method", [name for name in METHODS if name != "ratp"])
def test_killed_with_every_method(warm, method, tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    job = {"method": method, "changes": {**SIZES, **QUICK.get(method, {})}}
    assert warm.run(folder=whole, within=whole, tally=tmp_path / "points", **job).code == 0
    points = (tmp_path / "points").stat().st_size

    def start(**how):
        return warm.start(folder=folder, within=folder, **job, **how)

    kill_at_points(start, 3, points // 3, seed=method)
    ended = warm.run(folder=folder, **job)
    assert ended.code == 0, ended
    assert_same(whole, folder)


@pytest.mark.faults(1, "if a run is killed while it caches a source network, it can continue, and so can others")
def test_killed_while_keeping_a_source_network(warm, command, undisturbed, tmp_path):
    words = [word for word in command if word != "--no-reuse-source"]
    for at, then in ((2, "kill"), (3, "tear"), (4, "kill")):
        place = tmp_path / str(at)
        env = {"RATP_CACHE": str(place / "cache")}
        job = {"env": env, "within": place / "cache" / "source-models", "at": at, "then": then}
        killed = warm.run(*words, "--out", place / "run", **job)
        assert killed.code == KILLED, killed
        for folder in (place / "run", place / "another"):
            ended = warm.run(*words, "--out", folder, env=env)
            assert ended.code == 0, ended
            assert accuracy_of(folder) == accuracy_of(undisturbed.folder)


@pytest.mark.faults(1, "a study that is killed at six random points ends with the same results")
def test_killed_study(warm, pictures, tmp_path):
    lines = [f'stream = "{pictures}"', 'orders = ["day>rain>night"]', 'methods = ["shot", "efdm"]', "seeds = [1, 2]"]
    sizes = ", ".join(f'"{name}" = {value}' for name, value in {**TINY, "network.backbone": '"dtn"'}.items())
    (tmp_path / "tiny.toml").write_text("\n".join(['title = "Tiny"', "[[grid]]", *lines, f"set = {{ {sizes} }}"]))
    words = ["study", "run", tmp_path / "tiny.toml", "--device", "cpu", "--jobs", "1", "--weights", "none", "--out"]
    env = {"RATP_CACHE": str(tmp_path / "cache")}
    whole, folder = tmp_path / "whole", tmp_path / "study"
    assert warm.run(*words, whole, env=env, within=whole, tally=tmp_path / "points").code == 0
    points = (tmp_path / "points").stat().st_size

    def start(**how):
        return warm.start(*words, folder, env=env, within=folder, **how)

    kill_at_points(start, 6, points // 8, seed=3)
    ended = warm.run(*words, folder, env=env)
    assert ended.code == 0, ended
    runs = sorted(path.parent.name for path in whole.glob("*/config.json"))
    assert len(runs) == 4
    for name in runs:
        assert_same(whole / name, folder / name)
