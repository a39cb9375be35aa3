"""Loads custom methods, each from one Python file, and shortens their tracebacks."""

from __future__ import annotations

import inspect
import traceback
from dataclasses import is_dataclass
from pathlib import Path

from ratp._core.user_code import USER_MODULE, load_file
from ratp.errors import ConfigError
from ratp.training.method import Method

_DESCRIPTION = ("name", "title", "family", "paper", "config_type")


def from_file(path: Path) -> type[Method]:
    """Returns the method that a Python file defines."""
    module = load_file(path, "method")
    own = [
        item
        for item in vars(module).values()
        if inspect.isclass(item) and issubclass(item, Method) and item.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = ", ".join(item.__name__ for item in own) or "none"
        raise ConfigError(f"method file {str(path)!r} must define exactly one Method, found {names}.")
    method = own[0]
    lacking = [*(name for name in _DESCRIPTION if not hasattr(method, name)), *sorted(method.__abstractmethods__)]
    if lacking:
        raise ConfigError(f"method {method.__name__} in {str(path)!r} lacks {', '.join(lacking)}.")
    if not isinstance(method.name, str) or not method.name.strip():
        raise ConfigError(f"method {method.__name__} in {str(path)!r} needs a name, got {method.name!r}.")
    if not is_dataclass(method.config_type):
        raise ConfigError(f"config_type of {method.__name__} in {str(path)!r} must be a dataclass of switches.")
    return method


def file_hash(method: type[Method]) -> str | None:
    """Returns the sha256 that identifies a custom method: of its file, or of its code; None for built-in methods."""
    _, marker, digest = method.__module__.partition(USER_MODULE)
    return digest if marker else method.code_hash


def own_traceback(error: Exception) -> str | None:
    """Returns the traceback of an error in a custom method, reduced to its file; None for other errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = {f.f_code.co_filename for f in frames if str(f.f_globals.get("__name__")).startswith(USER_MODULE)}
    if not files:
        return None
    shortened = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shortened
    while part is not None:
        part.stack = traceback.StackSummary.from_list([line for line in part.stack if line.filename in files])
        part = part.__cause__ or part.__context__
    return f"the run ended with an error in the file of its method:\n{''.join(shortened.format()).rstrip()}"
