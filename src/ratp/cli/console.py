"""Where the command line writes: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ratp.notes import harmless

WIDTH_WITHOUT_TERMINAL = 100


class PlainConsole(Console):
    """A console on which names cannot give orders to the terminal: of control characters it shows that they are there.

    Its own colours and movements are no text, and stay.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As in any console, but for control characters."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def stdout() -> Console:
    """Console for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """Console for progress and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = PlainConsole(stderr=stderr, highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return PlainConsole(stderr=stderr, highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    return console


def say(text: str) -> None:
    """A quiet line to standard error, never wrapped, so that paths and commands can be copied."""
    stderr().print(text, style="dim", markup=False, soft_wrap=True)


def print_json(data: Any) -> None:
    """Writes one JSON document to standard output, as it is."""
    print(json.dumps(data, indent=2, allow_nan=False))
