"""What goes wrong in a way the user can put right.

Every error of this module names what was given, what was expected and what to do next. The command
line prints it without a traceback and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class RatpError(Exception):
    """A mistake or a condition outside the program that the user can put right."""


class ConfigError(RatpError):
    """One or more mistakes in a configuration, reported all at once.

    Attributes:
        problems: One sentence a mistake.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class RunDirectoryError(RatpError):
    """A run directory is missing, foreign, damaged, occupied or not writable."""


class TrainingError(RatpError):
    """Training went wrong in a way that more training cannot mend."""


def brief(error: object) -> str:
    """An error as one line: all of it, but of a traceback the last line alone."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return lines[-1] if any(line.startswith("Traceback ") for line in lines) else " ".join(lines)


# A message lists at most so many names.
MOST_NAMES = 20


def nearest(given: str, names: Sequence[str]) -> str | None:
    """The name most like ``given``, whatever its case, if any is like it."""
    near = get_close_matches(given.lower(), [name.lower() for name in names], n=1, cutoff=0.6)
    return next((name for name in names if near and name.lower() == near[0]), None)


def unknown(kind: str, given: object, valid: Iterable[str]) -> str:
    """A sentence for a name that does not exist, with the nearest one that does.

    Args:
        kind: What the name should have named, e.g. ``"method"``.
        given: What was given.
        valid: The names that exist.
    """
    names = sorted(valid)
    match = nearest(str(given), names)
    hint = f" Did you mean {match!r}?" if match else ""
    if len(names) > MOST_NAMES:
        near = get_close_matches(str(given), names, n=5, cutoff=0.3) or names[:5]
        return f"unknown {kind} {given!r}.{hint} Valid: {', '.join(near)}, … ({len(names)} in all)."
    return f"unknown {kind} {given!r}.{hint} Valid: {', '.join(names) or 'none'}."
