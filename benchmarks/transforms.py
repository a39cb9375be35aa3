"""Time of the batched transforms against torchvision's, image by image, in the same process.

Writes ``benchmarks/transforms.json`` (or ``transforms-cuda.json``) with device and versions. Batches are 64
uint8 images of 227×227, results 224×224; a CPU works with one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torchvision.transforms import v2

from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.functional.transforms import CROP_FLIP, OBJECTS, Transform, TransformConfig

BATCH, INPUT, SIZE = 64, 227, 224
REPEATS = 9
PRESETS = {"objects": OBJECTS, "crop_flip": CROP_FLIP}


def image_by_image(config: TransformConfig) -> Callable[[Tensor], Tensor]:
    """The same transforms as a loop over torchvision's."""
    scale, ratio = (config.crop_scale_min, config.crop_scale_max), (config.crop_ratio_min, config.crop_ratio_max)
    steps = [
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomResizedCrop(SIZE, scale=scale, ratio=ratio, antialias=True),
        v2.RandomHorizontalFlip(config.flip),
        v2.ColorJitter(config.brightness, config.contrast, config.saturation, config.hue),
        v2.RandomGrayscale(config.greyscale),
    ]
    pipeline = v2.Compose(steps if config.hue else steps[:3])
    return lambda images: torch.stack([pipeline(image) for image in images])


def compare(config: TransformConfig, images: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Median milliseconds a batch of both ways, measured in turn."""
    transform, loop = Transform(config, SIZE), image_by_image(config)
    ways: dict[str, Callable[[], Tensor]] = {
        "batched_ms": lambda: transform(images, generator),
        "image_by_image_ms": lambda: loop(images),
    }
    if images.is_cuda:
        ways["captured_ms"] = captured(transform, images, generator)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            times[name].append(_milliseconds(way, images.device))
    numbers = {name: round(median(values[1:]), 2) for name, values in times.items()}
    numbers["ratio"] = round(numbers["image_by_image_ms"] / numbers["batched_ms"], 2)
    if images.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        transform(images, generator)
        result = BATCH * 3 * SIZE**2 * 4
        numbers["peak_in_results"] = round((torch.cuda.max_memory_allocated() - before) / result, 1)
    return numbers


def captured(transform: Transform, images: Tensor, generator: torch.Generator) -> Callable[[], Tensor]:
    """The transform as a CUDA graph that draws new numbers at each replay."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    transform(images, generator)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = transform(images, generator)

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _milliseconds(way: Callable[[], Tensor], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    way()
    wait()
    return 1000 * (time.perf_counter() - started)


def main() -> None:
    """Measures, prints and keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="where to write")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    generator = torch.Generator(device).manual_seed(0)
    shape = (BATCH, 3, INPUT, INPUT)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device)
    numbers = {name: compare(config, images, generator) for name, config in PRESETS.items()}
    name = "transforms.json" if device.type == "cpu" else "transforms-cuda.json"
    write_json(options.folder / name, {"numbers": numbers, "environment": describe_environment(device)})
    print(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
