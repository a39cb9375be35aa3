"""Streams: domains in their order of arrival. Built in, or a user's own folders.

Imports ``data``, ``networks``, ``training`` and what lies below. Importing this needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ratp.errors import ConfigError, unknown
from ratp.streams.catalogue import FOLDERS, STREAMS, StreamInfo

if TYPE_CHECKING:
    from ratp.streams.stream import StreamSpec

__all__ = ["FOLDERS", "STREAMS", "StreamInfo", "find_stream", "is_folder"]


def find_stream(name: str) -> StreamSpec:
    """Returns the stream called ``name``, or the one that a ``.toml`` file or a folder of domains describes."""
    if name == "demo":
        from ratp.streams.demo import DEMO

        return DEMO
    if name in STREAMS:
        from ratp.streams.benchmarks import BENCHMARKS

        return BENCHMARKS[name]
    if name.endswith(".toml"):
        from ratp.streams.folders import from_file

        return from_file(Path(name))
    if name.strip() and is_folder(Path(name)):
        from ratp.streams.folders import from_root

        return from_root(Path(name))
    if name == FOLDERS:
        raise ConfigError(
            f"the stream {FOLDERS} is made for a run by --source and --targets. "
            "Elsewhere give a folder of domains or a .toml file."
        )
    raise ConfigError(
        unknown("stream", name, [*STREAMS, FOLDERS])
        + f" Or give a folder of domains, a .toml file, or: {FOLDERS} --source DAY --targets RAIN NIGHT"
    )


def is_folder(path: Path) -> bool:
    """Whether a path names a folder; False if it cannot be examined."""
    try:
        return path.is_dir()
    except OSError:  # too long a name, or no permission
        return False
