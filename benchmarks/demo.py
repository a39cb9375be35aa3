"""Time and memory of the demo, and what importing ratp costs on top of torch.

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

from ratp.environment import describe_environment
from ratp.files import write_json
from ratp.record import read_run


def import_seconds(module: str) -> float:
    """Median time of a fresh interpreter that imports ``module``."""
    return median(_timed([sys.executable, "-c", f"import {module}"]) for _ in range(5))


def _timed(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Measures, prints and keeps the numbers."""
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
        "import_ratp_extra_seconds": round(import_ratp - import_torch, 2),
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
