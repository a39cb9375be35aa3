"""Run directories in the real file formats, written without the package's own writers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ratp.evaluation.matrix import Matrix
from ratp.runs.record import RunRecord, read_run

GOLDEN = ((99.0, 60.0, 40.0), (95.0, 90.0, 50.0), (92.0, 85.0, 80.0))
ORDER = ("scan", "photo", "font")
HOSTILE = ("<script>alert(1)</script>", "a_b & 100%", "$x^2$ | {y}\x1b[31m")


def write_run(
    folder: Path,
    accuracy: Sequence[Sequence[float]] = GOLDEN,
    order: Sequence[str] = ORDER,
    method: str = "ratp",
    seed: int = 0,
    stream: str = "demo",
    changed: Mapping[str, Any] | None = None,
    probes: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    samples: Mapping[str, np.ndarray] | None = None,
    passes: Mapping[str, Mapping[str, Any]] | None = None,
    **config: Any,
) -> Path:
    """Writes a run directory.

    ``probes`` holds (progress, accuracy) of target domains in their own stage, ``passes`` scores of the passes before.
    """
    folder.mkdir(parents=True)
    values = {
        "schema": 1,
        "ratp": "0.1.0",
        "stream": stream,
        "order": list(order),
        "method": method,
        "preset": "official",
        "seed": seed,
        "changed": dict(changed or {}),
        "recipe": {"epochs": 30, "batch": 64, "lr": 0.01, "betas": [0.9, 0.999]},
        "network": {"backbone": "small", "bottleneck": 256},
        "switches": {"pca": True, **(changed or {})},
        "data": {domain: f"sha-of-{domain}" for domain in order},
        **config,
    }
    (folder / "config.json").write_text(json.dumps(values))
    environment = {"python": "3.11.9", "torch": "2.10.0", "device": "cpu", "threads": 2}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "matrix.json").write_text(json.dumps(Matrix(tuple(order), tuple(map(tuple, accuracy))).to_json()))
    events: list[dict[str, Any]] = [{"event": "run_started"}]
    for stage, domain in enumerate(order):
        events.append({"event": "stage_started", "stage": stage, "domain": domain, "images": 1437})
        for progress, value in (probes or {}).get(domain, ()):
            measured = {order[0]: 97.0, domain: value}
            events.append(
                {"event": "probe", "stage": stage, "domain": domain, "progress": progress, "accuracy": measured}
            )
        if stage < len(accuracy):
            row = {name: value for name, value in zip(order, accuracy[stage], strict=True) if not math.isnan(value)}
            end = {"event": "stage_finished", "stage": stage, "domain": domain, "accuracy": row, "statistics": {}}
            streamed = {"online": passes[domain]} if domain in (passes or {}) else {}
            events.append({**end, "seconds": 10.0 + stage, **streamed})
    (folder / "journal.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if samples:
        save_file(dict(samples), folder / "samples.safetensors")
    return folder


@pytest.fixture(scope="session")
def run_in() -> Callable[..., RunRecord]:
    """Writes a run directory at a given place and reads it back."""
    return lambda folder, *args, **values: read_run(write_run(folder, *args, **values))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunRecord]:
    """Writes a run directory under the test's folder and reads it back."""
    count = 0

    def make(*args: Any, **values: Any) -> RunRecord:
        nonlocal count
        count += 1
        return read_run(write_run(tmp_path / "runs" / str(count), *args, **values))

    return make


@pytest.fixture
def golden(make_run: Callable[..., RunRecord]) -> RunRecord:
    """A complete run whose metrics are known: TDG 52.5, TDA 89.667, FA 89.25."""
    return make_run()


@pytest.fixture
def hostile(make_run: Callable[..., RunRecord]) -> RunRecord:
    """A run whose every name tries to be markup."""
    probes = {HOSTILE[1]: [(0.0, 50.0), (1.0, 60.0)]}
    return make_run(
        order=HOSTILE, method="[bold]<b>m_1</b>", stream="<img src=x>", changed={"</td>": "&amp;_%"}, probes=probes
    )
