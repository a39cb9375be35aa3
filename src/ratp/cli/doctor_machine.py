"""The part of ``ratp doctor`` that looks at the machine: versions, processor, memory, GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import torch

from ratp import kernels
from ratp.cli.data_progress import size_text
from ratp.cli.findings import Finding
from ratp.data.image_file import free_memory
from ratp.environment import code_hash, device_name, package_version
from ratp.precision import Precision, find_precision
from ratp.version import __version__

LEAST_FREE_MEMORY = 1 << 30
_DRIVER = Path("/proc/driver/nvidia/version")
_NEEDED = re.compile(r"([A-Za-z0-9_.-]+)>=([\d.]+)$")


def machine() -> Iterator[Finding]:
    """All there is to say about it."""
    yield Finding(
        "ratp", f"{__version__} (code {code_hash()[:12]}), Python {platform.python_version()}, {platform.system()}"
    )
    yield from versions(importlib.metadata.requires("ratp") or [])
    yield Finding("processor", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    free = free_memory()
    advice = "end other programs, or run fewer at once: --jobs 1"
    yield Finding("memory", f"{size_text(free)} free", free >= LEAST_FREE_MEMORY, advice)
    yield from _gpus()


def versions(needs: list[str]) -> Iterator[Finding]:
    """Whether what is needed is installed, and not too old.

    Args:
        needs: As the package states them, e.g. ``torch>=2.10``; extras are looked at without being needed.
    """
    good = []
    for name, least in (match.groups() for need in needs if (match := _NEEDED.match(need))):
        version = package_version(name)
        if version is None:
            yield Finding(name, "missing", ok=False, advice=f"pip install '{name}>={least}'", blocks=True)
        elif _numbers(version) < _numbers(least):
            found = f"{version}, too old: {least} is needed"
            yield Finding(name, found, ok=False, advice=f"pip install --upgrade '{name}>={least}'", blocks=True)
        else:
            good.append(f"{name} {version}")
    if good:
        yield Finding("packages", ", ".join(good))
    extras = [need.partition(";")[0].strip() for need in needs if "extra ==" in need and '"dev"' not in need]
    if extras:
        yield Finding("optional", ", ".join(f"{name} {package_version(name) or 'is not installed'}" for name in extras))


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers a version begins with."""
    return tuple(int(part) for part in re.match(r"\d*(\.\d+)*", version)[0].split(".") if part)  # type: ignore[index]


def _gpus() -> Iterator[Finding]:
    driver = _driver()
    if not torch.cuda.is_available():
        if driver is None:
            yield Finding("gpu", "none; runs use the processor")
        else:
            found = f"driver {driver} is here, but torch {torch.__version__} finds no GPU"
            yield Finding("gpu", found, ok=False, advice="install a torch made for CUDA: https://pytorch.org")
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(torch.device("cuda", index), driver)


def _gpu(device: torch.device, driver: str | None) -> Finding:
    name = f"cuda:{device.index}"
    try:
        free, total = torch.cuda.mem_get_info(device)
        precisions = dict.fromkeys(find_precision(asked, device) for asked in get_args(Precision))
        parts = [
            device_name(device),
            f"driver {driver}" if driver else "",
            f"{size_text(free)} of {size_text(total)} free",
            "/".join(precisions),
            "CUDA graphs" if _captures(device) else "no CUDA graphs: slower",
            "kernels" if kernels.usable(device) else "no kernels of ours: slower",
        ]
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        return Finding(name, reason, ok=False, advice="use another with --device, or update the driver")
    return Finding(name, ", ".join(part for part in parts if part))


def _captures(device: torch.device) -> bool:
    """Whether a CUDA graph can be recorded and replayed."""
    try:
        with torch.cuda.device(device):
            value = torch.zeros(1, device=device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                value += 1
            graph.replay()
            return float(value) == 1.0
    except RuntimeError:
        return False


def _driver() -> str | None:
    """Version of NVIDIA's driver; None: there is none."""
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else "of an unknown version"
