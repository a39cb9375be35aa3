"""Nested settings as flat tables: what a run was asked for, and where runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every value of nested settings as text, under dotted names such as ``recipe.epochs``."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = as_text(value)
    return flat


def differing(tables: Sequence[Mapping[str, str]]) -> list[str]:
    """The names whose values are not the same in every table, in the order they first appear."""
    names = dict.fromkeys(name for table in tables for name in table)
    return [name for name in names if len({table.get(name) for table in tables}) > 1]


def as_text(value: object) -> str:
    """A value of a setting as text; of a list, items of several lines stand below one another."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "none"
    if isinstance(value, Sequence):
        texts = [as_text(item) for item in value]
        return ("\n" if any("\n" in text for text in texts) else ", ").join(texts) or "none"
    return json.dumps(value, ensure_ascii=False, default=str)
