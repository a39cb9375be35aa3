"""What a stage does to the accuracy on its own images if some classes are rare or missing there.

A method is trained on MNIST with a network half as wide as DTN, and then on MNIST-M or SVHN: as they are, and thinned
by every kind of ``label_shift``. Each stage starts from the same trained source model. Needs the images of ``digits``
(``$RATP_DATA``). Prints the numbers and writes ``benchmarks/label_shift.json``, of which ``tools/docs.py`` makes the
table in ``docs/explanation/beyond.md``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from guard import SHIFTS, SMALL, Case, copy_state, make_plan, part
from ratp._core.environment import describe_environment
from ratp._core.files import write_json
from ratp.config import override
from ratp.evaluation.accuracy import accuracy

SIZE = replace(
    SMALL,
    network={"network.backbone": "dtn", "network.width": 0.5},
    source={"epochs": 10, "steps": 120},
    images=3000,
    switches={name: {"randmix.kernel_sizes": "3,5"} for name in ("ratp", "arc")},
)
CASE = Case("digits", "default", ("pacs", ("P",)), (), SIZE)
TARGETS = ("MM", "SN")
VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "ratp": ("ratp", {}),
    "ratp, t2pl.class_mix=em": ("ratp", {"t2pl.class_mix": "em"}),
    "arc, class_mix=uniform": ("arc", {"class_mix": "uniform"}),
    "arc": ("arc", {}),
}
MEASURED = 1000  # images of a stage


def measure(variant: str) -> dict[str, dict[str, list[float]]]:
    """Accuracies before and after each stage, by target and shift, with one thread."""
    torch.set_num_threads(1)
    name, changes = VARIANTS[variant]
    plan = make_plan(CASE, name, SIZE.stage, "cpu")
    plan = replace(plan, config=override(plan.config, changes))
    stream = plan.load_stream()
    learner = make_plan(CASE, name, SIZE.source, "cpu").build_method(stream)
    learner.fit_source(stream.source)
    state = copy_state(learner)
    found: dict[str, dict[str, list[float]]] = {target: {} for target in TARGETS}
    for kind in ("none", *SHIFTS):
        shifted = replace(plan, recipe=override(plan.recipe, {"label_shift": kind})).load_stream()
        for target, answers in zip(shifted.targets, shifted.answers, strict=True):
            if target.name in TARGETS:
                assert answers is not None
                method, own = plan.build_method(stream), part(answers, MEASURED)
                method.load_state(state)
                before = accuracy(method, own)
                method.adapt(target)
                found[target.name][kind] = [round(before, 1), round(accuracy(method, own), 1)]
    return found


def main() -> None:
    """Measures, prints and keeps the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    found = {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(measure, variant): variant for variant in VARIANTS}
        for done in as_completed(running):
            found[running[done]] = done.result()
            print(running[done], json.dumps(done.result()), flush=True)
    numbers = {variant: found[variant] for variant in VARIANTS}
    write_json(options.out, {"numbers": numbers, "environment": describe_environment(torch.device("cpu"))})


if __name__ == "__main__":
    main()
