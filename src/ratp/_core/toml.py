"""Reads TOML files that users write, and reports every mistake in them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ratp._core.files import open_file
from ratp.errors import ConfigError, unknown

_KINDS: Mapping[type, str] = {str: "a text", list: "a list", bool: "true or false", dict: "a table"}


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Reads a TOML file; ``kind`` is what messages call it, e.g. ``study``."""
    try:
        with TextIOWrapper(open_file(path), encoding="utf-8-sig") as file:  # some editors start with a byte order mark
            return tomllib.loads(file.read())
    except OSError as error:
        raise ConfigError(f"cannot read the {kind} {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text.") from error
    except (ValueError, RecursionError) as error:  # also numbers too long and lists too deep
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def check_table(
    table: Mapping[str, Any], kinds: Mapping[str, type], where: str, problems: list[str], many: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the entries of a table whose names and types are right; appends a sentence per mistake to ``problems``.

    ``where`` is what messages call the table (empty for the whole file), ``many`` how to write lists of tables, e.g.
    ``[[grid]]``.
    """
    start = where and f"{where}: "
    right = {}
    for key, value in table.items():
        if key not in kinds:
            problems.append(f"{start}{unknown('key', key, kinds)}")
        elif isinstance(value, kinds[key]):
            right[key] = value
        elif isinstance(value, dict) and key in many:
            problems.append(f"{start}{key} must be written {many[key]}, with two brackets.")
        else:
            problems.append(f"{start}{key} must be {_KINDS[kinds[key]]}, got {shown(value)}.")
    return right


def shown(value: Any) -> str:
    """Formats a value for a message; lists and tables, which may be long, only by their kind."""
    return _KINDS[type(value)] if isinstance(value, list | dict) else repr(value)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns values by dotted name: TOML reads ``randmix.tanh = false`` as a table within a table."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
