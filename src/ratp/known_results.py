"""Which results are those of a plan: what was made before, or elsewhere, need not be made again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ratp.errors import RatpError
from ratp.notes import Note
from ratp.plan import NO_WEIGHTS, PUBLISHED, RunPlan
from ratp.record import DECIDED, RunRecord
from ratp.run_folder import unlike_images
from ratp.stream import Report

_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def is_config_of(plan: RunPlan, config: Mapping[str, Any]) -> bool:
    """Whether a config has all that determines the plan's result, but for images.

    Weights are compared as far as the plan knows them without a download: random numbers are only themselves, a file is
    only one of the same hash, and for the published weights any will do, for they may have come as a file.

    Of the first switches some came after the first results and are in the hash of later ones: a config without such
    a switch had, in effect, its default.
    """
    if (config.get("method"), config.get("seed")) != (plan.method.name, plan.seed):
        return False
    if not _starts_from(plan.weights_known, config.get("weights")):
        return False
    decided = _plain(plan.decisions())
    there = {key: _plain(config.get(key)) for key in DECIDED}
    for group in ("recipe", "switches"):
        if isinstance(there[group], dict) and config.get("preset") == plan.preset:
            unchanged = {key: value for key, value in decided[group].items() if key not in plan.changed}
            there[group] = unchanged | there[group]
    return there == {key: decided.get(key) for key in DECIDED}


def _starts_from(asked: str, there: str | None) -> bool:
    """Whether the hash of a run's weights is what a plan knows of those it asks for; None: random numbers."""
    if asked in (NO_WEIGHTS, PUBLISHED):
        return (there is None) == (asked == NO_WEIGHTS)
    return there == asked


def result_of(plan: RunPlan, records: Sequence[RunRecord]) -> RunRecord | None:
    """The result of a plan among others, the newest if there are several."""
    found = [record for record in records if is_config_of(plan, record.config) and _is_as_exact(plan, record)]
    if not found:
        return None
    newest = max(found, key=_finished_at)
    others = [record for record in found if record.matrix.to_json() != newest.matrix.to_json()]  # NaN is not itself
    if others:
        paths = " and ".join(str(record.path) for record in (newest, *others))
        warnings.warn(f"{paths} are results of the same run and differ: the first, which is newer, counts", Note, 2)
    return newest


def _is_as_exact(plan: RunPlan, record: RunRecord) -> bool:
    """Whether a result was computed in the precision that was asked for; if none was, or none is known, any will do."""
    asked = plan.request.precision if plan.request else plan.precision
    return asked == "auto" or record.environment.get("precision", asked) == asked


def _finished_at(record: RunRecord) -> datetime:
    """When the last event of a run's journal was, whichever time zone it was written in; long ago if none says so."""
    return max(map(_time_of, record.journal), default=_LONG_AGO)


def _time_of(event: Mapping[str, Any]) -> datetime:
    try:
        found = datetime.fromisoformat(str(event.get("time", "")))
    except ValueError:
        return _LONG_AGO
    return found if found.tzinfo else found.replace(tzinfo=UTC)


class ImagesAtHand:
    """The images of plans as they are now, looked at once for all that have the same.

    Args:
        progress: Told of images that have to be decoded.
    """

    def __init__(self, progress: Report | None = None) -> None:
        self._progress = progress
        self._found: dict[object, Mapping[str, str]] = {}

    def unlike(self, plan: RunPlan, config: Mapping[str, Any]) -> list[str]:
        """Domains of a plan whose images are not those of a result's config; none where they are not known."""
        return unlike_images(config, {"data": self._hashes(plan)})

    def _hashes(self, plan: RunPlan) -> Mapping[str, str]:
        """The hash of every domain's images; nothing where they are not read from files, or cannot be."""
        if plan.spec.places is None:
            return {}
        key = plan.spec.name, frozenset(plan.order), plan.order[0], plan.recipe.size, plan.recipe.hold_out
        if key not in self._found:
            try:
                shown = replace(plan, data=replace(plan.data, progress=self._progress))
                self._found[key] = shown.load_stream().fingerprints
            except RatpError:  # which the runs tell that need them
                self._found[key] = {}
        return self._found[key]


def _plain(value: Any) -> Any:
    """As a file in JSON gives it back."""
    return json.loads(json.dumps(value))
