"""A run as the user requests it: plain data that another process can resolve again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any

import torch

from ratp.errors import ConfigError
from ratp.runs import DEFAULT_PRESET
from ratp.streams.folders import EarlierDomains
from ratp.streams.stream import DataOptions


@dataclass(frozen=True)
class RunRequest:
    """One method on one stream with one seed, as the user requests it.

    None stands for the default of any attribute; paths and devices are kept as strings.

    Attributes:
        stream: Name of the stream, a ``.toml`` file or a folder of domains; ``folders`` for source and targets.
        method: Name of the method, or path of a Python file that defines one.
        order: Name or spelling of the order of domains, or a list of their codes.
        preset: Preset of switches to start from.
        seed: Seed of everything random.
        changes: Values for the method's switches and the stream's recipe, by dotted name.
        subset: Whether the order may leave out domains.
        device: ``cpu``, ``cuda``, ``cuda:1``, …, ``mps``, or ``auto``.
        source: Folder or zip of the source, for the stream ``folders``.
        targets: Folders or zips of the targets in their order of arrival, for the stream ``folders``; a single one
            needs no list.
        data: How to read images from files.
        weights: Initial weights of the backbone: a ``.safetensors`` file, ``imagenet`` for the published ones, ``none``
            for random ones, ``auto`` for the backbone's default.
        precision: ``fp32``, ``tf32``, ``bf16``, or ``auto``.
        guard: ``off``, ``record``, ``act``, or ``auto``: act on own images, record on built-in streams.
        unlabelled: Names or paths of own targets to read without labels, whatever folders they have; a single one needs
            no list.
        online: Whether to stream every target past a copy of the model once, before the stage that trains on it, and
            to measure the accuracy meanwhile. It changes no other result.
        model: A file that :func:`ratp.adopt` or ``ratp adopt`` wrote: the run starts with this network instead of
            training on the source.
        backbone: A backbone of your own as ``FILE.py:NAME``, a program that is run only because you name it here; of
            the usual backbones, ``changes`` names one.
        earlier: The domains of the run that this one continues, if they come from there; ``targets`` are further ones.
    """

    stream: str = "demo"
    method: str = "ratp"
    order: str | Sequence[str] = "default"
    preset: str = DEFAULT_PRESET
    seed: int | str = 2022
    changes: Mapping[str, Any] = field(default_factory=dict)
    subset: bool = False
    device: str = "auto"
    source: Path | str | None = None
    targets: Sequence[Path | str] = ()
    data: DataOptions = field(default_factory=DataOptions)
    weights: str = "auto"
    precision: str = "auto"
    guard: str = "auto"
    unlabelled: Sequence[Path | str] = ()
    online: bool = False
    model: Path | str | None = None
    backbone: str | None = None
    earlier: EarlierDomains | None = None

    def __post_init__(self) -> None:
        """Turns the values into plain data."""
        for item in fields(self):
            object.__setattr__(self, item.name, _plain(getattr(self, item.name), item))
        for name in ("targets", "unlabelled"):
            given = getattr(self, name)
            paths = (given,) if isinstance(given, str) else given
            if isinstance(paths, Iterable):
                object.__setattr__(self, name, tuple(_plain(path) for path in paths))


def check_types(request: RunRequest) -> None:
    """Checks the types of all values, which may be anything when they come from Python."""
    texts = ("stream", "preset", "device", "weights", "precision", "guard")
    types: dict[str, tuple[type | UnionType, str]] = {
        **{name: (str, f"a text, e.g. {getattr(RunRequest, name)!r}") for name in texts},
        "method": (str, "a name or the path of a .py file, by which other processes and later runs find it"),
        "order": (Sequence, "a text or a list of texts, e.g. 'day>rain' or ['day', 'rain']"),
        "changes": (Mapping, "values by name, e.g. {'epochs': 6}"),
        "source": (str | None, "a path, e.g. 'pictures/day'"),
        "targets": (Sequence, "a list of paths, e.g. ['pictures/rain', 'pictures/night']"),
        "unlabelled": (Sequence, "a list of names or paths of targets, e.g. ['night']"),
        "online": (bool, "True or False"),
        "model": (str | None, "the path of an adopted model, e.g. 'model.safetensors'"),
        "backbone": (str | None, "FILE.py:NAME, e.g. 'my_net.py:TinyNet'"),
        "data": (DataOptions, "DataOptions, e.g. DataOptions(on_bad='skip')"),
    }
    problems = []
    for name, (expected, description) in types.items():
        value = getattr(request, name)
        is_list = expected is Sequence and isinstance(value, Sequence)
        if not (all(isinstance(item, str) for item in value) if is_list else isinstance(value, expected)):
            problems.append(f"{name} must be {description}; got {value!r}.")
    if problems:
        raise ConfigError(problems)


def _plain(value: Any, item: Field[Any] | None = None) -> Any:
    """Returns the default of a field for None, and a string for a path or a device."""
    if value is None and item is not None:
        return item.default if item.default_factory is MISSING else item.default_factory()
    return str(value) if isinstance(value, Path | torch.device) else value
