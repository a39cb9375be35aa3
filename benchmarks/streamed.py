"""Training and labelling with images that are streamed to the device, against the same images resident on it.

RaTP's target step with the recipe of PACS on random images in a mapped file, as the cache keeps them: milliseconds a
step, images labelled a second, and the most memory of device and host, for domains of several sizes. Prints a table;
``--out`` keeps the numbers with device and versions. On a CPU, small images and a small network give an idea; times are
those of its cores then, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch

from ratp._core.environment import Randomness, describe_environment, find_precision, use_precision
from ratp._core.files import write_json
from ratp.data.decode.pixel_file import map_images
from ratp.data.domain import LabelledDomain
from ratp.methods.ratp import RaTP, RaTPConfig
from ratp.training.cuda_graphs import WARM_UP, Stepper, bunches, stepper
from ratp.training.device_cache import Placement, with_images_on
from ratp.training.method import Setting
from ratp.training.phases import embed_all
from step import REPEATS, _ignore, _milliseconds, make, recipe_for

CLASSES = tuple(map(str, range(7)))
BLOCK = 256


def random_images(folder: Path, count: int, size: int) -> torch.Tensor:
    """Random images in a mapped file."""
    source = torch.Generator().manual_seed(0)
    with (folder / f"{count}.images").open("w+b") as file:
        for first in range(0, count, BLOCK):
            shape = min(BLOCK, count - first), 3, size, size
            file.write(torch.randint(256, shape, dtype=torch.uint8, generator=source).numpy().data)
        file.flush()
        return map_images(os.dup(file.fileno()), count, size, size)


def measure(images: torch.Tensor, place: Placement, options: argparse.Namespace) -> dict[str, float]:
    """Trains and labels with images in one place."""
    device, size = torch.device(options.device), options.size
    on_gpu, before = device.type == "cuda", anonymous_bytes()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    setting = Setting(recipe_for(options), CLASSES, (size, size), Randomness(0), device, precision=options.precision)
    method = RaTP(setting, RaTPConfig())
    labels = torch.arange(len(images)) % len(CLASSES)
    domain = with_images_on(LabelledDomain("random", images, labels, CLASSES), device, place)
    memory, kept = method.memory, slice(0, setting.recipe.memory)
    memory.images, memory.labels, memory.seen = domain.images[kept].clone(), labels[kept].to(device), 1
    memory.domains = torch.zeros_like(memory.labels)
    method.old = method.network.frozen_copy()
    (phase,) = method.target_phases(domain.unlabelled())
    phase.begin()
    clock = time.perf_counter if on_gpu else time.process_time
    started = clock()
    embed_all(method.network, setting, domain.images)
    if on_gpu:
        torch.cuda.synchronize()
    labelling = clock() - started

    def step(most: int = 1) -> int:
        del most
        phase.step()
        return 1

    bunch = bunches(options.steps)
    captured = stepper(lambda: _ignore(phase.step()), phase.generators, bunch=bunch) if on_gpu else nullcontext(step)
    with captured as steps:
        make(steps, WARM_UP + 2 * bunch if on_gpu else 1)
        times = [milliseconds(steps, options.steps, device) for _ in range(REPEATS)]
    numbers = {"ms": round(median(times), 3), "labelled_a_second": round(len(images) / labelling, 1)}
    numbers["host_gib"] = round((anonymous_bytes() - before) / 2**30, 3)
    if on_gpu:
        numbers["gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    return numbers


def milliseconds(steps: Stepper, count: int, device: torch.device) -> float:
    """Mean time of some steps: of a GPU's clock, or of the processor's cores."""
    if device.type == "cuda":
        return _milliseconds(steps, count, device)
    started = time.process_time()
    make(steps, count)
    return 1000 * (time.process_time() - started) / count


def anonymous_bytes() -> int:
    """The memory of this process without what is mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backbone", help="as network.backbone; default: resnet50, or dtn on a CPU")
    parser.add_argument("--size", type=int, help="side of the images; default: 224, or 64 on a CPU")
    parser.add_argument("--batch", type=int, help="images in a batch; default: 64, or 16 on a CPU")
    parser.add_argument("--images", type=int, nargs="+", help="images of the domains; default: 5,000 20,000")
    parser.add_argument("--steps", type=int, help="steps timed at once; default: 50, or 3 on a CPU")
    parser.add_argument("--precision", default="auto", help="as ratp run's; default: auto")
    parser.add_argument("--folder", type=Path, help="folder for the images; default: a temporary one")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    on_gpu = torch.device(options.device).type == "cuda"
    usual = {"backbone": "resnet50", "size": 224, "batch": 64, "steps": 50, "images": [5000, 20_000]}
    small = {"backbone": "dtn", "size": 64, "batch": 16, "steps": 3, "images": [500, 2000]}
    for name, value in (usual if on_gpu else small).items():
        setattr(options, name, getattr(options, name) or value)
    options.precision = find_precision(options.precision, torch.device(options.device))
    use_precision(options.precision)
    what = f"{options.backbone}, {options.size}×{options.size}, batch {options.batch}"
    print(f"{what}, {options.device}, {options.precision}")
    print(f"{'images':>8} {'place':10} {'ms/step':>9} {'labelled/s':>11} {'GiB':>7} {'host GiB':>9}")
    numbers: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for count in options.images:
            images = random_images(Path(folder), count, options.size)
            for place in ("resident", "streamed"):
                gc.collect()
                found = measure(images, place, options)
                numbers.setdefault(count, {})[place] = found
                columns = f"{found['ms']:9.2f} {found['labelled_a_second']:11.0f} {found.get('gib', float('nan')):7.2f}"
                print(f"{count:8} {place:10} {columns} {found['host_gib']:9.3f}", flush=True)
    if options.out:
        arguments = {name: value for name, value in vars(options).items() if name not in ("out", "folder")}
        environment = describe_environment(torch.device(options.device), options.precision)
        write_json(options.out, {"numbers": numbers, "options": arguments, "environment": environment})


if __name__ == "__main__":
    main()
