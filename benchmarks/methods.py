"""Time of every method on the demo stream, one after another on an otherwise idle machine.

A run a method, seed 2022, the demo's own sizes, its source network trained anew. Prints a table; ``--out`` keeps the
numbers with device and versions, and ``tools/docs.py`` makes the column "cost" of ``docs/methods.md`` and
``ratp methods`` of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from ratp.environment import describe_environment
from ratp.files import write_json
from ratp.methods import METHODS
from ratp.plan import RunRequest, resolve
from ratp.run import Run


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="names; default: all")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args()
    seconds: dict[str, float] = {}
    plans = {name: resolve(RunRequest("demo", method=name, device=options.device)) for name in options.methods}
    for name, plan in plans.items():
        with tempfile.TemporaryDirectory() as place:
            run = Run(plan, Path(place) / "run")
            started = time.perf_counter()
            run.execute()
            seconds[name] = round(time.perf_counter() - started, 2)
        print(f"{name:12} {seconds[name]:8.1f} s", flush=True)
    if options.out:
        environment = describe_environment(next(iter(plans.values())).device)
        write_json(options.out, {"seconds": seconds, "stream": "demo", "seed": 2022, "environment": environment})


if __name__ == "__main__":
    main()
