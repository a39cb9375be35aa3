"""What a method would reach that is told of which domain an image is, where that makes a difference."""

from __future__ import annotations

import math

from ratp.matrix import mean_of
from ratp.record import RunRecord


def forgetting_as_told(run: RunRecord) -> float:
    """FA in percent of a run that is told the domain of every image; NaN if that was not measured to its end."""
    found: dict[str, list[float]] = {domain: [] for domain in run.matrix.domains[:-1]}
    for event in run.events("stage_finished"):
        told = event.get("accuracy_as_told")
        for domain, value in told.items() if isinstance(told, dict) else ():
            is_accuracy = isinstance(value, int | float) and 0 <= value <= 100
            if is_accuracy and domain in found and domain != event.get("domain"):
                found[domain].append(value)
    if not run.matrix.complete:
        return math.nan
    return mean_of([mean_of(values) for values in found.values() if values])
