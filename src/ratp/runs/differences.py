"""How the configurations of two runs differ, and how to say so."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Config = Mapping[str, Any]

# What a missing entry of a configuration means.
_ABSENT = {"weights": "random numbers", "guard": "off or record", "after": "the start"}


class Difference(NamedTuple):
    """A value in which two configurations differ: in the existing run, and as requested now."""

    name: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{show(self.there)} there, {show(self.here)} requested"


def differing_choices(there: Config, here: Config) -> list[Difference]:
    """Compares everything but settings and images: stream, order, method, seed, weights, guard, model, earlier run."""
    return [
        Difference(name, _in_words(name, there.get(name)), _in_words(name, here.get(name)))
        for name in ("stream", "order", "method", "seed", "weights", "guard", "adopted", "after")
        if _comparable(there.get(name)) != _comparable(here.get(name))
    ]


def differing_settings(there: Config, here: Config) -> list[Difference]:
    """Compares sizes and switches, if both runs use the same method."""
    if there.get("method") != here["method"]:
        return []
    found = []
    for key in ("recipe", "switches"):
        old = there[key] if isinstance(there.get(key), dict) else {}
        found += [Difference(name, old.get(name), here[key].get(name)) for name in dict.fromkeys((*here[key], *old))]
    return [item for item in found if item.there != item.here]


def differing_images(there: Config, here: Config) -> list[str]:
    """Returns the domains of both configurations whose images differ."""
    data = there.get("data")
    return [name for name, value in here["data"].items() if isinstance(data, dict) and data.get(name, value) != value]


def describe_differences(folder: Path, there: Config, here: Config) -> str:
    """Says how the run in a folder differs from the requested one, and what to do."""
    choices, settings = differing_choices(there, here), differing_settings(there, here)
    if choices or settings:
        text = f"It differs in {'; '.join(f'{item.name}: {item}' for item in (*choices, *settings))}."
        if not choices and all(item.there is not None for item in settings):
            text += f" To continue it: {_as_options(settings)}."
    elif there.get("method_file") != here["method_file"]:
        text = "The file of its method has been edited since."
    else:
        images = differing_images(there, here)
        text = "Its images have changed since" + (f": those of {', '.join(images)}." if images else ".")
    if here.get("after") is None and there.get("after") is not None:
        return f"{text} It continues an earlier run: name that with --after, or choose another folder with --out."
    only_order = not settings and all(item.name == "order" for item in choices)
    if only_order and is_start_of(there.get("order"), here["order"]):
        return (
            f"{text} The requested order only goes further: choose another folder with --out, and start there from "
            f"this run with --after {shlex.quote(str(folder))}."
        )
    return f"{text} Choose another folder with --out."


def is_start_of(order: object, longer: Sequence[str]) -> bool:
    """Whether a longer order of domains begins with ``order``."""
    return isinstance(order, list) and len(order) < len(longer) and list(longer[: len(order)]) == order


def show(value: Any) -> str:
    """Renders a value of a configuration."""
    return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def show_order(order: Sequence[str]) -> str:
    """Renders an order of domains."""
    return ">".join(map(str, order))


def _comparable(value: Any) -> Any:
    """Of an earlier run only the fingerprint counts."""
    return value.get("fingerprint") if isinstance(value, dict) else value


def _in_words(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"run {str(value.get('fingerprint'))[:12]}"
    if value is None:
        return _ABSENT.get(name, "none")
    return show_order(value) if name == "order" and isinstance(value, list) else show(value)


def _as_options(settings: Sequence[Difference]) -> str:
    """Returns the options that request the existing values."""
    values = ((s.name, ",".join(map(str, s.there)) if isinstance(s.there, list) else s.there) for s in settings)
    return " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in values)
