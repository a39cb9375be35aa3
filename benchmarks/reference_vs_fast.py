"""The plain reference of RaTP against the fast path: the demo's run, shortened, on both, stage by stage in turn.

Both start from the same weights and draw the same random numbers. The reference (``benchmarks/reference``) opens an
image file at every access, as the authors' loader does, or takes images from memory with ``--memory``; the fast path
has its images in memory, and on CUDA its steps are captured. Prints a table and where the reference spends its time;
keeps the numbers with device and versions. ``--epochs 12`` is the demo at its full length.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.data.domain import LabelledDomain
from ratp.evaluation.accuracy import accuracy
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.streams.stream import Stream
from ratp.training.cuda_graphs import stepper
from ratp.training.phase import Phase
from reference.ratp_reference.images import ImagesInMemory, read_folder, write_folder
from reference.ratp_reference.matrix import metrics
from reference.ratp_reference.method import PlainRaTP, Stage

PARTS = ("load", "prepare", "confident", "augment", "losses", "update")
PROFILED_STEPS = 10
WORKERS_ON_CUDA = 4  # the authors' number


class Clock:
    """Times by name, in seconds; it waits for the device before and after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str, count: int = 1) -> Iterator[None]:
        """Times the block, which does a thing ``count`` times."""
        started = self._now()
        yield
        self.seconds[name].append((self._now() - started) / count)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train_fast(phase: Phase, refresh: int, clock: Clock) -> None:
    """A stage of the fast path, as the harness drives it."""

    def update() -> None:
        phase.step()

    steps: Any = stepper(update, phase.generators) if phase.captures else nullcontext(update)
    with clock(f"{phase.name} stage"), steps as step:
        phase.begin()
        for epoch in range(phase.epochs):
            with clock(_before_epoch(phase.name, epoch, refresh)):
                phase.begin_epoch(epoch)
            with clock(f"{phase.name} step", phase.steps):
                for _ in range(phase.steps):
                    step()
        with clock("exemplars"):
            phase.finish()


def train_plainly(stage: Stage, refresh: int, clock: Clock) -> None:
    """The same of the reference."""
    name = "target" if stage.is_target else "source"
    with clock(f"{name} stage"):
        for epoch in range(stage.recipe.epochs):
            with clock(_before_epoch(name, epoch, refresh)):
                stage.begin_epoch(epoch)
            with clock(f"{name} step", stage.recipe.steps):
                for batch in stage.batches(stage.recipe.steps):
                    stage.step(batch)
        with clock("exemplars"):
            stage.finish()


def _before_epoch(name: str, epoch: int, refresh: int) -> str:
    due = epoch % refresh == 0 if refresh else epoch == 0
    return "label refresh" if name == "target" and due else "nothing"


class Files:
    """The images of a stream as the reference takes them: as files in a folder, or in memory."""

    def __init__(self, stream: Stream, folder: Path | None) -> None:
        self._folder, self._classes, self._size = folder, stream.classes, stream.image_size[0]

    def put(self, name: str, images: Tensor, labels: Tensor) -> Any:
        """A set of images to train or test on."""
        if self._folder is None:
            return ImagesInMemory(images)
        write_folder(self._folder / name, images, labels, self._classes)
        return read_folder(self._folder / name, self._classes, self._size)[0]


