"""Measures what it costs to adapt online in a deployment, beside the step of the method alone.

For each method, ``observe`` of 64 images is compared with the method's own ``observe`` of the same images, on known
images and on images in negative, for which the alarm is up. What a saved version costs, guard and calibration included,
is counted per window. Prints CPU seconds as ratios and writes ``benchmarks/online.json``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from alarm import SEED, part, ratio, timed
from ratp import Deployment, Run
from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.deploy.deployment import RECOGNISED_EVERY
from ratp.deploy.drift import WINDOW
from ratp.deploy.settings import Settings
from ratp.runs.load import load as load_run
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.streams.stream import DataOptions, LoadedDomain
from ratp.training.method import OnlineMethod

VALUES = {"network.backbone": "resnet18", "size": 64, "epochs": 1, "steps": 1, "batch": WINDOW}


def measure(method: str, rounds: int) -> dict[str, float]:
    """Returns the ratios of a method."""
    request = RunRequest("demo", method, seed=SEED, changes=VALUES, device="cpu", weights="none", guard="off")
    plan = resolve(request)
    whole = plan.spec.load

    def load(codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
        parts = zip(whole(codes, size, options), (30 * WINDOW, WINDOW), strict=True)
        return [LoadedDomain(part(item, most)) for item, most in parts]

    plan = replace(plan, spec=replace(plan.spec, load=load), order=plan.order[:2])
    source = plan.load_stream().tests[0]
    assert source is not None
    settings = Settings("online", save_every=10**6)  # saving is measured on its own
    with tempfile.TemporaryDirectory() as name:
        Run(plan, Path(name) / "run").execute()
        place = Path(name) / "run", Path(name) / "deployed"
        with Deployment.create(*place, source, settings=settings, device="cpu") as model:
            alone = load_run(place[0], device="cpu").method
            assert isinstance(alone, OnlineMethod)
            images = source.images[:WINDOW]
            step = partial(alone.observe, images)
            usual = timed({"step": step, "observe": partial(model.observe, images)}, rounds)
            odd = timed({"step": step, "observe": partial(model.observe, 255 - images)}, RECOGNISED_EVERY)
            model.observe(images)
            start = time.process_time()
            model.save()
            saving = time.process_time() - start
    every = Settings().save_every
    steps = median(row["step"] for row in usual)
    return {
        "observe / step": ratio(usual, "observe", "step"),
        "observe in negative / step": round(mean(row["observe"] for row in odd) / mean(row["step"] for row in odd), 3),
        "saving, in steps": round(saving / steps, 2),
        "observe and saving / step": round(ratio(usual, "observe", "step") + saving / steps / every, 3),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=["t3a", "adabn", "tent", "eata", "sar", "roid"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for method in options.methods:
        found[method] = measure(method, options.rounds)
        print(method, found[method], flush=True)
    about = {"window": WINDOW, "save_every": Settings().save_every, "values": VALUES}
    write_json(options.out, {"methods": found, **about, "environment": describe_environment(torch.device("cpu"))})


if __name__ == "__main__":
    main()
