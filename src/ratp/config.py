"""Configurations: frozen dataclasses whose fields document and check themselves.

A field made by :func:`switch` carries its explanation and its range. :func:`override` changes fields by
their dotted names, as given on a command line or in a file, and reports every mistake at once.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ratp.errors import ConfigError, unknown

T = TypeVar("T")

_hints_of = cache(get_type_hints)

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_LIMITS = (
    ("minimum", operator.lt, "at least"),
    ("maximum", operator.gt, "at most"),
    ("above", operator.le, "above"),
    ("below", operator.ge, "below"),
)


def switch(
    default: Any,
    explanation: str,
    *,
    doc_ref: int | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    hash_default: bool = True,
) -> Any:
    """Declares a configuration field.

    Args:
        default: Its value unless set otherwise.
        explanation: What it does, in one line.
        doc_ref: Its row in the list of differences between the paper and its published code.
        minimum: Smallest value allowed.
        maximum: Largest value allowed.
        above: Values must be greater than this.
        below: Values must be less than this.
        hash_default: Whether the default counts for a run's hash. False for a switch added later whose default keeps
            the old behaviour, so that the hashes of earlier runs stay valid (:func:`decisive`). For a configuration
            added later, whose switches must have the defaults of its class, this holds for each of them.
    """
    limits = {"minimum": minimum, "maximum": maximum, "above": above, "below": below}
    metadata = {"explanation": explanation, "doc_ref": doc_ref, "hash_default": hash_default, **limits}
    if is_dataclass(default):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Switch:
    """One leaf of a configuration.

    Attributes:
        doc_ref: Its row in the list of differences between paper and published code, if it has one.
        is_decision: Whether it counts for a run's hash; a switch added later does not while at its default.
    """

    name: str
    value: Any
    kind: str
    explanation: str
    doc_ref: int | None
    is_decision: bool = True


def switches(config: Any, prefix: str = "", *, later: bool = False) -> Iterator[Switch]:
    """Yields all leaves of a configuration, in their order; ``later``: none counts for a hash at its default."""
    hints = _hints_of(type(config))  # type: ignore[arg-type]
    for item in fields(config):
        value = getattr(config, item.name)
        meta = item.metadata
        added = later or not meta.get("hash_default", True)
        if is_dataclass(value):
            yield from switches(value, f"{prefix}{item.name}.", later=added)
        else:
            kind = _describe(hints[item.name])
            decides = not added or value != item.default
            yield Switch(f"{prefix}{item.name}", value, kind, meta.get("explanation", ""), meta.get("doc_ref"), decides)


def as_dict(config: Any) -> dict[str, Any]:
    """Returns a configuration as plain data, by dotted names."""
    return {s.name: _plain(s.value) for s in switches(config)}


def decisive(config: Any) -> dict[str, Any]:
    """Returns the switches that count for a run's hash, as plain data: all but later ones at their defaults."""
    return {s.name: _plain(s.value) for s in switches(config) if s.is_decision}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def override(config: T, changes: Mapping[str, Any]) -> T:
    """Returns the configuration with some leaves changed, by dotted name; converts text to the type of the leaf."""
    names = {s.name for s in switches(config)}
    problems: list[str] = []
    for name, value in changes.items():
        if name not in names:
            problems.append(unknown("switch", name, names))
            continue
        try:
            config = _set(config, name.split("."), name, value)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return config


def _set(config: T, path: list[str], name: str, value: Any) -> T:
    head, *rest = path
    if rest:
        return replace(config, **{head: _set(getattr(config, head), rest, name, value)})  # type: ignore[type-var]
    parsed = _parse(value, _hints_of(type(config))[head], name)  # type: ignore[arg-type]
    item = next(f for f in fields(config) if f.name == head)  # type: ignore[arg-type]
    for number in parsed if isinstance(parsed, tuple) else (parsed,):
        _check_range(number, item.metadata, name)
    return replace(config, **{head: parsed})  # type: ignore[type-var]


def _parse(value: Any, kind: Any, name: str) -> Any:
    wrong = ConfigError(f"{name} must be {_describe(kind)}, got {value!r}.")
    text = value.strip() if isinstance(value, str) else None
    origin = get_origin(kind)
    if origin is Literal:
        matches = [o for o in get_args(kind) if (o == value and not isinstance(value, bool)) or str(o) == text]
        if not matches:
            raise ConfigError(unknown(f"value of {name}:", value, (str(o) for o in get_args(kind))))
        return matches[0]
    if origin in (Union, types.UnionType):  # only "X | None" is used
        if value is None or text in ("none", "None", ""):
            return None
        return _parse(value, next(a for a in get_args(kind) if a is not types.NoneType), name)
    if origin is tuple:
        parts = text.strip("()[]").split(",") if text is not None else value
        items = get_args(kind)
        if not isinstance(parts, list | tuple) or not parts or (items[-1] is not ... and len(parts) != len(items)):
            raise wrong
        return tuple(_parse(p, items[0], name) for p in parts)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if text is None or text.lower() not in (*_TRUE, *_FALSE):
            raise wrong
        return text.lower() in _TRUE
    if kind is str:
        if text is None:
            raise wrong
        return text
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong
    try:
        number = kind(text if text is not None else value)
        finite = math.isfinite(number)
    except (ValueError, OverflowError) as error:
        raise wrong from error
    if not finite or (kind is int and text is None and number != value):
        raise wrong
    return number


def _check_range(value: Any, meta: Mapping[str, Any], name: str) -> None:
    if value is None or isinstance(value, str | bool):
        return
    for key, is_wrong, words in _LIMITS:
        limit = meta.get(key)
        if limit is not None and is_wrong(value, limit):
            raise ConfigError(f"{name} must be {words} {limit}, got {value}.")


@cache
def _describe(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(o) for o in get_args(kind))
    if origin in (Union, types.UnionType):
        return f"{_describe(next(a for a in get_args(kind) if a is not types.NoneType))} or none"
    if origin is tuple:
        items = get_args(kind)
        count = "a list" if items[-1] is ... else f"a list of {len(items)}"
        return f"{count}: {_describe(items[0])}, …"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(kind, str(kind))
