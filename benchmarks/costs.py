"""What every method costs on a benchmark, by the second: a stage on the source and one on a target, each method alone.

Two epochs of every phase are trained, with all their steps, labelling and recording of graphs; the second one counts,
times the number of epochs the phase has. An order is then the source's stage and as many of the target's as there are
targets; measuring on the test images comes on top.

Benchmarks need their images (``--data`` or ``$RATP_DATA``). Prints a table; ``--out`` keeps the numbers with device and
versions, and ``tools/docs.py`` makes the columns and tables of costs in ``docs/reference/methods.md`` of them. If the
file has other methods, measured with the same device and versions, they stay in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ratp._core.environment import changes, describe_environment, use_precision
from ratp._core.files import write_json
from ratp.errors import RatpError
from ratp.evaluation.accuracy import accuracy
from ratp.methods import METHODS
from ratp.runs.plan import RunPlan, resolve
from ratp.runs.request import RunRequest
from ratp.streams.stream import DataOptions, Stream
from ratp.training.device_cache import with_images_on
from ratp.training.phase import Phase, Tick, train

EPOCHS = 2  # trained of every phase


def now(device: torch.device) -> float:
    """The time when the device has caught up."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def stage_seconds(phases: Sequence[Phase], device: torch.device) -> float:
    """Time of a stage, from the last of two epochs of each of its phases."""
    whole = {id(phase): phase.epochs for phase in phases}
    for phase in phases:
        phase.epochs = min(phase.epochs, EPOCHS)
    seconds, started = 0.0, now(device)
    for moment in train(phases, capture=device.type == "cuda"):
        if isinstance(moment, Tick) and not moment.epoch_done:
            continue
        ended = now(device)
        if not isinstance(moment, Tick):
            seconds += ended - started  # what comes after the last epoch
        elif moment.epoch + 1 == moment.phase.epochs:
            seconds += (ended - started) * whole[id(moment.phase)]
        started = ended
    return seconds


def measure(plan: RunPlan, stream: Stream) -> dict[str, float]:
    """Times of one method."""
    device = plan.device
    method = plan.build_method(stream, None)
    numbers = {"source": stage_seconds(method.source_phases(with_images_on(stream.source, device)), device)}
    answer = stream.answers[0]
    if plan.method.uses_target_labels(plan.config) and answer is not None:
        phases = method.labelled_target_phases(with_images_on(answer, device))
    else:
        phases = method.target_phases(with_images_on(stream.targets[0], device))
    numbers["target"] = stage_seconds(phases, device)
    started = now(device)
    for test in stream.tests:
        if test is not None:
            accuracy(method, test)
    numbers["measuring"] = now(device) - started
    targets = len(stream.targets)
    numbers["order"] = numbers["source"] + targets * numbers["target"] + (1 + targets) * numbers["measuring"]
    return {name: round(value, 2) for name, value in numbers.items()}


def others(path: Path, content: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Numbers a file has that were measured in the same way on the same machine, be it with other code."""
    if not path.exists():
        return {}
    kept: dict[str, Any] = json.loads(path.read_text())
    differing = changes(kept["environment"], content["environment"]).keys() - {"code"}
    same = kept["options"] == content["options"] and not differing
    return dict(kept["numbers"]) if same else {}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stream", default="digits")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="names; default: all")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    numbers: dict[str, dict[str, float]] = {}
    print(f"{'s':12} {'source':>8} {'target':>8} {'measuring':>10} {'order':>8}")
    for name in options.methods:
        request = RunRequest(
            options.stream,
            method=name,
            device=options.device,
            precision=options.precision,
            data=DataOptions(options.data),
        )
        plan = resolve(request)
        use_precision(plan.precision)
        try:
            numbers[name] = measure(plan, plan.load_stream())
        except RatpError as error:
            print(f"{name:12} {error}")
            continue
        row = numbers[name]
        print(
            f"{name:12} {row['source']:8.1f} {row['target']:8.1f} {row['measuring']:10.1f} {row['order']:8.1f}",
            flush=True,
        )
        if options.out:
            arguments = {key: getattr(options, key) for key in ("stream", "precision")}
            environment = describe_environment(plan.device, plan.precision)
            content = {"options": arguments, "environment": environment}
            write_json(options.out, {"numbers": others(options.out, content) | numbers, **content})


if __name__ == "__main__":
    main()
