"""What safety costs: checkpoints as a share of the time at the default interval, journal and lock by the step.

One run of a few epochs on the embedded stream with a checkpoint after every step; the time within each of the three is
taken in that run, and so are the steps. A checkpoint's size depends on the network, not on the images: ``--set
network.backbone=resnet50`` has the one of the paper's pictures. Prints a table; ``--out`` keeps the numbers with device
and versions.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import ratp.runs.run
from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.runs.directory import Journal, RunFiles
from ratp.runs.events import Trained
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.runs.run import SAVE_EVERY, Run
from ratp.runs.states import CHECKPOINT_LATEST as LATEST


class Clock:
    """Adds up the time that something takes.

    Attributes:
        times: Seconds of every time it was done.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            self.times.append(time.perf_counter() - started)
            return result

        return timed

    def around_ends(self, function: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
        """A context whose beginning and end are timed, not what is within."""

        @contextmanager
        def timed(*arguments: Any) -> Iterator[None]:
            started = time.perf_counter()
            with function(*arguments):
                self.times.append(time.perf_counter() - started)
                yield
                started = time.perf_counter()
            self.times.append(time.perf_counter() - started)

        return timed


def measure(request: RunRequest, folder: Path) -> dict[str, float]:
    """Makes the run, and takes its times."""
    run = Run(resolve(request), folder, save_every=0.0)
    checkpoint, journal, lock = Clock(), Clock(), Clock()
    steps, size = 0, 0
    with (
        patch.object(RunFiles, "save_checkpoint", checkpoint.around(RunFiles.save_checkpoint)),
        patch.object(Journal, "append", journal.around(Journal.append)),
        patch.object(ratp.runs.run, "exclusive", lock.around_ends(ratp.runs.run.exclusive)),
    ):
        started = time.perf_counter()
        for event in run.events():
            if isinstance(event, Trained):
                steps += event.tick.made
                size = max(size, (folder / LATEST).stat().st_size if (folder / LATEST).exists() else 0)
        whole = time.perf_counter() - started
    seconds = median(checkpoint.times)
    return {
        "steps": steps,
        "step_ms": round(1000 * (whole - sum(checkpoint.times)) / steps, 2),
        "checkpoint_mb": round(size / 1e6, 1),
        "checkpoint_seconds": round(seconds, 4),
        "checkpoint_seconds_longest": round(max(checkpoint.times), 4),
        "share_of_time_percent": round(100 * seconds / (SAVE_EVERY + seconds), 3),
        "journal_and_lock_ms_per_step": round(1000 * (sum(journal.times) + sum(lock.times)) / steps, 4),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="ratp", help="default: ratp")
    parser.add_argument("--device", default="auto", help="as ratp run's; default: auto")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="as ratp run's; repeatable")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    changes = {"epochs": "1", **dict(item.split("=", 1) for item in options.changes)}
    request = RunRequest(method=options.method, device=options.device, changes=changes, weights="none")
    with tempfile.TemporaryDirectory(prefix="ratp-checkpoints-") as folder:
        numbers = measure(request, Path(folder) / "run")
    for name, value in numbers.items():
        print(f"{name:32} {value:10}")
    if options.out:
        environment = describe_environment(resolve(request).device)
        write_json(options.out, {"numbers": numbers, "changes": changes, "environment": environment})


if __name__ == "__main__":
    main()
