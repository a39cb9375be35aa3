"""Methods that came after RaTP, next to it on the same orders: tables from the files in results/."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratp.evaluation.matrix import METRICS, Metric, paired
from ratp.reports.summary import summarise_known
from ratp.reports.tables import with_deviation
from ratp.runs.record import RunRecord, read_run
from ratp.streams.stream import StreamSpec
from reproducibility import counts, planned

ROOT = Path(__file__).parents[1]
RATP, OURS = "ratp", "arc"
LATER = (OURS, "codag", "mpm")

# Runs of one method by order and seed.
Runs = Mapping[tuple[tuple[str, ...], int], RunRecord]


def complete_runs(folder: Path, method: str) -> list[RunRecord]:
    """The finished runs of a method in a folder."""
    found = [read_run(path) for path in sorted(folder.glob("*.json"))]
    return [run for run in found if run.method == method and run.matrix.complete]


def runs_of(spec: StreamSpec, method: str) -> Runs:
    """The runs of a method on a benchmark."""
    found = complete_runs(ROOT / "results" / spec.name, method)
    return {(run.matrix.domains, run.seed): run for run in found if counts(run)}


def order_table(spec: StreamSpec) -> str:
    """Every order on which a later method was run: averages, and RaTP's."""
    found = {name: runs_of(spec, name) for name in (RATP, *LATER)}
    lines = ["| order | method | seeds | TDG | TDA | FA |", "|---|---|---:|---:|---:|---:|"]
    orders = dict.fromkeys(order for name in LATER for order, _ in found[name])
    for order in sorted(orders, key=list(spec.orders.values()).index):
        for name, runs in found.items():
            some = [run for (other, _), run in runs.items() if other == order]
            if some:
                cells = (_mean([run.matrix.average(metric) for run in some]) for metric in METRICS)
                lines.append(f"| {'>'.join(order)} | `{name}` | {len(some)} | {' | '.join(cells)} |")
    return "\n".join(lines) if orders else "Not run yet."


def lead_table(spec: StreamSpec) -> str:
    """By how much each later method is ahead of RaTP, paired by order and seed."""
    base = runs_of(spec, RATP)
    lines = ["| method | orders and seeds in common | TDG | TDA | FA |", "|---|---:|---:|---:|---:|"]
    for name in LATER:
        runs = runs_of(spec, name)
        common = [key for key in runs if key in base]
        if common:
            cells = " | ".join(_lead(runs, base, metric) for metric in METRICS)
            lines.append(f"| `{name}` | {len(common)} | {cells} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def trial_table(spec: StreamSpec) -> str:
    """What was tried with the method of this package: runs with other settings than today's, below those with them."""
    usual = complete_runs(ROOT / "results" / spec.name, OURS)
    trials = complete_runs(ROOT / "results" / spec.name / "trials", OURS)
    lines = ["| order, seed | settings other than ARC's | TDG | TDA | FA |", "|---|---|---:|---:|---:|"]
    for run in sorted([*usual, *trials], key=lambda run: (run.matrix.domains, run.seed, len(_changes(run)))):
        changes = ", ".join(f"`{name}={value}`" for name, value in _changes(run).items())
        averages = " | ".join(f"{run.matrix.average(metric):.1f}" for metric in METRICS)
        lines.append(f"| {'>'.join(run.matrix.domains)}, {run.seed} | {changes or '–'} | {averages} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def _changes(run: RunRecord) -> dict[str, Any]:
    """The switches of a run that are not today's; those of the class mix count only if there is one."""
    today = planned(run.config["stream"], run.matrix.domains, run.method, run.seed, "official").decisions()["switches"]
    there = {name: value for name, value in run.config["switches"].items() if today.get(name) != value}
    if run.config["switches"]["class_mix"] == "uniform":
        there.pop("mix_smoothing", None)
    return there


def shift_table() -> str:
    """Accuracies on a stage's own images before and after it, by method, target and label shift."""
    numbers = json.loads((ROOT / "benchmarks" / "label_shift.json").read_text())["numbers"]
    kinds = list(next(iter(next(iter(numbers.values())).values())))
    lines = [f"| method | target | {' | '.join(kinds)} |", f"|---|---|{'---:|' * len(kinds)}"]
    for target in next(iter(numbers.values())):
        for variant, found in numbers.items():
            cells = (f"{before:.0f} → {after:.0f}" for before, after in found[target].values())
            name, _, change = variant.partition(", ")
            label = f"`{name}`, `{change}`" if change else f"`{name}`"
            lines.append(f"| {label} | {target} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    return with_deviation(summarise_known(values))


def _lead(runs: Runs, base: Runs, metric: Metric) -> str:
    """The mean difference with its 95 % interval, which takes two values."""
    ours, theirs = ({key: run.matrix.average(metric) for key, run in some.items()} for some in (runs, base))
    found = paired(ours, theirs)
    return _signed(found.mean) + (f" ± {found.half_width:.1f}" if not found.is_single else "")


def _signed(difference: float) -> str:
    """A difference with its sign, and a real minus."""
    return f"{round(difference, 1) + 0.0:+.1f}".replace("-", "−")
