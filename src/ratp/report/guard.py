"""What the guard made of the stages of a run, for the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratp.record import RunRecord, is_undone
from ratp.report.cells import MISSING

# Signs by their names in the journal, and what the columns are called; of a pair, before and after the stage.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "Structure": ("structure",),
    "Recognition": ("recognition",),
    "Variety": ("variety_before", "variety"),
    "Largest class": ("largest_before", "largest"),
    "Confidence": ("confidence_before", "confidence"),
    "Source right": ("source_before", "source"),
    "Source kept": ("source_kept",),
    "Memory right": ("memory_before", "memory"),
    "Memory kept": ("memory_kept",),
    "Class spread": ("spread_before", "spread"),
}


@dataclass(frozen=True)
class Judged:
    """What the guard made of one stage.

    Attributes:
        run: The run.
        domain: Domain of the stage.
        decision: What became of it.
        reasons: Why it was refused; empty: it was not.
        cells: The signs, as ``COLUMNS`` has them.
    """

    run: RunRecord
    domain: str
    decision: str
    reasons: str
    cells: tuple[str, ...]


def judged(run: RunRecord) -> list[Judged]:
    """What the guard made of every stage that it judged."""
    found = []
    for event in run.guarded:
        guard = event["guard"]
        reasons = "; ".join(map(str, guard.get("reasons", ())))
        decision = "rolled back" if is_undone(event) else "kept, though refused" if reasons else "accepted"
        cells = tuple(_cell(guard.get("signs", {}), names) for names in COLUMNS.values())
        found.append(Judged(run, str(event.get("domain", MISSING)), decision, reasons, cells))
    return found


def _cell(signs: Mapping[str, Any], names: tuple[str, ...]) -> str:
    values = [signs.get(name) for name in names]
    if not all(isinstance(value, int | float) for value in values):
        return MISSING
    return " → ".join(f"{value:.2f}" for value in values)
