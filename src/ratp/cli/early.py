"""Finds mistakes in the options of ``ratp run`` before torch is loaded, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ratp._core.environment import DEVICES, find_device
from ratp.data.read.tree import open_tree
from ratp.errors import ConfigError, RatpError
from ratp.methods import METHODS, find_method
from ratp.streams import FOLDERS, STREAMS, find_stream, is_folder


def refuse_unknown(stream: str, methods: Sequence[str], device: str, folders: Sequence[Path]) -> None:
    """Raises ConfigError if there is no such stream, method, device or folder."""
    checks: list[tuple[Callable[[], object], bool]] = [
        (
            lambda: find_stream(stream),
            stream in (*STREAMS, FOLDERS) or stream.endswith(".toml") or is_folder(Path(stream)),
        ),
        *((lambda n=n: find_method(n), n in (*METHODS, "all") or n.endswith(".py")) for n in methods),
        *((lambda n=n: find_device(n), n.partition(":")[0] in DEVICES) for n in map(str.strip, device.split(","))),
        *((lambda path=path: open_tree(path), _may_exist(path)) for path in folders),
    ]
    problems: list[str] = []
    for find, known in checks:
        try:
            if not known:
                find()
        except RatpError as error:
            problems += error.problems if isinstance(error, ConfigError) else (str(error),)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _may_exist(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # of which the message comes later
        return True
