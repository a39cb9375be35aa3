"""What runs are going to do, and how long it takes: printed before they do it, and all that ``--dry-run`` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ratp._core.environment import device_name, usable_cores
from ratp.cli.console import print_json, size_text, stdout
from ratp.errors import RatpError, brief
from ratp.executors.layout import Layout
from ratp.networks.backbones import is_pretrained
from ratp.networks.network import Network
from ratp.reports.tables import duration
from ratp.runs import QUICK
from ratp.runs.estimate import Estimate, estimate
from ratp.runs.plan import RunPlan
from ratp.runs.run import Run
from ratp.streams.stream import Stream

HOUR = 3600.0
# A small network makes so many steps sooner than they can be estimated.
_STEPS_TOO_FEW = 200


class Planned:
    """A run with its estimate; there is none if the run is complete, or if measuring fails."""

    def __init__(self, run: Run, *, thorough: bool, measuring: bool = True) -> None:
        self.run, self.problem = run, ""
        self.images = [(name, images) for name, images, _ in _counts(run.stream)]
        self.estimate: Estimate | None = None
        self.first = _first_stage(run)
        recipe, stages = run.plan.recipe, len(run.plan.order) - self.first
        is_short = recipe.epochs * recipe.steps * stages < _STEPS_TOO_FEW and not is_pretrained(recipe.network.backbone)
        if not stages or (is_short and not thorough):
            return
        try:
            self.estimate = estimate(
                run.plan,
                run.stream,
                probe=run.options.probe,
                reuse_source=run.options.reuse_source,
                first=self.first,
                measuring=measuring,
            )
        except (RatpError, RuntimeError, ValueError, TypeError, AttributeError) as error:  # perhaps of a custom method
            self.problem = brief(error) if isinstance(error, RatpError) else str(error).partition("\n")[0]

    @property
    def weights(self) -> list[float] | None:
        """The seconds of every stage, those done before included as nothing."""
        if self.estimate is None:
            return None
        return [0.0] * self.first + [stage.cost.wall for stage in self.estimate.stages]

    def to_json(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        run, found = self.run, self.estimate
        stream, plan = run.stream, run.plan
        parameters, trained = _parameters(run)
        about: dict[str, Any] = {
            "folder": str(run.folder),
            "stream": plan.spec.name,
            "method": plan.method.name,
            "preset": plan.preset,
            "seed": plan.seed,
            "domains": [{"name": name, "train": images, "test": tests} for name, images, tests in _counts(stream)],
            "classes": list(stream.classes),
            "network": {"backbone": plan.recipe.network.backbone, "parameters": parameters, "trained": trained},
            "size": plan.recipe.size,
            "weights": plan.weights.name if plan.weights else None,
            "device": str(plan.device),
            "threads": torch.get_num_threads(),
            "stages_done": self.first,
        }
        if found is None:
            return about | {"seconds": 0.0 if self.first == len(plan.order) else None}
        stages = [
            {"domain": item.domain, "steps": item.steps, "seconds": round(item.cost.wall, 1)} for item in found.stages
        ]
        return about | {
            "stages": stages,
            "steps": found.steps,
            "seconds": round(found.cost.wall, 1),
            "cpu_seconds": round(found.cost.cpu, 1),
            "memory_bytes": found.memory,
            "reuses_source": found.reused,
        }


def _counts(stream: Stream) -> list[tuple[str, int, int | None]]:
    """The images to train on and to test on, by domain; None: it has no labels."""
    images = [len(stream.source), *map(len, stream.targets)]
    return list(zip(stream.order, images, stream.test_counts, strict=True))


def _first_stage(run: Run) -> int:
    """The first stage that remains to be trained."""
    stages = 0
    with suppress(RatpError):
        stages = run.matrix.stages
    mark = run.config.get("after")
    return max(stages, int(mark["stages"]) if mark else 0)


def _parameters(run: Run) -> tuple[int, int]:
    """How many numbers the networks of a run have, and how many of them train."""
    networks = [value for value in vars(run.method).values() if isinstance(value, Network)][:1]
    found = [parameter for network in networks for parameter in network.parameters()]
    return sum(p.numel() for p in found), sum(p.numel() for p in found if p.requires_grad)


def seconds_of(planned: Sequence[Planned], at_once: int | None, *, apart: bool) -> float:
    """The seconds of all runs: one after another, or ``apart``, each on a core of its own."""
    costs = [item.estimate.cost for item in planned if item.estimate is not None]
    if not apart or len(planned) == 1:
        return sum(cost.wall for cost in costs)
    cores = min(at_once or usable_cores(), len(planned), usable_cores())
    return max(sum(cost.cpu for cost in costs) / cores, max((cost.cpu for cost in costs), default=0.0))


def print_plan(planned: Sequence[Planned], seconds: float, console: Console) -> None:
    """Prints the plan of some runs on one stream."""
    first = planned[0]
    run, plan, stream = first.run, first.run.plan, first.run.stream
    parts = []
    for name, images, tests in (item for item in _counts(stream) if item[0] not in stream.gone):
        tested = "no labels" if tests is None else f"{tests:,} to test" if tests != images else "tested on the same"
        parts.append(f"{name}: {images:,} images to train, {tested}")
    classes = ", ".join(stream.classes[:7]) + (", …" if len(stream.classes) > 7 else "")
    parameters, trained = _parameters(run)
    network = f"{plan.recipe.network.backbone}, {_millions(parameters)} parameters"
    network += f", {_millions(trained)} of them trained" if trained != parameters else ""
    size, weights = plan.recipe.size, plan.weights.name if plan.weights else "adopted" if plan.adopted else "random"
    methods = dict.fromkeys(item.run.plan.method.name for item in planned)
    seeds = dict.fromkeys(str(item.run.plan.seed) for item in planned)
    device = f"{plan.device.type}: {device_name(plan.device)}"
    device += f", {torch.get_num_threads()} threads" if plan.device.type == "cpu" else ""
    lines = {
        "domains": "\n".join(parts),
        "classes": f"{len(stream.classes)}: {classes}",
        "method": f"{', '.join(methods)} ({plan.preset}), seed {', '.join(seeds)}",
        "network": f"{network}\n{size}×{size} pixels, initial weights: {weights}",
        "device": device,
        "steps": _steps(planned),
        "time": _time(planned, seconds),
    }
    if first.estimate is not None:
        lines["memory"] = f"about {size_text(max(i.estimate.memory for i in planned if i.estimate))} a run"
    for head, text in lines.items():
        for number, line in enumerate(text.split("\n")):
            console.print(f"[bold]{'' if number else head:<8}[/] {escape(line)}", soft_wrap=True)
    advise(plan, seconds, console)


def advise(plan: RunPlan, seconds: float, console: Console) -> None:
    """Says what would be quicker, if runs like this take long on a processor."""
    if seconds > HOUR and plan.device.type == "cpu":
        quicker = "" if plan.preset == QUICK else f"--preset {QUICK}, "
        console.print(
            f"[yellow]That is long for a processor. Quicker: {quicker}a smaller --size or --backbone,[/]\n"
            f"[yellow]fewer epochs (--epochs {max(plan.recipe.epochs // 6, 1)}), fewer images, or a GPU.[/]",
            soft_wrap=True,
        )


def _steps(planned: Sequence[Planned]) -> str:
    recipe = planned[0].run.plan.recipe
    each = f"{recipe.epochs} epoch{'s' * (recipe.epochs != 1)} of {recipe.steps} per stage, batch {recipe.batch}"
    found = [item.estimate for item in planned if item.estimate is not None]
    if not found:
        return each
    first = min(item.first for item in planned)
    only = f", only on {', '.join(planned[0].run.stream.order[first:])}" if first else ""
    reused = ", reusing a source network" if any(item.reused for item in found) and not first else ""
    reused = ", none of them on the source" if planned[0].run.plan.adopted and not first else reused
    return f"{each}; {sum(item.steps for item in found):,} in all{only}{reused}"


def _time(planned: Sequence[Planned], seconds: float) -> str:
    if all(item.first == len(item.run.plan.order) for item in planned):
        return "none: complete already"
    if problem := next((item.problem for item in planned if item.problem), ""):
        return f"cannot be estimated ({problem})"
    if not any(item.estimate for item in planned):
        return "short"
    runs = f", {len(planned)} runs" if len(planned) > 1 else ""
    stages = planned[0].estimate.stages if planned[0].estimate and not runs else ()
    apart = ", ".join(f"{stage.domain} {about_time(stage.cost.wall)}" for stage in stages)
    return f"about {about_time(seconds)}{runs}" + (f" ({apart})" if len(stages) > 1 else "")


def about_time(seconds: float) -> str:
    """A time that is not more exact than an estimate can be."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < HOUR else duration(seconds)


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e5 else f"{number:,}"


def show_plan(
    runs: Sequence[Run],
    console: Console,
    *,
    at_once: int | None = None,
    apart: bool,
    dry: bool,
    json_: bool,
    layout: Layout | None = None,
) -> list[Planned]:
    """Estimates runs on one stream and prints their plan; a dry run prints it to standard output, perhaps as JSON.

    If the runs get processes, nothing is measured here: MPS starts before this process uses the GPU.
    """
    measuring = dry or layout is None or not layout.has_processes
    planned = [Planned(run, thorough=dry, measuring=measuring) for run in runs]
    seconds = seconds_of(planned, at_once, apart=apart)
    if dry and json_:
        shown = [item.to_json() for item in planned]
        print_json(shown[0] if len(shown) == 1 else {"runs": shown, "seconds": round(seconds, 1)})
    elif not json_:
        print_plan(planned, seconds, stdout() if dry else console)
        if dry and layout is not None:
            stdout().print(layout.text, markup=False, soft_wrap=True)
    return planned
