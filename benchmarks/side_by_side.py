"""Throughput of RaTP runs side by side: time and training steps a second of all together, with 1, 2, 4, … at once.

Random images with the recipe of Digits (DTN, 32×32), a source and a target; recording of graphs, labelling and
measuring are included, and weigh more than in a whole run. With ``--processes`` the runs of a GPU are shared among
several processes. Where NVIDIA's MPS is on, kernels of several processes run at the same time; else processes take
turns. Time is counted from the first step of a run to the last, so that starting processes is not in it. Prints a
table; ``--out`` keeps the numbers with device and versions. On a CPU a narrow network and a few steps give an idea.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.errors import RatpError
from ratp.executors.local import run_all
from ratp.runs.events import Event, Trained
from ratp.runs.plan import RunPlan, resolve
from ratp.runs.request import RunRequest
from ratp.runs.run import Run

CLASSES = 10
STAGES = ("source", "target")


def write_images(folder: Path, count: int) -> None:
    """Two domains of random images, a folder a class."""
    chance = np.random.default_rng(0)
    for name in STAGES:
        for k in range(count):
            path = folder / name / f"class {k % CLASSES}" / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(chance.integers(256, size=(32, 32, 3), dtype=np.uint8)).save(path, compress_level=0)


def plan_for(folder: Path, seed: int, options: argparse.Namespace) -> RunPlan:
    """RaTP with the published sizes for digits."""
    changes = {
        "network.backbone": "dtn",
        "network.width": options.width,
        "network.hidden": 256,
        "network.dim": 128,
        "size": 32,
        "batch": options.batch,
        "epochs": options.epochs,
        "steps": options.steps,
        "r_con": 0.8,
        "refresh": 2,
    }
    for kind in ("source_transform", "target_transform"):  # digits are not changed
        changes |= {f"{kind}.crop": False}
        changes |= {f"{kind}.{n}": 0 for n in ("flip", "brightness", "contrast", "saturation", "hue", "greyscale")}
    order = ">".join(STAGES)
    return resolve(RunRequest(str(folder), order=order, seed=seed, changes=changes, device=options.device))


def measure(count: int, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Makes ``count`` runs at once."""
    times: list[float] = []

    def note(run: Run, event: Event) -> None:
        if isinstance(event, Trained):
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as place:
        runs = [Run(plan_for(folder, seed, options), Path(place) / str(seed)) for seed in range(count)]
        device = runs[0].plan.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        processes = min(options.processes, count)
        if processes > 1:
            devices = [torch.device(device.type, 0) if device.type == "cuda" else device] * processes
            results = run_all(runs, devices=devices, at_once=-(-count // processes), on_event=note)
        else:
            results = run_all(runs, at_once=count, on_event=note)
    for result in results:
        if isinstance(result, RatpError):
            raise result
    seconds = times[-1] - times[0]
    steps = count * len(STAGES) * options.epochs * options.steps
    numbers = {
        "seconds": round(seconds, 2),
        "steps_a_second": round(steps / seconds, 1),
        "runs_an_hour": round(3600 * count / seconds, 1),
    }
    if device.type == "cuda" and processes == 1:
        numbers["gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    return numbers


def line(count: int, numbers: Mapping[str, float], alone: Mapping[str, float]) -> str:
    """A row of the table."""
    ratio = numbers["runs_an_hour"] / alone["runs_an_hour"]
    memory = numbers.get("gib", float("nan"))
    return f"{count:4} {numbers['seconds']:8.1f} {numbers['steps_a_second']:9.1f} {ratio:5.2f}× {memory:6.2f}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--counts", type=int, nargs="+", help="runs at once; default: 1 2 4 8 and, on a GPU, 10")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the GPU; default: 1")
    parser.add_argument("--images", type=int, help="images of a domain; default: 10,000, or 300 on a CPU")
    parser.add_argument("--epochs", type=int, help="epochs of a stage; default: 12, or 6 on a CPU")
    parser.add_argument("--steps", type=int, help="steps of an epoch; default: 400, or 5 on a CPU")
    parser.add_argument("--batch", type=int, help="images in a batch; default: 64, or 32 on a CPU")
    parser.add_argument("--width", type=float, help="factor on the channels; default: 1, or 0.25 on a CPU")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    on_gpu = torch.device(options.device).type == "cuda"
    usual = {"images": 10_000, "epochs": 12, "steps": 400, "batch": 64, "width": 1.0}
    if not on_gpu:
        usual = {"images": 300, "epochs": 6, "steps": 5, "batch": 32, "width": 0.25}
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.counts = options.counts or [1, 2, 4, 8, *([10] if on_gpu else [])]
    numbers: dict[int, dict[str, float]] = {}
    print(f"RaTP, DTN × {options.width}, batch {options.batch}, {options.images} images a domain, {options.device}")
    print(f"{'runs':>4} {'s':>8} {'steps/s':>9} {'':6} {'GiB':>6}")
    with tempfile.TemporaryDirectory() as place:
        os.environ["RATP_CACHE"] = str(Path(place) / "cache")
        write_images(Path(place) / "images", options.images)
        measure(1, Path(place) / "images", options)  # libraries load what they need
        for count in options.counts:
            numbers[count] = measure(count, Path(place) / "images", options)
            print(line(count, numbers[count], numbers[options.counts[0]]), flush=True)
    if options.out:
        arguments = {name: value for name, value in vars(options).items() if name != "out"}
        environment = describe_environment(torch.device(options.device))
        write_json(options.out, {"numbers": numbers, "options": arguments, "environment": environment})


if __name__ == "__main__":
    main()