def compare(options: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """Runs both and gives times, accuracies and the reference's parts."""
    request = RunRequest(
        stream="demo", method="ratp", seed=options.seed, device=options.device, changes={"epochs": options.epochs}
    )
    plan = resolve(request)
    device, stream = plan.device, plan.load_stream()
    fast = plan.build_method(stream)
    plain = PlainRaTP(fast.setting, fast.config, workers=options.workers)
    files = Files(stream, folder)
    training = [files.put("source", stream.source.images, stream.source.labels)]
    training += [files.put(t.name, t.images, torch.zeros(len(t), dtype=torch.int64)) for t in stream.targets]
    tests = [test for test in stream.tests if test is not None]
    plain_tests = [files.put(f"{test.name}-test", test.images, test.labels) for test in tests]
    on_device = [test.to(device) for test in tests]
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # the first one imports compilers for seconds

    clocks = {"reference": Clock(device), "fast": Clock(device)}
    rows: dict[str, list[list[float]]] = {"reference": [], "fast": []}
    for index, name in enumerate(stream.order):
        domain = stream.source if index == 0 else stream.targets[index - 1]
        (phase,) = fast.source_phases(domain) if index == 0 else fast.target_phases(domain)
        train_fast(phase, fast.config.refresh, clocks["fast"])
        rows["fast"].append(_evaluate_fast(fast, on_device, clocks["fast"]))
        if index == 0:
            stage = plain.source_stage(training[0], stream.source.labels)
        else:
            stage = plain.target_stage(training[index])
        train_plainly(stage, fast.config.refresh, clocks["reference"])
        rows["reference"].append(_evaluate_plainly(plain, plain_tests, tests, clocks["reference"]))
        print(f"  {name}: done", flush=True)
    return {
        "times": {way: _summary(clock) for way, clock in clocks.items()},
        "accuracy": {way: _averages(matrix) for way, matrix in rows.items()},
        "reference_step_ms": _profile(plain.target_stage(training[-1]), device),
    }


def _evaluate_fast(method: Any, tests: Sequence[LabelledDomain], clock: Clock) -> list[float]:
    with clock("evaluation", len(tests)):
        return [accuracy(method, test) for test in tests]


def _evaluate_plainly(
    method: PlainRaTP, images: Sequence[Any], tests: Sequence[LabelledDomain], clock: Clock
) -> list[float]:
    with clock("evaluation", len(tests)):
        return [method.accuracy(files, test.labels) for files, test in zip(images, tests, strict=True)]


def _summary(clock: Clock) -> dict[str, float]:
    """Medians, those of steps without a stage's first epoch, and the whole run."""
    seconds = clock.seconds
    domains = len(seconds["evaluation"])  # each measured after every stage
    epochs = len(seconds["source step"])

    def step(kind: str) -> float:
        times = [t for place, t in enumerate(seconds[f"{kind} step"]) if place % epochs or epochs == 1]
        return 1000 * median(times)

    whole = sum(seconds["source stage"]) + sum(seconds["target stage"]) + domains * sum(seconds["evaluation"])
    found = {
        "source step, ms": step("source"),
        "target step, ms": step("target"),
        "label refresh, s": median(seconds["label refresh"]),
        "exemplars of a stage, s": median(seconds["exemplars"]),
        "evaluation of a domain, s": median(seconds["evaluation"]),
        "a target stage, s": median(seconds["target stage"]),
        "whole run, s": whole,
    }
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _averages(matrix: list[list[float]]) -> dict[str, float]:
    found = metrics(matrix, len(matrix))
    return {name: round(mean(domains.values()), 1) for name, domains in found.items()}


def _profile(stage: Stage, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step's parts on the last target."""
    stage.label()
    clock = Clock(device)
    for part in PARTS[1:]:
        setattr(stage, part, _timed(getattr(stage, part), part, clock))
    batches = stage.batches(PROFILED_STEPS)
    for _ in range(PROFILED_STEPS):
        with clock("load"):
            batch = next(batches)
        stage.step(batch)
    return {part: round(1000 * median(clock.seconds[part]), 2) for part in PARTS}


def _timed(method: Any, name: str, clock: Clock) -> Any:
    def timed(*arguments: Any) -> Any:
        with clock(name):
            return method(*arguments)

    return timed


def main() -> None:
    """Measures, prints and keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=2, help="epochs a stage; the demo has 12; default: 2")
    parser.add_argument("--seed", type=int, default=2022)
    parser.add_argument("--memory", action="store_true", help="the reference takes its images from memory, not files")
    parser.add_argument("--workers", type=int, help="processes that load images for the reference; default: 4 on CUDA")
    parser.add_argument("--out", type=Path, help="file for the numbers; default: beside this script, by device")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.workers is None:
        options.workers = WORKERS_ON_CUDA if device.type == "cuda" else 0
    suffix = "" if device.type == "cpu" else f"-{device.type}"
    out = options.out or Path(__file__).with_name(f"{Path(__file__).stem}{suffix}.json")
    print(f"demo, {options.epochs} epochs a stage, {device}, {torch.get_num_threads()} threads", flush=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        numbers = compare(options, None if options.memory else Path(folder))
    numbers["seconds"] = round(time.perf_counter() - started, 1)

    plain, fast = numbers["times"]["reference"], numbers["times"]["fast"]
    numbers["ratios"] = {row: round(plain[row] / fast[row], 2) for row in plain}
    print(f"{'':28} {'reference':>10} {'fast':>10} {'ratio':>7}")
    for row, ratio in numbers["ratios"].items():
        print(f"{row:28} {plain[row]:10.4g} {fast[row]:10.4g} {ratio:7.1f}")
    for metric, value in numbers["accuracy"]["reference"].items():
        print(f"{metric + ', %':28} {value:10.1f} {numbers['accuracy']['fast'][metric]:10.1f}")
    parts = ", ".join(f"{part} {value:.1f}" for part, value in numbers["reference_step_ms"].items())
    print(f"the reference's target step, ms: {parts}")
    arguments = {name: value for name, value in vars(options).items() if name != "out"}
    write_json(out, {"numbers": numbers, "options": arguments, "environment": describe_environment(device)})


if __name__ == "__main__":
    main()
