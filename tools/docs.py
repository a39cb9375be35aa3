"""Writes the generated parts of README and docs: tables from results/, the list of RaTP's switches.

A generated part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from textwrap import wrap
from typing import Any

from ablations import ablation_tables, sensitivity_tables
from beyond import lead_table, order_table, shift_table, trial_table
from choice import FIGURE, best_methods, draw
from published import SPELLING, printed
from ratp.config import as_dict, switches
from ratp.evaluation.matrix import METRICS
from ratp.guard.watch import LIMITS
from ratp.methods import METHODS
from ratp.methods.ratp import RaTP
from ratp.reports.markup import comparison_markdown
from ratp.reports.summary import summarise_known
from ratp.reports.tables import with_deviation
from ratp.runs.plan import preset_config
from ratp.runs.record import RunRecord, read_run
from ratp.streams.benchmarks import DIGITS, PACS
from ratp.streams.stream import StreamSpec
from reproducibility import PROTOCOLS, SAME_NETWORK, counts

ROOT = Path(__file__).parents[1]
GUARD_KINDS = {
    "good": "real domains that the model knew in part",
    "strange": "real domains that the model hardly knew",
    "harmful": "real domains, to its harm",
    "hot": "real domains, learning rate far too large",
    "noise": "noise",
    "blank": "blank images",
    "known class": "a single class of the source",
    "one class": "a single class of a new domain",
    "unrelated": "unrelated images",
}


def demo_runs() -> list[RunRecord]:
    """All runs on the demo stream that were kept, in the order of the methods."""
    runs = [read_run(path) for path in sorted((ROOT / "results" / "demo").glob("*.json"))]
    return sorted(runs, key=lambda run: (list(METHODS).index(run.method), run.seed))


def demo_table() -> str:
    """RaTP and source-only on the demo stream."""
    runs = [run for run in demo_runs() if run.method in ("source-only", "ratp")]
    return comparison_markdown(sorted(runs, key=lambda run: (run.method != "source-only", run.seed)))


def costs(number: str) -> dict[str, float]:
    """Time (``order``) or memory of every method on the demo stream, source-only's being 1."""
    numbers = json.loads((ROOT / "benchmarks" / "costs-demo-cpu.json").read_text())["numbers"]
    least = numbers["source-only"][number]
    return {name: round(numbers[name][number] / least, 1) for name in METHODS if number in numbers.get(name, {})}


def methods_table() -> str:
    """Every method: family, needs, cost and what it reaches on the demo stream."""
    time, memory = costs("order"), costs("memory")
    lines = [
        "| method | family | needs besides images | time | memory | TDG | TDA | FA |",
        "|---|---|---|" + "---:|" * 5,
    ]
    for method in METHODS.values():
        runs = [run for run in demo_runs() if run.method == method.name]
        numbers = [_mean([run.matrix.average(metric) for run in runs]) if runs else "–" for metric in METRICS]
        cost = [f"{found[method.name]:.1f}×" if method.name in found else "–" for found in (time, memory)]
        cells = (f"`{method.name}`", method.family, method.needs or "nothing", *cost, *numbers)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu_costs() -> str:
    """Seconds every method takes on Digits on a GPU, alone."""
    numbers = json.loads((ROOT / "benchmarks" / "costs-digits-cuda.json").read_text())["numbers"]
    lines = ["| method | source stage | target stage | order | relative to RaTP |", "|---|---:|---:|---:|---:|"]
    for name in METHODS:
        if name in numbers:
            row = numbers[name]
            times = [f"{row[part]:.1f}" for part in ("source", "target")] + [f"{row['order']:.0f}"]
            lines.append(f"| `{name}` | {' | '.join(times)} | {row['order'] / numbers['ratp']['order']:.2f}× |")
    return "\n".join(lines)


def switch_table() -> str:
    """All switches of RaTP with their values in both presets."""
    official, paper = (preset_config(RaTP, name) for name in ("official", "paper"))
    values = as_dict(paper)
    lines = ["| row | switch | official | paper | what it does |", "|---|---|---|---|---|"]
    for item in switches(official):
        cells = [_cell(as_dict(official)[item.name]), _cell(values[item.name])]
        if cells[0] != cells[1]:
            cells[1] = f"**{cells[1]}**"
        lines.append(f"| {item.doc_ref or ''} | `{item.name}` | {cells[0]} | {cells[1]} | {item.explanation} |")
    return "\n".join(lines)


# The orders of RaTP's table, by stream.
BENCHMARKS = ((DIGITS, "default"), (DIGITS, "reverse"), (PACS, "default"), (PACS, "reverse"))


