"""What a user asks for: a run as plain data, which can be sent to another process and resolved there again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any

import torch

from ratp.errors import ConfigError
from ratp.stream import DataOptions

DEFAULT_PRESET = "official"
_TEXTS = ("stream", "preset", "device", "weights", "precision", "guard")


@dataclass(frozen=True)
class RunRequest:
    """One method on one stream with one seed, as a user asks for it.

    None stands for the default, whatever it is given for; paths and devices are kept as texts.

    Attributes:
        stream: Name of the stream, a ``.toml`` file or a folder of domains; ``folders`` for source and targets.
        method: Name of the method, or path of a Python file that defines one.
        order: Name or spelling of the order of domains, or their codes in a list.
        preset: Set of switches to start from.
        seed: Seed of everything random.
        changes: Values to set in the method's switches and the stream's recipe, by dotted name.
        subset: Whether the order may leave domains out.
        device: ``cpu``, ``cuda``, ``cuda:1``, …, or ``auto``.
        source: Folder or zip of the source, for the stream ``folders``.
        targets: Folders or zips of the targets in their order of arrival, for the stream ``folders``; one alone needs
            no list.
        data: How to read images from files.
        weights: What the feature extractor starts from: a ``.safetensors`` file, ``imagenet`` for the published
            weights, ``none`` for random numbers; ``auto``: what is usual for it.
        precision: ``fp32``, ``tf32``, ``bf16``, or ``auto``.
        guard: ``off``, ``record``, ``act``, or ``auto``: act on own images, record on the streams that come along.
        unlabelled: Names or paths of targets of own images that are read without labels, whatever folders they have;
            one alone needs no list.
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

    def __post_init__(self) -> None:
        """Makes it plain data, which can be sent to another process."""
        for item in fields(self):
            object.__setattr__(self, item.name, _plain(getattr(self, item.name), item))
        for name in ("targets", "unlabelled"):
            given = getattr(self, name)
            paths = (given,) if isinstance(given, str) else given
            if isinstance(paths, Iterable):
                object.__setattr__(self, name, tuple(_plain(path) for path in paths))


def check_kinds(request: RunRequest) -> None:
    """Refuses values of a kind that no request can have; from Python anything can be given.

    Raises:
        ConfigError: With one sentence for each.
    """
    kinds: dict[str, tuple[type | UnionType, str]] = {
        **{name: (str, f"a text, e.g. {getattr(RunRequest, name)!r}") for name in _TEXTS},
        "method": (str, "a name or the path of a .py file, by which other processes and later runs find it"),
        "order": (Sequence, "a text or a list of texts, e.g. 'day>rain' or ['day', 'rain']"),
        "changes": (Mapping, "values by name, e.g. {'epochs': 6}"),
        "source": (str | None, "a path, e.g. 'pictures/day'"),
        "targets": (Sequence, "a list of paths, e.g. ['pictures/rain', 'pictures/night']"),
        "unlabelled": (Sequence, "a list of names or paths of targets, e.g. ['night']"),
        "data": (DataOptions, "DataOptions, e.g. DataOptions(on_bad='skip')"),
    }

    def fits(value: Any, kind: type | UnionType) -> bool:
        if kind is Sequence and isinstance(value, Sequence):
            return all(isinstance(item, str) for item in value)
        return isinstance(value, kind)

    given = {name: getattr(request, name) for name in kinds}
    wrong = [f"{n} must be {told}; got {given[n]!r}." for n, (kind, told) in kinds.items() if not fits(given[n], kind)]
    if wrong:
        raise ConfigError(wrong)


def _plain(value: Any, item: Field[Any] | None = None) -> Any:
    """A value as a request keeps it: the default of its field for None, a text for a path or a device."""
    if value is None and item is not None:
        return item.default if item.default_factory is MISSING else item.default_factory()
    return str(value) if isinstance(value, Path | torch.device) else value
