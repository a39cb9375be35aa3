"""Things a user should know of that change no result: Python's warnings, and in a terminal a line each."""

from __future__ import annotations

import warnings
from typing import Any


class Note(RuntimeWarning):
    """Something is done in another way, or later, than asked for. No result changes."""


def print_plainly() -> None:
    """From now on, what is noted is printed as one line, without the place in the code."""
    usual = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
        return f"note: {message}\n" if issubclass(category, Note) else usual(message, category, *where, **more)

    warnings.formatwarning = plain
