"""Which methods suit a situation: phrases in plain English, answered from what methods declare and what they cost.

A phrase rules out some of the needs that methods declare, or limits their measured time and memory. Nothing here knows
a method by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from ratp.errors import ConfigError, nearest
from ratp.methods import METHODS, describe

# Ruled out unless the user has them.
TARGET_LABELS = "the labels of targets"


@dataclass(frozen=True)
class Situation:
    """What a phrase means.

    Attributes:
        meaning: For the list of phrases.
        without: Needs that cannot be met, each with the option that removes it; "" if there is none.
        time: The longest run, relative to source-only.
        memory: The most memory for a training step, relative to source-only.
        aliases: Other ways to say it.
    """

    meaning: str
    without: Mapping[str, str] = field(default_factory=dict)
    time: float | None = None
    memory: float | None = None
    aliases: tuple[str, ...] = ()


SITUATIONS: Mapping[str, Situation] = {
    "no source images": Situation(
        "no images are kept: neither of the source nor of earlier targets",
        {"exemplars": "--memory 0", "exemplars for replay": "--memory 0"},
        aliases=("source-free", "no memory", "no stored images"),
    ),
    "own model": Situation(
        "the model was trained elsewhere (ratp adopt)",
        {"its own source training": ""},
        aliases=("adopted model", "my own model", "trained model"),
    ),
    "one pass": Situation(
        "each target image is seen once, as it arrives",
        {"many passes over a target": "", "two passes over a target": ""},
        aliases=("online", "single pass"),
    ),
    "single images": Situation(
        "images are classified one at a time, not in batches",
        {"batch statistics": "--set eval_bn=running"},
        aliases=("one image at a time", "no batches"),
    ),
    "no BatchNorm": Situation(
        "the network has other normalisation layers, such as a vision transformer's",
        {"BatchNorm": ""},
        aliases=("vision transformer", "transformer", "LayerNorm"),
    ),
    "no normalisation layers": Situation(
        "the network has none at all", {"BatchNorm": "", "normalisation layers": ""}, aliases=("no norm",)
    ),
    "rectangular images": Situation("height and width differ", {"square images": ""}, aliases=("no square images",)),
    "unknown number of domains": Situation(
        "nobody knows how many domains will come", {"number of domains": ""}, aliases=("endless stream",)
    ),
    "small GPU": Situation(
        "with the default settings, a training step takes at most twice source-only's memory",
        memory=2.0,
        aliases=("little memory",),
    ),
    "little time": Situation(
        "with the default settings, a run takes at most twice source-only's time",
        time=2.0,
        aliases=("no GPU", "CPU", "fast"),
    ),
    "target labels": Situation("targets have labels to train on", aliases=("labelled targets",)),
}


@dataclass(frozen=True)
class Choice:
    """Whether a method suits a situation: the options that it then needs, or the reasons against it."""

    name: str
    options: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@cache
def relative_costs() -> dict[str, dict[str, float]]:
    """Returns time and memory of methods relative to source-only, as ``benchmarks/costs.py`` measured them."""
    costs = json.loads(resources.files("ratp.methods").joinpath("cost.json").read_text(encoding="utf-8"))
    return {kind: dict(costs[kind]) for kind in ("time", "memory")}


def needs_of(name: str) -> list[str]:
    """Returns the needs that a method declares, one by one."""
    return [need for need in re.split(r"[,;] ", describe(name).needs) if need]


def parse_situations(text: str) -> list[str]:
    """Returns the phrases in a text that separates them by commas; reports all that do not exist."""
    known = {alias.lower(): phrase for phrase, s in SITUATIONS.items() for alias in (phrase, *s.aliases)}
    given = [" ".join(part.split()) for part in text.split(",") if part.strip()]
    wrong = [phrase for phrase in given if phrase.lower() not in known]
    if not given:
        raise ConfigError(f"--for needs phrases, separated by commas: {', '.join(SITUATIONS)}.")
    if wrong:
        raise ConfigError([_unknown(phrase, known) for phrase in wrong])
    return list(dict.fromkeys(known[phrase.lower()] for phrase in given))


def _unknown(phrase: str, known: Mapping[str, str]) -> str:
    near = nearest(phrase, list(known))
    hint = f" Did you mean {known[near]!r}?" if near else ""
    return f"unknown phrase {phrase!r}.{hint} ratp methods --for help lists all phrases."


def choose(phrases: Sequence[str]) -> list[Choice]:
    """Returns for every built-in method whether it suits all these situations."""
    return [_choice(name, [SITUATIONS[phrase] for phrase in phrases], "target labels" in phrases) for name in METHODS]


def _choice(name: str, situations: Sequence[Situation], labels: bool) -> Choice:
    options: list[str] = []
    reasons: list[str] = []
    needs, costs = needs_of(name), relative_costs()
    if TARGET_LABELS in needs and not labels:
        reasons.append(f"needs {TARGET_LABELS}")
    for situation in situations:
        for need in needs:
            option = situation.without.get(need)
            if option is not None:
                (options if option else reasons).append(option or f"needs {need}")
        for kind, limit in (("time", situation.time), ("memory", situation.memory)):
            found = costs[kind].get(name)
            if limit is None:
                continue
            if found is None:
                reasons.append(f"its {kind} has not been measured")
            elif found > limit:
                reasons.append(f"takes {found:.1f} times source-only's {kind}")
    return Choice(name, tuple(dict.fromkeys(options)), tuple(dict.fromkeys(reasons)))
