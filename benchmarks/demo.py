"""Measures time and memory of the demo, import times, and how fast commands start that compute nothing.

Writes ``benchmarks/demo.json`` with device and versions.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.runs.record import read_run

QUICK = (["--help"], ["methods"], ["streams"], ["run", "--help"], ["report", "--help"], ["run", "demp"])


def import_seconds(module: str) -> float:
    """Median time of a fresh interpreter that imports ``module``."""
    return median(_timed([sys.executable, "-c", f"import {module}"]) for _ in range(5))


def start_times() -> dict[str, dict[str, float]]:
    """Median seconds of commands that compute nothing, also relative to an interpreter that does nothing."""
    nothing = median(_timed([sys.executable, "-c", "pass"]) for _ in range(5))
    found = {}
    for words in QUICK:
        seconds = median(_timed([sys.executable, "-m", "ratp", *words], check=False) for _ in range(5))
        found[" ".join(["ratp", *words])] = {"seconds": round(seconds, 2), "times_python": round(seconds / nothing, 1)}
    return found


def _timed(command: list[str], *, check: bool = True) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=check, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Measures, prints and saves the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        import_torch, import_ratp = import_seconds("torch"), import_seconds("ratp")
        command = [sys.executable, "-m", "ratp", "demo", "--device", "cpu", "--out", folder, "--quiet"]
        seconds = _timed(command)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        runs = {name: read_run(Path(folder) / f"{name}-2022") for name in ("ratp", "source-only")}
    numbers = {
        "demo_seconds": round(seconds, 1),
        "demo_peak_gib": round(peak, 2),
        "import_torch_seconds": round(import_torch, 2),
        "import_ratp_seconds": round(import_ratp, 2),
        "start": start_times(),
        "runs": {
            name: {
                "seconds": round(run.seconds, 1),
                "steps": sum(e["steps"] for e in run.events("stage_started")),
                "averages": {metric: round(value, 1) for metric, value in run.matrix.averages().items()},
            }
            for name, run in runs.items()
        },
    }
    write_json(
        Path(__file__).with_suffix(".json"),
        {"numbers": numbers, "environment": describe_environment(torch.device("cpu"))},
    )
    print(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
