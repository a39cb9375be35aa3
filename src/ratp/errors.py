"""Errors the user can fix, and warnings about things that change no result.

An error message names what was given, what is valid and what to do next. The command line prints it without a
traceback and exits with code 2.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any


class RatpError(Exception):
    """A mistake or an outside condition that the user can fix."""


class ConfigError(RatpError):
    """One or more configuration mistakes, reported together: ``problems`` has one sentence for each."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RunDirectoryError(RatpError):
    """A run directory is missing, foreign, damaged, in use or not writable."""


class TrainingError(RatpError):
    """Training failed in a way that more training cannot repair."""


def brief(error: object) -> str:
    """Formats an error as one line; of a traceback, only the last line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return lines[-1] if any(line.startswith("Traceback ") for line in lines) else " ".join(lines)


# The most names that one message lists; of valid ones, it may list all methods.
MOST_NAMES, MOST_VALID = 20, 40


def nearest(given: str, names: Sequence[str]) -> str | None:
    """Finds the name closest to ``given``, ignoring case; None if none is close."""
    near = get_close_matches(given.lower(), [name.lower() for name in names], n=1, cutoff=0.6)
    return next((name for name in names if near and name.lower() == near[0]), None)


def unknown(kind: str, given: object, valid: Iterable[str]) -> str:
    """Explains that a name does not exist, and suggests the nearest valid one.

    Args:
        kind: What the name should refer to, e.g. ``"method"``.
        given: The name that was given.
        valid: The names that exist.
    """
    names = sorted(valid)
    match = nearest(str(given), names)
    hint = f" Did you mean {match!r}?" if match else ""
    if len(names) > MOST_VALID:
        near = get_close_matches(str(given), names, n=5, cutoff=0.3) or names[:5]
        return f"unknown {kind} {given!r}.{hint} Valid: {', '.join(near)}, … ({len(names)} in all)."
    return f"unknown {kind} {given!r}.{hint} Valid: {', '.join(names) or 'none'}."


def first_lines(lines: Sequence[str], most: int = MOST_NAMES) -> list[str]:
    """Indents the first few lines of a list and says how many more there are."""
    shown = [f"  {line}" for line in lines[:most]]
    return shown if len(lines) <= most else [*shown, f"  and {len(lines) - most:,} more"]


class Note(RuntimeWarning):
    """Something happens differently or later than requested, without changing any result."""


class NotCachedWarning(Note):
    """Something could not be cached."""


def warn_not_cached(what: str, folder: Path, error: Exception) -> None:
    """Warns, once per cause, that a cache could not be written."""
    cause = error.__cause__ or error
    reason = getattr(cause, "strerror", None) or cause
    _note_once(f"cannot cache {what} in {folder}: {reason}")


@cache
def _note_once(text: str) -> None:
    warnings.warn(text, NotCachedWarning, stacklevel=4)


# Control characters a terminal may obey and marks that change the direction of text, except newline and tab.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_REPLACED = {code: "\N{REPLACEMENT CHARACTER}" for code in _CONTROLS if chr(code) not in "\n\t"}
_SPELLED = {code: ascii(chr(code))[1:-1] for code in _REPLACED}


def printable(text: str) -> str:
    """Replaces control characters, so that untrusted text can be printed on a terminal."""
    return text.translate(_REPLACED)


def csv_cell(value: Any) -> Any:
    """A cell of a CSV file: an apostrophe before what a spreadsheet would compute, control characters spelled."""
    if not isinstance(value, str):
        return value
    text = value.translate(_SPELLED)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def print_plainly() -> None:
    """Makes Python print every :class:`Note` as one line, without file name and line number."""
    usual = warnings.formatwarning

    def plain(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> str:
        if issubclass(category, Note):
            return f"note: {printable(str(message))}\n"
        return usual(message, category, *where, **more)

    warnings.formatwarning = plain
