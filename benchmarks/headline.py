"""The headline figures of a GPU, each as a user would get it, against those that were kept last.

Whole commands start with an empty cache; steps are measured by ``step.py``, streamed images by ``streamed.py``. Prints
a table with the ratio to the kept figures if these are of the same device; ``--keep`` replaces the measured ones of
``benchmarks/headline-cuda.json``. The commands need the images of the benchmarks (``$RATP_DATA``, ``$RATP_WEIGHTS``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ratp._core.environment import describe_environment
from ratp._core.files import read_json, write_json

HERE = Path(__file__).parent
KEPT = HERE / "headline-cuda.json"
RESNET = ("--backbone", "resnet50", "--size", "224", "--precision", "bf16")
Figure = dict[str, float | str]


def command(*arguments: str) -> Figure:
    """Seconds of a ``ratp`` command with an empty cache, and the most memory of the host in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "RATP_CACHE": f"{folder}/cache"}
        started = time.perf_counter()
        line = [sys.executable, "-m", "ratp", *arguments, "--device", "cuda", "--quiet", "--out", f"{folder}/out"]
        subprocess.run(line, check=True, env=environment)
        seconds = time.perf_counter() - started
    host = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return {"value": round(seconds, 1), "unit": "s", "host_gib": round(host, 2)}


def script(name: str, *arguments: str) -> Any:
    """The numbers that another benchmark writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "numbers.json")
        line = [sys.executable, str(HERE / f"{name}.py"), "--device", "cuda", *arguments, "--out", str(out)]
        subprocess.run(line, check=True, stdout=sys.stderr)
        return json.loads(out.read_text())["numbers"]


def step(stage: str, *arguments: str) -> Figure:
    """Milliseconds of RaTP's step, captured, and the most memory of the device in GiB."""
    found = script("step", *arguments)[stage]["captured"]
    return {"value": found["ms"], "unit": "ms", "device_gib": found["gib"]}


def streamed() -> Figure:
    """Speed of a step with streamed images at 224×224, relative to resident ones."""
    found = script("streamed", "--images", "4000")["4000"]
    resident, other = (found[place] for place in ("resident", "streamed"))
    ratio = resident["ms"] / other["ms"]
    return {"value": round(ratio, 3), "unit": "×", "device_gib": other["gib"], "host_gib": other["host_gib"]}


ORDERS = tuple(part for order in map(str, range(1, 11)) for part in ("--order", order))
FIGURES: dict[str, Callable[[], Figure]] = {
    "Digits, source step": partial(step, "source"),
    "Digits, target step": partial(step, "target"),
    "PACS, source step, bf16": partial(step, "source", *RESNET),
    "PACS, target step, bf16": partial(step, "target", *RESNET),
    "streamed against resident, 224×224": streamed,
    "Digits, one order, whole command": partial(command, "run", "digits"),
    "PACS, one order, bf16, whole command": partial(command, "run", "pacs", "--precision", "bf16"),
    "Digits, ten orders, one command": partial(command, "run", "digits", *ORDERS),
}


def main() -> None:
    """Measures, compares, and keeps the figures on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="only figures whose name contains one of these")
    parser.add_argument("--keep", action="store_true", help="keep the figures, for the next comparison")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; on a CPU, make bench measures the demo")
    environment = describe_environment(torch.device("cuda"))
    last = read_json(KEPT) if KEPT.exists() else {"figures": {}}
    is_same = last.get("environment", {}).get("device_name") == environment["device_name"]
    figures: dict[str, Figure] = dict(last["figures"]) if is_same else {}
    print(f"{'figure':38} {'now':>10} {'kept':>10} {'now/kept':>9}")
    for name, measure in FIGURES.items():
        if options.only and not any(words.lower() in name.lower() for words in options.only):
            continue
        found, before = measure(), figures.get(name)
        ratio = f"{float(found['value']) / float(before['value']):9.2f}" if before else ""
        kept = f"{before['value']} {before['unit']}" if before else "–"
        print(f"{name:38} {found['value']!s:>7} {found['unit']:2} {kept:>10} {ratio}", flush=True)
        figures[name] = found
        if options.keep:
            write_json(KEPT, {"figures": figures, "environment": environment})


if __name__ == "__main__":
    main()
