"""Time of RaTP's training step, by hand and captured as a CUDA graph.

Random images, the recipe of Digits (DTN, 32×32) or, with ``--backbone resnet50 --size 224``, of PACS. Prints a table;
``--out`` keeps the numbers with device and versions. On a CPU, where nothing is captured, a few steps give an idea.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch

from ratp._core.environment import Randomness, describe_environment, find_precision, use_precision
from ratp._core.files import write_json
from ratp.data.domain import LabelledDomain
from ratp.functional.transforms import OBJECTS
from ratp.methods.ratp import RaTP, RaTPConfig, RaTPPhase
from ratp.networks.backbones import IMAGENET_MEAN, IMAGENET_STD
from ratp.networks.network import NetworkConfig
from ratp.training.cuda_graphs import WARM_UP, Stepper, bunches, stepper
from ratp.training.method import Setting
from ratp.training.recipe import Recipe

REPEATS = 5


def recipe_for(options: argparse.Namespace) -> Recipe:
    """The published sizes for digits, or for pictures."""
    if options.backbone == "dtn":
        return Recipe(size=options.size, batch=options.batch)
    return Recipe(
        network=NetworkConfig(backbone=options.backbone, hidden=512, dim=256),
        size=options.size,
        batch=options.batch,
        lr=0.005,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        source_transform=OBJECTS,
        target_transform=OBJECTS,
    )


def phase_on(stage: str, options: argparse.Namespace, device: torch.device) -> RaTPPhase:
    """The phase of a fresh method on random images, in its first epoch."""
    classes = tuple(map(str, range(10 if options.backbone == "dtn" else 7)))
    source = torch.Generator(device).manual_seed(0)
    shape = (options.images, 3, options.size, options.size)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=source, device=device)
    labels = torch.randint(len(classes), (options.images,), generator=source, device=device)
    recipe = recipe_for(options)
    setting = Setting(recipe, classes, (options.size, options.size), Randomness(0), device, precision=options.precision)
    method = RaTP(setting, RaTPConfig())
    domain = LabelledDomain("random", images, labels, classes)
    if stage == "target":
        kept = slice(0, recipe.memory)
        memory = method.memory
        memory.images, memory.labels, memory.seen = images[kept].clone(), labels[kept].clone(), 1
        memory.domains = torch.zeros_like(memory.labels)
        method.old = method.network.frozen_copy()
    phases = method.source_phases(domain) if stage == "source" else method.target_phases(domain.unlabelled())
    (phase,) = phases
    phase.begin()
    phase.begin_epoch(0)
    assert isinstance(phase, RaTPPhase)
    return phase


def measure(stage: str, options: argparse.Namespace, device: torch.device, *, capture: bool) -> dict[str, float]:
    """Milliseconds a step, and on CUDA the most memory it takes, in GiB."""
    phase = phase_on(stage, options, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    bunch = bunches(options.steps)

    def by_hand(most: int = 1) -> int:
        del most
        phase.step()
        return 1

    captured = stepper(lambda: _ignore(phase.step()), phase.generators, bunch=bunch) if capture else None
    with captured or nullcontext(by_hand) as step:
        make(step, WARM_UP + 2 * bunch if device.type == "cuda" else 1)
        times = [_milliseconds(step, options.steps, device) for _ in range(REPEATS if device.type == "cuda" else 1)]
    numbers = {"ms": round(median(times), 3)}
    if device.type == "cuda":
        numbers["gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    return numbers


def make(step: Stepper, count: int) -> None:
    """Makes some steps."""
    while count > 0:
        count -= step(count)


def _ignore(scalars: object) -> None:
    del scalars


def _milliseconds(step: Stepper, count: int, device: torch.device) -> float:
    """Mean time of some steps in a row, the device's own where it has a clock."""
    if device.type != "cuda":
        started = time.perf_counter()
        make(step, count)
        return 1000 * (time.perf_counter() - started) / count
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    make(step, count)
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / count


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backbone", default="dtn", help="as network.backbone; default: dtn")
    parser.add_argument("--size", type=int, default=32, help="side of the images; default: 32")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch; default: 64")
    parser.add_argument("--images", type=int, help="images of the domain; default: 20,000, or fewer large ones")
    parser.add_argument("--steps", type=int, help="steps timed at once; default: 100, or 3 on a CPU")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try out its algorithms")
    parser.add_argument("--precision", default="auto", help="as ratp run's; default: auto")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    options.images = options.images or min(20_000, (2**30 if on_gpu else 2**26) // (3 * options.size**2))
    options.steps = options.steps or (100 if on_gpu else 3)
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    options.precision = find_precision(options.precision, device)
    use_precision(options.precision)
    numbers: dict[str, dict[str, dict[str, float]]] = {}
    print(
        f"{options.backbone}, {options.size}×{options.size}, batch {options.batch}, {options.images} images, "
        f"{device}, {options.precision}"
    )
    print(f"{'stage':8} {'way':10} {'ms/step':>9} {'GiB':>6}")
    for stage in ("source", "target"):
        for way in ("by hand", "captured") if on_gpu else ("by hand",):
            found = measure(stage, options, device, capture=way == "captured")
            numbers.setdefault(stage, {})[way] = found
            print(f"{stage:8} {way:10} {found['ms']:9.2f} {found.get('gib', float('nan')):6.2f}", flush=True)
    if options.out:
        arguments = {name: value for name, value in vars(options).items() if name != "out"}
        environment = describe_environment(device, options.precision)
        write_json(options.out, {"numbers": numbers, "options": arguments, "environment": environment})


if __name__ == "__main__":
    main()
