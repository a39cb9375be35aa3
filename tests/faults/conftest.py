"""Processes to disturb, and their undisturbed results."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm import Warm

from helpers import TINY
from own_images import DTN, image_files, write_files


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """What starts processes at once."""
    server = Warm(tmp_path_factory.mktemp("warm"))
    with server.process:
        yield server
        server.process.stdin.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Three domains of small image files."""
    folder = tmp_path_factory.mktemp("pictures")
    for seed, name in enumerate(("day", "rain", "night")):
        write_files(folder / name, image_files(count=8, seed=seed))
    return folder


@pytest.fixture(scope="session")
def command(pictures):
    """``ratp run`` on them: three stages of twelve steps, a checkpoint a step, no directory yet."""
    sizes = [word for name, value in {**TINY, "epochs": 4, "steps": 3}.items() for word in ("--set", f"{name}={value}")]
    domains = ["--source", pictures / "day", "--targets", pictures / "rain", pictures / "night"]
    how = ["--device", "cpu", "--save-every", "0.000001", "--no-reuse-source", "--set", "randmix.kernel_sizes=3,5"]
    return ["run", "folders", *domains, *DTN, *sizes, *how]


@pytest.fixture(scope="session")
def undisturbed(warm, command, tmp_path_factory):
    """The directory of an undisturbed run, the number of its points, and the seconds it took."""
    folder = tmp_path_factory.mktemp("untouched")
    warm.run(*command, "--out", folder / "warm-up")
    started = time.monotonic()
    ended = warm.run(*command, "--out", folder / "run", within=folder / "run", tally=folder / "points")
    assert ended.code == 0, ended
    return Untouched(folder / "run", (folder / "points").stat().st_size, time.monotonic() - started)


@dataclass(frozen=True)
class Untouched:
    """An undisturbed run."""

    folder: Path
    points: int
    seconds: float
