"""Time of RaTP on a benchmark in all its ten orders, side by side: reading, training, labelling and measuring included.

Needs the benchmark's images (``--data`` or ``$RATP_DATA``). The runs stay in a folder, for ``ratp report``; networks
trained on a source are shared between orders that begin with it, but none is taken from earlier. Prints what ended;
``--out`` keeps the times with device and versions.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.errors import RatpError
from ratp.executors.local import run_all
from ratp.runs.events import Event, StageFinished
from ratp.runs.plan import resolve
from ratp.runs.request import RunRequest
from ratp.runs.run import Run
from ratp.streams.stream import DataOptions

ORDERS = tuple(map(str, range(1, 11)))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for the runs, new")
    parser.add_argument("--stream", default="digits", help="digits, pacs or domainnet10; default: digits")
    parser.add_argument("--orders", nargs="+", default=ORDERS, help="names of orders; default: 1 to 10")
    parser.add_argument("--seed", type=int, default=2022)
    parser.add_argument("--jobs", type=int, help="runs at once; default: as ratp run")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="NAME=VALUE, as ratp run's")
    parser.add_argument("--out", type=Path, help="file for the times, as JSON")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} exists already")
    started = time.perf_counter()
    requests = {
        order: RunRequest(
            options.stream,
            order=order,
            seed=options.seed,
            device=options.device,
            precision=options.precision,
            data=DataOptions(options.data),
            changes=dict(item.split("=", 1) for item in options.set),
        )
        for order in options.orders
    }
    plans = {order: resolve(request) for order, request in requests.items()}
    os.environ["RATP_CACHE"] = str(options.folder / "cache")  # nothing is there yet
    runs = {order: Run(plan, options.folder / order, reuse_source=True) for order, plan in plans.items()}
    names = {id(run): order for order, run in runs.items()}
    read = time.perf_counter() - started
    ends: dict[str, float] = {}

    def see(run: Run, event: Event) -> None:
        if isinstance(event, StageFinished) and event.stage == len(run.stream.order) - 1:
            ends[names[id(run)]] = time.perf_counter() - started
            print(f"order {names[id(run)]:3} {'>'.join(run.stream.order)} ended after {ends[names[id(run)]]:7.1f} s")

    layouts: list[str] = []
    results = run_all(
        list(runs.values()), at_once=options.jobs, on_layout=lambda found: layouts.append(found.text), on_event=see
    )
    print(*layouts, sep="\n")
    seconds = time.perf_counter() - started
    failed = [result for result in results if isinstance(result, RatpError)]
    if failed:
        raise failed[0]
    print(f"{len(runs)} orders of {options.stream}: {seconds:.1f} s, of which reading {read:.1f} s")
    if options.out:
        plan = next(iter(plans.values()))
        numbers = {
            "seconds": round(seconds, 1),
            "reading": round(read, 1),
            "layout": layouts,
            "ended_after": {order: round(end, 1) for order, end in ends.items()},
            "orders": {order: list(run.stream.order) for order, run in runs.items()},
        }
        arguments = {name: getattr(options, name) for name in ("stream", "seed", "jobs", "precision", "set")}
        environment = describe_environment(plan.device, plan.precision)
        write_json(options.out, {"numbers": numbers, "options": arguments, "environment": environment})


if __name__ == "__main__":
    main()
