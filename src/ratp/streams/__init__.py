"""All streams: the embedded demo, the paper's benchmarks, and anyone's own folders."""

from __future__ import annotations

from pathlib import Path

from ratp.errors import ConfigError, unknown
from ratp.stream import StreamSpec
from ratp.streams.benchmarks import DIGITS, DOMAINNET10, PACS
from ratp.streams.embedded import DEMO
from ratp.streams.own import NAME as FOLDERS
from ratp.streams.own import from_file, from_root

STREAMS: dict[str, StreamSpec] = {spec.name: spec for spec in (DEMO, DIGITS, PACS, DOMAINNET10)}


def find_stream(name: str) -> StreamSpec:
    """The stream called ``name``, or the one that a ``.toml`` file or a folder of domains describes.

    Raises:
        ConfigError: If there is none, with the nearest name.
    """
    if name in STREAMS:
        return STREAMS[name]
    if name.endswith(".toml"):
        return from_file(Path(name))
    if name.strip() and is_folder(Path(name)):
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
    """Whether a path is that of a folder; one that cannot be looked at is none."""
    try:
        return path.is_dir()
    except OSError:  # too long a name, or no permission
        return False
