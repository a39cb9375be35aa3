"""Time and memory of labelling, herding and evaluation as a domain grows.

Random clusters of unit features stand for a domain, random images of 32×32 pixels for what is evaluated, by a DTN: a
quarter as wide on a CPU as on a GPU. Labelling is T2PL as published, and its kNN multiplies every sample with every one
of half as many fit samples: this product, the one part that grows with the square, is measured apart as well. All else
should cost the same per sample at every size. Memory is the most that was held beyond the inputs. Prints a table;
``--out`` keeps the numbers with device and versions.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.data.domain import LabelledDomain
from ratp.evaluation.accuracy import accuracy
from ratp.functional.numerics import full_precision
from ratp.functional.pseudo_labels import T2PLConfig, t2pl
from ratp.networks.network import Network, NetworkConfig
from ratp.training.memory import Memory
from ratp.training.recipe import Recipe, Scaling, classify

CLASSES = 10
CAPACITY = 200
CPU_SAMPLES = 10_000, 31_623, 100_000
GPU_SAMPLES = *CPU_SAMPLES, 316_228, 1_000_000
WARM_UP = 2_000
PRODUCT_ROWS = 640
MIB = 2**20


def clusters(count: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features of unit length around a centre a class, and the probabilities of a classifier that errs at times."""
    generator = torch.Generator(device).manual_seed(0)
    centres = F.normalize(torch.randn(CLASSES, dim, generator=generator, device=device), dim=1)
    features = torch.randn(count, dim, generator=generator, device=device).mul_(1.5 / dim**0.5)
    for rows in torch.arange(count, device=device).split(2**16):
        features[rows] = F.normalize(features[rows] + centres[rows % CLASSES], dim=1)
    return features, (12 * features @ centres.T).softmax(dim=1)


class Predictor:
    """As much of a method as evaluation asks for."""

    def __init__(self, device: torch.device) -> None:
        recipe = Recipe()
        width = 1.0 if device.type == "cuda" else 0.25
        self.network = Network(NetworkConfig(width=width), CLASSES).on(device)
        self.scaling = Scaling(recipe.mean, recipe.std, device)

    def predict(self, images: Tensor) -> Tensor:
        """Logits of uint8 images."""
        return classify(self.network, images, self.scaling)


def measure_all(count: int, dim: int, device: torch.device) -> dict[str, dict[str, float]]:
    """The numbers of every part for one size."""
    found = measure_on_features(count, dim, device) | {"evaluation": measure_evaluation(count, device)}
    for numbers in found.values():
        numbers["us_per_sample"] = 1e6 * numbers["seconds"] / count
        if "peak_mib" in numbers:
            numbers["kib_per_sample"] = 1024 * numbers["peak_mib"] / count
    return found


def measure_on_features(count: int, dim: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Labelling, its product alone, and herding."""
    features, probabilities = clusters(count, dim, device)
    labelling = measure_memory(lambda: t2pl(features, probabilities, T2PLConfig()), device)
    product = measure_memory(lambda: multiply(features, features[: count // 2]), device)
    product["gflop_per_s"] = 2 * count * (count // 2) * dim / product["seconds"] / 1e9
    labels = probabilities.argmax(dim=1)
    stand_ins = torch.zeros(count, 3, 1, 1, dtype=torch.uint8, device=device)
    memory = Memory(CAPACITY, CLASSES, device)
    herding = measure_memory(lambda: memory.add(stand_ins, labels, features, "herding"), device)
    return {"labelling": labelling, "  product of its kNN": product, "herding": herding}


def measure_evaluation(count: int, device: torch.device) -> dict[str, float]:
    """Images stay on the host, as those of a run do."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    domain = LabelledDomain("random", images, labels, tuple(map(str, range(CLASSES))))
    predictor = Predictor(device)
    return measure_memory(lambda: accuracy(predictor, domain), device)


def multiply(queries: Tensor, points: Tensor) -> None:
    """The bare product of a kNN search, some rows at a time."""
    result = queries.new_empty(PRODUCT_ROWS, len(points))
    with full_precision(queries.device):
        for start in range(0, len(queries), PRODUCT_ROWS):
            rows = queries[start : start + PRODUCT_ROWS]
            torch.mm(rows, points.T, out=result[: len(rows)])


def measure_memory(work: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds, and the most memory held: beyond what was held before, and in all."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        forget_peak()
        before = resident("VmRSS")
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM")
    numbers = {"seconds": seconds, "cpu_seconds": cpu_seconds}
    if peak:
        numbers |= {"peak_mib": max(peak - before, 0) / MIB, "peak_mib_with_inputs": peak / MIB}
    return numbers


def forget_peak() -> None:
    """Resets the kernel's peak-memory counter of this process.

    What is free already goes back to the system first: kept for later use, it would hide as much of what is taken next.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim:
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def resident(name: str) -> int:
    """Bytes of memory this process holds (VmRSS) or held at most (VmHWM); 0 where the system does not tell."""
    place = Path("/proc/self/status")
    lines = place.read_text().splitlines() if place.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, nargs="+", help="sizes; default: to 100,000, on CUDA to a million")
    parser.add_argument("--dim", type=int, default=256, help="length of a feature; default: 256")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    device = torch.device(options.device)
    options.samples = options.samples or list(GPU_SAMPLES if device.type == "cuda" else CPU_SAMPLES)
    measure_all(WARM_UP, options.dim, device)

    print(f"{options.dim} dimensions, {CLASSES} classes, {device}, {torch.get_num_threads()} threads")
    print(f"{'part':22} {'samples':>9} {'seconds':>9} {'µs/sample':>10} {'peak MiB':>9} {'KiB/sample':>11}")
    numbers: dict[str, dict[str, dict[str, float]]] = {}
    for count in options.samples:
        for part, found in measure_all(count, options.dim, device).items():
            numbers.setdefault(part.strip(), {})[str(count)] = {name: round(v, 4) for name, v in found.items()}
            memory = found.get("peak_mib", float("nan")), found.get("kib_per_sample", float("nan"))
            print(
                f"{part:22} {count:9,} {found['seconds']:9.3f} {found['us_per_sample']:10.2f} "
                f"{memory[0]:9.1f} {memory[1]:11.3f}",
                flush=True,
            )
    if options.out:
        arguments = {name: value for name, value in vars(options).items() if name != "out"}
        write_json(options.out, {"numbers": numbers, "options": arguments, "environment": describe_environment(device)})


if __name__ == "__main__":
    main()