def ratp_runs(spec: StreamSpec, order: tuple[str, ...]) -> list[RunRecord]:
    """RaTP's runs on an order of a benchmark that count for the paper's."""
    files = sorted((ROOT / "results" / spec.name).glob("ratp*.json"))
    return [run for run in map(read_run, files) if run.matrix.domains == order and counts(run)]


def ratp_averages() -> str:
    """RaTP's averages on the paper's orders, each with the paper's beside it."""
    lines = ["| RaTP on | seeds | TDG | TDA | FA |", "|---|---:|---:|---:|---:|"]
    for spec, name in BENCHMARKS:
        order = spec.orders[name]
        found = ratp_runs(spec, order)
        cells = []
        for metric in METRICS:
            paper = printed(spec.name, order, metric, "average", RaTP.name)
            cells.append(f"{_mean([run.matrix.average(metric) for run in found])} ({paper:.1f})")
        lines.append(f"| {spec.name} {'>'.join(order)} | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def benchmark_table() -> str:
    """RaTP on the paper's orders, each number with the paper's beside it."""
    blocks = []
    for spec, name in BENCHMARKS:
        order = spec.orders[name]
        title = f"{spec.name}, {'>'.join(order)}"
        found = ratp_runs(spec, order)
        if not found:
            blocks.append(f"**{title}**: not run yet.")
            continue
        names = [*order, "average"]
        seeds = f"{len(found)} seeds" if len(found) > 1 else f"seed {found[0].seed}"
        lines = [f"| {title}, {seeds} | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
        for metric in METRICS:
            paper = {n: printed(spec.name, order, metric, n, RaTP.name) for n in names}
            ours = [run.matrix.metric(metric) | {"average": run.matrix.average(metric)} for run in found]
            cells = [f"{_mean([one[n] for one in ours])} ({p:.1f})" if p else "–" for n, p in paper.items()]
            lines.append(f"| {metric} | {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def ten_orders() -> str:
    """RaTP's averages on the ten orders of Digits, each with the paper's beside it."""
    lines = ["| order | TDG | TDA | FA |", "|---|---:|---:|---:|"]
    means: dict[str, tuple[list[float], list[float]]] = {metric: ([], []) for metric in METRICS}
    for name, order in DIGITS.orders.items():
        if not name.isdecimal():
            continue
        (run,) = (run for run in ratp_runs(DIGITS, order) if run.seed == 2022)
        cells = []
        for metric in METRICS:
            ours = run.matrix.average(metric)
            paper = printed(DIGITS.name, order, metric, "average", RaTP.name, "orders")
            assert paper is not None
            means[metric][0].append(ours)
            means[metric][1].append(paper)
            cells.append(f"{ours:.1f} ({paper:.1f})")
        lines.append(f"| {name} {'>'.join(order)} | {' | '.join(cells)} |")
    averages = [f"{mean(ours):.1f} ({mean(paper):.1f})" for ours, paper in means.values()]
    return "\n".join([*lines, f"| mean of all | {' | '.join(averages)} |"])


def method_averages(spec: StreamSpec, order_name: str = "default") -> str:
    """Averages of every method on an order of a benchmark under every protocol, each with the paper's beside it."""
    order = spec.orders[order_name]
    runs = [read_run(path) for path in sorted((ROOT / "results" / spec.name).glob("*.json"))]
    runs = [run for run in runs if run.matrix.domains == order and counts(run)]
    lines = ["| method | protocol | seeds | TDG | TDA | FA |", "|---|---|---:|---:|---:|---:|"]
    missing = []
    for name, (preset, protocol) in product(METHODS, PROTOCOLS.items()):
        found = [run for run in runs if run.method == name and run.config["preset"] == preset]
        if not found:
            if preset == SAME_NETWORK and name in SPELLING:
                missing.append(f"`{name}`")
            continue
        cells = []
        for metric in METRICS:
            main = printed(spec.name, order, metric, "average", name)
            paper = printed(spec.name, order, metric, "average", name, "orders") if main is None else main
            ours = _mean([run.matrix.average(metric) for run in found])
            cells.append(ours if paper is None else f"{ours} ({paper:.1f})")
        lines.append(f"| `{name}` | {protocol} | {len(found)} | {' | '.join(cells)} |")
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    """The mean, with the standard deviation if there are several values."""
    return with_deviation(summarise_known(values))


def _trials() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "guard.json").read_text())["trials"]
    return rows


def guard_trials() -> dict[str, list[dict[str, Any]]]:
    """The stages on which the guard was measured, by what they are."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in _trials():
        kind = row["kind"]
        if kind == "good":
            kind = "harmful" if row["harmful"] else "good" if _knew(row) else "strange"
        found.setdefault(GUARD_KINDS[kind], []).append(row)
    return {kind: found[kind] for kind in GUARD_KINDS.values() if kind in found}


def _knew(row: dict[str, Any]) -> bool:
    """Whether a model knew a fifth of a domain beyond chance, or won five points from it."""
    chance = 100 / (7 if row["stream"] == "pacs" else 10)
    before, after = row["own"]
    return bool(before - chance >= (100 - chance) / 5 or after - before >= 5)


def guard_table() -> str:
    """How many stages of every kind the guard refuses."""
    lines = ["| stage on | stages | did harm | refused | harmful stages refused |", "|---|---:|---:|---:|---:|"]
    for kind, rows in guard_trials().items():
        refused, harmful = [row for row in rows if row["reasons"]], [row for row in rows if row["harmful"]]
        caught = f"{sum(bool(row['reasons']) for row in harmful)} of {len(harmful)}" if harmful else "–"
        share = f"{len(refused)} ({100 * len(refused) / len(rows):.0f} %)"
        lines.append(f"| {kind} | {len(rows)} | {len(harmful)} | {share} | {caught} |")
    return "\n".join(lines)


# Stages on trained networks by what they are; limits were chosen on the first streams, and are reported on the others.
TRAINED_KINDS = {
    "balanced targets": ("good",),
    "targets with half or few of the classes, a long tail, or 90/10": ("half", "few", "long-tail", "90/10"),
    "a single class of a target": ("one class",),
    "targets, learning rate far too large": ("hot",),
    "unrelated images": ("unrelated",),
}
CHOSEN_ON = ("trained-digits", "trained-pacs")
TRAINED_NAMES = {
    "limits were chosen on": CHOSEN_ON,
    "other sources": ("trained-digits-reverse", "trained-pacs-art"),
    "vision transformer": ("trained-vit",),
}


def guard_trained() -> str:
    """How often the guard is right with well-trained networks; worse: five points or half of what was known is lost."""
    rows = json.loads((ROOT / "benchmarks" / "guard-trained.json").read_text())["trials"]
    lines = [
        "| | stages on | stages | made it worse | of these refused | others | of these refused |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for title, streams in TRAINED_NAMES.items():
        for kind, names in TRAINED_KINDS.items():
            found = [row for row in rows if row["stream"] in streams and row["kind"] in names]
            worse = [row for row in found if row["harmful"] or _lost(row) >= 5]
            others = [row for row in found if row not in worse]
            counts = (f"{len(some)} | {sum(bool(row['reasons']) for row in some)}" for some in (worse, others))
            lines.append(f"| {title} | {kind} | {len(found)} | {' | '.join(counts)} |")
    return "\n".join(lines)


def _lost(row: dict[str, Any]) -> float:
    """By how many points a stage made the model worse on the stage's own images."""
    before, after = row.get("images", (0, 0))
    return float(before - after)


def guard_margins() -> str:
    """Every sign that decides: its limit, the lowest value on good stages and the range on the others."""
    found = guard_trials()
    lines = [f"| indicator | limit | {' | '.join(found)} |", f"|---|---:|{'---:|' * len(found)}"]
    for sign, limit in asdict(LIMITS).items():
        if sign in ("images", "source_skill", "overturned"):
            continue
        values = [[row["signs"][sign] for row in rows if sign in row["signs"]] for rows in found.values()]
        cells = [f"{min(some):.2f} to {max(some):.2f}" if some else "–" for some in values]
        lines.append(f"| `{sign}` | {limit:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def guard_recognition() -> str:
    """The sign ``recognition`` on real domains, by how much of them the model gets right."""
    rows = [row for row in _trials() if row["kind"] == "good" and "recognition" in row["signs"]]
    lines = ["| accuracy before the stage | stages | `recognition`: lowest, median, highest |", "|---|---:|---:|"]
    for low, high in pairwise((0, 20, 30, 50, 70, 100)):
        found = [row["signs"]["recognition"] for row in rows if low <= row["own"][0] < high]
        if found:
            spread = ", ".join(f"{value:.2f}" for value in (min(found), median(found), max(found)))
            lines.append(f"| {low} to {high} % | {len(found)} | {spread} |")
    return "\n".join(lines)


def alarm_tables() -> str:
    """What the drift alarm does on source images, on other domains and on few classes, and what it costs."""
    measured = json.loads((ROOT / "benchmarks" / "alarm.json").read_text())
    cases, cost = list(measured["cases"].values()), measured["costs"]
    lines = [
        "| source | accuracy | windows | `watch` | `drifted`, `foreign` | stated rate | one class | half the classes |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *map(_alarm_source, cases),
        "",
        "| source → target | accuracy | images until the alarm | missed | gradual: share at the alarm | `foreign` |",
        "|---|---:|---:|---:|---:|---:|",
        *(_alarm_target(row, target) for row in cases for target in row["delay"]),
    ]
    text = (
        f"With Tent and ResNet-50 at 96×96 pixels, `observe` of 64 images takes {cost['observe / step']:.2f} times as "
        f"long as Tent's own step, {cost['observe while drifted / step']:.2f} times while the level is `drifted`, "
        "because the alarm then also checks whether the model recognises the images. `predict` takes "
        f"{cost['predict / network']:.2f} times as long as the network alone."
    )
    return "\n".join([*lines, "", *wrap(text, 120)])


def online_costs() -> str:
    """What adapting online in a deployment costs, beside the method's own step."""
    measured = json.loads((ROOT / "benchmarks" / "online.json").read_text())
    lines = [
        f"| `observe` of 64 images, in steps of the method | known images | in negative | with a version every "
        f"{measured['save_every']} windows |",
        "|---|---:|---:|---:|",
    ]
    for name, row in measured["methods"].items():
        usual, odd, _, whole = row.values()
        lines.append(f"| {name} | {usual:.2f} | {odd:.2f} | {whole:.2f} |")
    text = (
        "CPU seconds, with ResNet-18 at 64×64 pixels (`benchmarks/online.py`); where images in negative raise the "
        "alarm (T3A), recognition is checked, too."
    )
    return "\n".join([*lines, "", *wrap(text, 120)])


def _alarm_source(row: dict[str, Any]) -> str:
    windows, few = row["source_windows"], row["unbalanced"]
    raised = windows.get("drifted", 0) + windows.get("foreign", 0)
    counts = (
        f"{sum(windows.values())} | {windows.get('watch', 0)} | {raised} | {100 * row['estimated_false_alarms']:.1f} %"
    )
    shares = " | ".join(f"{100 * share:.0f} %" for share in few.values())
    return f"| {row['stream']} {row['source']} | {next(iter(row['accuracy'].values())):.0f} % | {counts} | {shares} |"


def _alarm_target(row: dict[str, Any], target: str) -> str:
    delays, shares = ([value for value in row[name][target] if value is not None] for name in ("delay", "gradual"))
    delay = f"median {median(delays):.0f}, worst {max(delays)}" if delays else "–"
    share = f"median {100 * median(shares):.0f} %, worst {100 * max(shares):.0f} %" if shares else "–"
    missed = f"{len(row['delay'][target]) - len(delays)} of {len(row['delay'][target])}"
    cells = f"{row['accuracy'][target]:.0f} % | {delay} | {missed} | {share} | {100 * row['foreign'][target]:.0f} %"
    return f"| {row['stream']} {row['source']} → {target} | {cells} |"


def _cell(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


PARTS: dict[str, Callable[[], str]] = {
    "demo table": demo_table,
    "methods table": methods_table,
    "gpu costs": gpu_costs,
    "switches": switch_table,
    "benchmark table": benchmark_table,
    "ratp averages": ratp_averages,
    "ten orders": ten_orders,
    "digits methods": partial(method_averages, DIGITS),
    "digits reverse methods": partial(method_averages, DIGITS, order_name="reverse"),
    "pacs methods": partial(method_averages, PACS),
    "pacs reverse methods": partial(method_averages, PACS, order_name="reverse"),
    "ablations": ablation_tables,
    "sensitivity": sensitivity_tables,
    "guard table": guard_table,
    "guard margins": guard_margins,
    "guard recognition": guard_recognition,
    "guard trained": guard_trained,
    "beyond digits": partial(order_table, DIGITS),
    "beyond lead": partial(lead_table, DIGITS),
    "beyond trials": partial(trial_table, DIGITS),
    "label shift": shift_table,
    "alarm tables": alarm_tables,
    "best methods": best_methods,
    "online costs": online_costs,
}


def generate(document: str) -> str:
    """A document with its generated parts regenerated."""
    for name, make in PARTS.items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        if re.search(pattern, document, flags=re.S):
            document = re.sub(pattern, lambda m, make=make: f"{m[1]}{make().rstrip()}\n{m[2]}", document, flags=re.S)
    return document


def main() -> None:
    """Brings all documents up to date, or with ``--check`` fails if one is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a document is out of date")
    check = parser.parse_args().check
    stale = []
    kept = ROOT / "src" / "ratp" / "methods" / "cost.json"
    about = "Time of an order of the demo stream, and memory of a step, source-only's being 1; by tools/docs.py."
    content = {"about": about, "time": costs("order"), "memory": costs("memory")}
    new = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    if new != kept.read_text():
        stale.append(kept.name)
        if not check:
            kept.write_text(new)
    if not check:
        FIGURE.write_bytes(draw())
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        old = path.read_text()
        new = generate(old)
        if new != old:
            stale.append(path.name)
            if not check:
                path.write_text(new)
    if stale:
        print(f"{'out of date' if check else 'updated'}: {', '.join(stale)}")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
