"""Throughput of RaTP runs side by side: training steps a second of all together, with 1, 2, 4, … of them at once.

Random images with the recipe of Digits (DTN, 32×32), a source and a target. Counted is the time in which all runs are
in the same stage, from the end of an epoch of each to the end of an epoch of each, when the device has done what it
was asked to; the column "s" is the whole time, with starting, labelling and measuring. Prints a table; ``--out`` keeps
the numbers with device and versions. On a CPU a narrow network and a few steps give an idea.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ratp.environment import describe_environment
from ratp.errors import RatpError
from ratp.events import Event, Trained
from ratp.files import write_json
from ratp.plan import RunPlan, RunRequest, resolve
from ratp.run import Run
from ratp.side_by_side import run_all

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


class Clock:
    """When the epochs of every run ended, by stage."""

    def __init__(self) -> None:
        self.ends: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def see(self, run: Run, event: Event) -> None:
        """Takes an event; at the end of an epoch its means have been read, so the device has caught up."""
        if isinstance(event, Trained) and event.tick.epoch_done:
            _ = [float(value) for value in event.tick.means.values()]
            self.ends[event.stage][id(run)].append(time.perf_counter())

    def steps_a_second(self, stage: int, steps: int) -> float:
        """Of all runs together, while all are in the stage; the first epoch, with its recording, does not count."""
        ends = list(self.ends[stage].values())
        first, last = max(times[0] for times in ends), min(times[-1] for times in ends)
        total = 0.0
        for times in ends:
            inside = [t for t in times if first <= t <= last]
            if len(inside) > 1:
                total += steps * (len(inside) - 1) / (inside[-1] - inside[0])
        return total


def measure(count: int, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Makes ``count`` runs at once."""
    with tempfile.TemporaryDirectory() as place:
        runs = [Run(plan_for(folder, seed, options), Path(place) / str(seed)) for seed in range(count)]
        clock = Clock()
        if runs[0].plan.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        results = run_all(runs, at_once=count, on_event=clock.see)
        seconds = time.perf_counter() - started
    for result in results:
        if isinstance(result, RatpError):
            raise result
    numbers = {name: round(clock.steps_a_second(k, options.steps), 2) for k, name in enumerate(STAGES)}
    numbers |= {"seconds": round(seconds, 2), "runs_an_hour": round(3600 * count / seconds, 1)}
    if runs[0].plan.device.type == "cuda":
        numbers["gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    return numbers


def line(count: int, numbers: Mapping[str, float], alone: Mapping[str, float]) -> str:
    """A row of the table."""
    cells = [f"{numbers[name]:9.1f} {numbers[name] / max(alone[name], 1e-9):5.2f}×" for name in STAGES]
    cells.append(f"{numbers['seconds']:8.1f} {numbers['runs_an_hour'] / alone['runs_an_hour']:5.2f}×")
    return f"{count:4} {' '.join(cells)} {numbers.get('gib', float('nan')):6.2f}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--counts", type=int, nargs="+", help="runs at once; default: 1 2 4 8 and, on a GPU, 10")
    parser.add_argument("--images", type=int, help="images of a domain; default: 10,000, or 300 on a CPU")
    parser.add_argument("--epochs", type=int, help="epochs of a stage; default: 6")
    parser.add_argument("--steps", type=int, help="steps of an epoch; default: 400, or 5 on a CPU")
    parser.add_argument("--batch", type=int, help="images in a batch; default: 64, or 32 on a CPU")
    parser.add_argument("--width", type=float, help="factor on the channels; default: 1, or 0.25 on a CPU")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    on_gpu = torch.device(options.device).type == "cuda"
    usual = {"images": 10_000, "epochs": 6, "steps": 400, "batch": 64, "width": 1.0}
    if not on_gpu:
        usual = {"images": 300, "epochs": 6, "steps": 5, "batch": 32, "width": 0.25}
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.counts = options.counts or [1, 2, 4, 8, *([10] if on_gpu else [])]
    numbers: dict[int, dict[str, float]] = {}
    print(f"RaTP, DTN × {options.width}, batch {options.batch}, {options.images} images a domain, {options.device}")
    print(f"{'runs':>4} {'source/s':>9} {'':6} {'target/s':>9} {'':6} {'s':>8} {'':6} {'GiB':>6}")
    with tempfile.TemporaryDirectory() as place:
        os.environ["RATP_CACHE"] = str(Path(place) / "cache")
        write_images(Path(place) / "images", options.images)
        if on_gpu:
            measure(1, Path(place) / "images", options)  # libraries load their kernels
        for count in options.counts:
            numbers[count] = measure(count, Path(place) / "images", options)
            print(line(count, numbers[count], numbers[options.counts[0]]), flush=True)
    if options.out:
        asked = {name: value for name, value in vars(options).items() if name != "out"}
        environment = describe_environment(torch.device(options.device))
        write_json(options.out, {"numbers": numbers, "options": asked, "environment": environment})


if __name__ == "__main__":
    main()
