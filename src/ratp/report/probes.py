"""The Unfamiliar Period as measured: accuracy on a new domain while its own stage trains."""

from __future__ import annotations

import math
from itertools import pairwise

from ratp.errors import RunDirectoryError
from ratp.record import RunRecord

Curve = list[tuple[float, float]]


def probed_curves(run: RunRecord) -> dict[str, Curve]:
    """(progress, accuracy in percent) of each target domain during its own stage.

    A stage that was interrupted and begun anew counts as it went the last time.

    Raises:
        RunDirectoryError: If a probe of the journal holds no such numbers.
    """
    curves: dict[str, Curve] = {}
    for probe in run.events("probe"):
        try:
            stage, domain, accuracy = int(probe["stage"]), str(probe["domain"]), probe["accuracy"]
            if stage == 0 or domain not in accuracy:
                continue
            point = (round(float(probe["progress"]), 9), round(float(accuracy[domain]), 9))
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(
                f"{run.path} is damaged: a probe of its journal is unreadable ({error!r})."
            ) from error
        if not (0 <= point[0] <= 1 and 0 <= point[1] <= 100):
            raise RunDirectoryError(f"{run.path} is damaged: a probe at {point[0]} of {domain} reads {point[1]} %.")
        curves[domain] = [p for p in curves.get(domain, []) if p[0] < point[0]] + [point]
    return {domain: curves[domain] for domain in run.matrix.domains if domain in curves}


def area(curve: Curve) -> float:
    """Area under a curve over progress 0 to 1 by the trapezoid rule, its ends held constant."""
    held = [(0.0, curve[0][1]), *curve, (1.0, curve[-1][1])]
    return math.fsum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairwise(held))
