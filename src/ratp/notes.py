"""Things a user should know of that change no result: Python's warnings, and in a terminal a line each."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from ratp.together import Together

# What a terminal may take for an order, or what turns the direction of a text around; but for the end of a line.
_ORDERS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_HARMLESS = {code: "\N{REPLACEMENT CHARACTER}" for code in _ORDERS if chr(code) not in "\n\t"}


class Note(RuntimeWarning):
    """Something is done in another way, or later, than asked for. No result changes."""


class NotKeptWarning(Note):
    """Something could not be kept for the next time."""


def _silence(back: ExitStack) -> None:
    back.enter_context(warnings.catch_warnings())
    for kind in (UserWarning, DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="PIL")


# Within it libraries do not warn of what a file holds; notes are heard all the same.
quietly = Together(_silence)


def note_not_kept(what: str, folder: Path, error: Exception) -> None:
    """Says that a cache could not be written, and why."""
    cause = error.__cause__ or error
    reason = getattr(cause, "strerror", None) or cause
    _note_once(f"{what} cannot be kept in {folder} for the next time: {reason}")


@cache
def _note_once(text: str) -> None:
    warnings.warn(text, NotKeptWarning, stacklevel=4)


def harmless(text: str) -> str:
    """A text that may be shown on a terminal, whoever wrote it."""
    return text.translate(_HARMLESS)


def print_plainly() -> None:
    """From now on, what is noted is printed as one line, without the place in the code."""
    usual = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
        if issubclass(category, Note):
            return f"note: {harmless(str(message))}\n"
        return usual(message, category, *where, **more)

    warnings.formatwarning = plain
