"""``ratp demo``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from ratp.cli import options as opt
from ratp.cli.console import parse_devices, parse_jobs, print_json, say, say_layout, stderr, stdout
from ratp.cli.runs import fail, prepare_all, resolve_all, split
from ratp.errors import RatpError
from ratp.runs.record import RunRecord

DEMO_METHODS = ("source-only", "ratp")


def demo(
    seeds: Annotated[
        list[str] | None, typer.Option("--seed", metavar="N", help="Seed; repeatable. Default 2022.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path("runs/demo"),
    probe: opt.Probe = True,
    epochs: opt.Epochs = None,
    steps: opt.Steps = None,
    batch: opt.Batch = None,
    size: opt.Size = None,
    backbone: opt.Backbone = None,
    lr: opt.LearningRate = None,
    memory: opt.Memory = None,
    device: opt.Device = "auto",
    jobs: opt.Jobs = "auto",
    dry_run: opt.DryRun = False,
    quiet: opt.Quiet = False,
    json_: opt.Json = False,
) -> None:
    """Compare RaTP with source-only, which never adapts, on built-in images. Several seeds run side by side."""
    from ratp.cli.planned import show_plan
    from ratp.cli.progress import follow, follow_all
    from ratp.reports.page import write_report
    from ratp.reports.tables import print_report
    from ratp.runs.directory import check_folder
    from ratp.runs.request import RunRequest
    from ratp.studies.execute import find_executor

    problems: list[str] = []
    at_once = parse_jobs(jobs, problems)
    first, devices = parse_devices(device, "auto", problems)
    given = {"epochs": epochs, "steps": steps, "batch": batch, "size": size, "lr": lr, "memory": memory}
    changes = opt.parse_changes(None, {**given, "backbone": backbone}, problems)
    requests = [
        RunRequest(method=m, seed=s, changes=changes, device=first) for s in seeds or ["2022"] for m in DEMO_METHODS
    ]
    plans = resolve_all(requests, problems)
    runs = prepare_all(plans, [out / f"{plan.method.name}-{plan.seed}" for plan in plans], probe=probe)
    one_by_one = len(runs) == len(DEMO_METHODS) and at_once is None and "," not in device
    if one_by_one and not dry_run:  # of several, the others go on
        for current in runs:
            check_folder(current.folder, current.config)
    planned = []
    if dry_run or not (quiet or json_):
        planned = show_plan(runs, stderr(), at_once=at_once, apart=not one_by_one, dry=dry_run, json_=json_)
    if dry_run:
        return
    if one_by_one:
        for current, item in zip_longest(runs, planned):
            follow(current, stderr(), quiet=quiet or json_, weights=item.weights if item else None)
        results: list[RunRecord | RatpError] = [current.record() for current in runs]
    else:
        executor = find_executor(devices=devices, on_layout=None if quiet or json_ else say_layout)
        results = follow_all(runs, stderr(), quiet=quiet or json_, at_once=at_once, on=executor)
    records, failed = split(runs, results)
    page = write_report(records, out / "report") if records else None
    if json_:
        print_json({"runs": [record.to_json() for record in records], "report": str(page) if page else None})
    elif not quiet and records:
        print_report(records, stdout())
        say(_in_short(records))
        say(f"Report: {page}")
        say("Next: ratp run folders --source day/ --targets rain/ night/  (your own images)")
    fail(failed)


def _in_short(records: Sequence[RunRecord]) -> str:
    """Says what the demo shows: the mean accuracies of both methods before and after the training on a domain."""
    lines = ["\nIn short, the share of images that the model gets right is on average:"]
    for name in DEMO_METHODS:
        averages = [record.matrix.averages() for record in records if record.method == name]
        if averages:
            before, after = (mean(row[metric] for row in averages) for metric in ("TDG", "TDA"))
            lines.append(f"  {name:12} {before:.0f} % before it trains on a domain, {after:.0f} % right after")
    return "\n".join(lines)
