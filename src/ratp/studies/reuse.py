"""Recognises the results of planned runs, so that a run finished before, or elsewhere, is not repeated.

Imports no torch: ``ratp study status`` answers at once.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ratp.errors import Note
from ratp.runs.record import DECIDED, RunRecord

if TYPE_CHECKING:
    from ratp.runs.plan import RunPlan

_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Identity:
    """What a planned run and its result have in common, as plain JSON.

    Attributes:
        decisions: Everything that determines the result, except images and weights.
        weights: What the plan knows of the weights without a download: a file's sha256, ``imagenet`` or ``none``.
        preset: Name of the preset that the switches started from.
        changed: Switches and sizes that differ from it.
        precision: The requested precision; ``auto`` accepts any.
    """

    decisions: Mapping[str, Any]
    weights: str
    preset: str
    changed: Mapping[str, Any]
    precision: str

    @classmethod
    def of(cls, plan: RunPlan) -> Identity:
        """The identity of a plan."""
        precision = plan.request.precision if plan.request else plan.precision
        found = cls(plan.decisions(), plan.weights_known, plan.preset, dict(plan.changed), precision)
        return cls(**json.loads(json.dumps(asdict(found))))

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Whether a run's config has everything that determines this result, except images.

        The published weights match any file, because they may have been given as a file. A config without a switch was
        written before the switch existed: in effect, the switch had its default.
        """
        there = {key: config.get(key) for key in DECIDED}
        for group in ("recipe", "switches"):
            kept = there[group]
            if isinstance(kept, dict) and config.get("preset") == self.preset:
                unchanged = {key: value for key, value in self.decisions[group].items() if key not in self.changed}
                there[group] = unchanged | kept
        same = json.loads(json.dumps(there)) == {key: self.decisions.get(key) for key in DECIDED}
        return same and self._starts_from(config.get("weights"))

    def _starts_from(self, sha256: str | None) -> bool:
        """Whether a result's weights are those planned; None means random numbers."""
        if self.weights in ("none", "imagenet"):
            return (sha256 is None) == (self.weights == "none")
        return self.weights == sha256

    def result_among(self, records: Sequence[RunRecord]) -> RunRecord | None:
        """The result among ``records``; the newest if there are several."""
        found = [record for record in records if self.matches(record.config) and self._is_as_precise(record)]
        if not found:
            return None
        newest = max(found, key=_finished_at)
        others = [record for record in found if record.matrix.to_json() != newest.matrix.to_json()]  # NaN is not itself
        if others:
            paths = " and ".join(str(record.path) for record in (newest, *others))
            warnings.warn(f"{paths} are results of the same run and differ: using the first, which is newer", Note, 2)
        return newest

    def _is_as_precise(self, record: RunRecord) -> bool:
        return self.precision in ("auto", record.environment.get("precision", self.precision))


def _finished_at(record: RunRecord) -> datetime:
    """The time of a run's last event, in any time zone."""
    return max(map(_time_of, record.journal), default=_NEVER)


def _time_of(event: Mapping[str, Any]) -> datetime:
    try:
        found = datetime.fromisoformat(str(event.get("time", "")))
    except ValueError:
        return _NEVER
    return found if found.tzinfo else found.replace(tzinfo=UTC)
