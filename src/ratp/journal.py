"""``journal.jsonl``: what happened in a run, a line an event."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ratp.files import write_text, writing
from ratp.record import read_journal
from ratp.schema import JOURNAL


class Journal:
    """The journal of a run.

    Args:
        folder: The run's directory.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"

    def note(self, event: str, **values: Any) -> None:
        """Adds an event that happens now."""
        self.append(self.now(event, **values))

    @staticmethod
    def now(event: str, **values: Any) -> dict[str, Any]:
        """An event that happens now."""
        return {"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **values}

    def append(self, event: Mapping[str, Any]) -> None:
        """Adds an event."""
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(event))

    def events(self) -> list[dict[str, Any]]:
        """All events."""
        return read_journal(self.path)

    def of_stage(self, stage: int) -> list[Mapping[str, Any]]:
        """The events of a stage."""
        return [event for event in self.events() if event.get("stage") == stage]

    def finished(self) -> list[dict[str, Any]]:
        """The ends of stages."""
        return [event for event in self.events() if event["event"] == "stage_finished"]

    def keep(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Leaves these events in it, and no others."""
        write_text(self.path, "".join(map(_line, events)))

    def before(self, stage: int) -> list[dict[str, Any]]:
        """The events before a stage began."""
        return [event for event in self.events() if event.get("stage", -1) < stage]


def _line(event: Mapping[str, Any]) -> str:
    return json.dumps(JOURNAL.marked(event), allow_nan=False) + "\n"
