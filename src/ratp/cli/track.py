"""The option ``--track``; without it, nothing of trackers is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratp.cli.console import say

if TYPE_CHECKING:
    from ratp.runs.run import Run
    from ratp.runs.track import Tracking


def problems_of(trackers: Sequence[str]) -> list[str]:
    """Returns a sentence for every tracker that cannot be used."""
    from ratp.runs.track import check_trackers

    return check_trackers(trackers)


def track_all(runs: Sequence[Run], trackers: Sequence[str]) -> Tracking:
    """Logs runs within a block."""
    from ratp.runs.track import Tracking

    return Tracking(runs, trackers)


def say_tracked(tracking: Tracking | None) -> None:
    """Says how to look at what was logged."""
    for show in tracking.shows if tracking else ():
        say(f"Tracked: {show}")
