"""Chooses how runs share a GPU: threads of one process, processes with or without MPS, or one after another.

A run with a small network leaves most of a GPU idle. Threads of one process start at once, but wait for one another
whenever one of them records a graph. Processes do not, and under MPS their kernels run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from ratp._core.environment import usable_cores
from ratp.errors import ConfigError, unknown
from ratp.networks.backbones import TIMM
from ratp.runs.plan import RunPlan
from ratp.training.recipe import Recipe

Way = Literal["threads", "processes", "mps", "off"]
WAYS = ("auto", *get_args(Way))
# Torch has 32 streams per device, and a run needs two.
MOST_IN_PROCESS = 15
# Default for runs of small networks in threads.
SMALL_ON_GPU = 8
# GFLOP of a forward pass on an image with sides of so many pixels.
_COSTS = {"dtn": (0.057, 32), "resnet18": (3.6, 224), "resnet50": (8.2, 224), "resnet101": (15.7, 224)}
# GFLOP of a batch's forward pass that a multiprocessor takes on at once: 14 runs with DTN and batch 64 fill the 132
# multiprocessors of an H200 (docs/performance.md).
_LOAD = 0.39
# Steps of a run below which it ends about as soon as a process has started.
_FEW_STEPS = 20_000
# Memory of a process that makes one run, and what it needs besides for every GFLOP of a batch.
_GIB, _GIB_PER_LOAD = 3.0, 0.05
# MPS of earlier GPUs lets processes take turns.
_FIRST_WITH_MPS = 7
_NAMES = {"mps": "processes under MPS", "processes": "processes", "threads": "threads of one process"}


@dataclass(frozen=True)
class Gpu:
    """What the choice depends on.

    Attributes:
        name: Its name.
        processors: Its multiprocessors.
        gib: Its memory.
        major: The first part of its compute capability.
    """

    name: str
    processors: int
    gib: float
    major: int

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """Describes a device, without using it."""
        found = torch.cuda.get_device_properties(device)
        return cls(found.name, found.multi_processor_count, found.total_memory / 2**30, found.major)


@dataclass(frozen=True)
class Layout:
    """How runs share a device.

    Attributes:
        way: The way; ``off`` is one after another.
        count: How many runs execute at once on each device.
        why: The reason.
        asked: Whether the user named the way.
    """

    way: Way
    count: int
    why: str
    asked: bool = False

    @property
    def has_processes(self) -> bool:
        """Whether every run has a process of its own."""
        return self.way in ("mps", "processes")

    @property
    def text(self) -> str:
        """The choice and the reason in one line."""
        how = "one after another" if self.count == 1 else f"{self.count} {_NAMES[self.way]}"
        return f"side by side: {how}: {self.why}"

    def without_mps(self, why: str) -> Layout:
        """What to do if MPS cannot be used: without it, processes would take turns."""
        if self.asked:
            return replace(self, way="processes", why=f"no MPS: {why}")
        return replace(self, way="threads", count=min(self.count, SMALL_ON_GPU), why=f"no MPS: {why}")


def check_way(way: str) -> None:
    """Raises a ConfigError unless this is a way to share a GPU."""
    if way not in WAYS:
        raise ConfigError(unknown("way to run side by side", way, WAYS))


def choose(plans: Sequence[RunPlan], gpu: Gpu, way: str = "auto", at_once: int | None = None) -> Layout:
    """Chooses how runs share a GPU.

    Args:
        plans: The runs on it.
        gpu: The GPU.
        way: One of :data:`WAYS`.
        at_once: How many runs execute at once; None to choose.
    """
    check_way(way)
    if way == "off" or at_once == 1:
        return Layout("off", 1, "as requested", asked=True)
    if way == "threads":
        most = min(at_once or threads_by_default(plans), most_in_process(plans), len(plans))
        return Layout("threads", most, "as requested", asked=True)
    if way != "auto":
        most = at_once or max(_most_processes(plans, gpu), 2)
        return Layout("mps" if way == "mps" else "processes", min(most, len(plans)), "as requested", asked=True)
    threads = min(at_once or threads_by_default(plans), most_in_process(plans), len(plans))
    processes = min(at_once or _most_processes(plans, gpu), len(plans))
    if processes == 1:
        heaviest = max((plan.recipe for plan in plans), key=_load)
        return Layout("off", 1, f"{heaviest.network.backbone} at {heaviest.size} pixels fills {gpu.name}")
    if gpu.major < _FIRST_WITH_MPS:
        return Layout("threads", threads, f"{gpu.name} has no MPS")
    if any(plan.request is None for plan in plans):
        return Layout("threads", threads, "runs made in Python stay in their process")
    if all(_steps(plan) < _FEW_STEPS for plan in plans):
        return Layout("threads", threads, "the runs have few steps")
    return Layout("mps", processes, f"small networks on {gpu.name}, with {gpu.processors} multiprocessors")


def threads_by_default(plans: Sequence[RunPlan]) -> int:
    """How many runs to execute at once in threads on a GPU: several if their networks are small."""
    return SMALL_ON_GPU if all(plan.recipe.network.backbone == "dtn" for plan in plans) else 1


def most_in_process(plans: Sequence[RunPlan]) -> int:
    """How many of these runs may share a process: one if their layers may use the process's default generator."""
    return 1 if any(plan.recipe.network.backbone.startswith(TIMM) for plan in plans) else MOST_IN_PROCESS


def _most_processes(plans: Sequence[RunPlan], gpu: Gpu) -> int:
    """How many processes with a run each a GPU takes on, by its multiprocessors, its memory and the cores."""
    load = max(_load(plan.recipe) for plan in plans)
    by_processors = int(_LOAD * gpu.processors / load)
    by_memory = int(0.9 * gpu.gib / (_GIB + _GIB_PER_LOAD * load)) if load < float("inf") else 1
    return max(min(by_processors, by_memory, usable_cores()), 1)


def _load(recipe: Recipe) -> float:
    """GFLOP of a forward pass on a batch; infinite if the backbone's are not known."""
    gflop, size = _COSTS.get(recipe.network.backbone, (float("inf"), 1))
    return gflop * (recipe.size / size) ** 2 * recipe.network.width**2 * recipe.batch


def _steps(plan: RunPlan) -> int:
    recipe = plan.recipe
    return recipe.epochs * recipe.steps * len(plan.order)
