"""Checkpoints within a stage: a run that is stopped there goes on with the step it was at.

They lie beside the state of the last finished stage, which they build on: ``checkpoint.safetensors`` and, in case that
one is damaged, the one before. Each holds what changed since the stage began (:mod:`ratp.snapshot`); one that is not as
it was written, or belongs to another run or stage, counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ratp.errors import RatpError
from ratp.files import hash_of, read_tensors, write_tensors, writing
from ratp.schema import CHECKPOINT, NewerFileError
from ratp.snapshot import Snapshot

LATEST, BEFORE = "checkpoint.safetensors", "checkpoint-before.safetensors"


@dataclass
class Checkpoint:
    """A moment within a stage.

    Attributes:
        stage: Number of the stage.
        snapshot: What had changed since it began.
        place: Number of the phase under way, and how many of its epochs had begun.
        done: Steps made in it.
        seconds: Time it had taken.
        statistics: What its finished phases had recorded.
        events: What the journal said of it.
    """

    stage: int
    snapshot: Snapshot = field(default_factory=Snapshot)
    place: tuple[int, int] = (0, 0)
    done: int = 0
    seconds: float = 0.0
    statistics: dict[str, float] = field(default_factory=dict)
    events: list[Mapping[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: The run's directory.
        fingerprint: Hash of all that determines the run.
        every: Seconds between two; None: none are made, but those there are used.
    """

    def __init__(self, folder: Path, fingerprint: str, every: float | None) -> None:
        self._folder, self._fingerprint, self._every = folder, fingerprint, every
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for one."""
        return self._every is not None and time.monotonic() - self._last >= self._every

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint; the latest one becomes the one before."""
        changes = json.dumps([checkpoint.snapshot.changes, checkpoint.statistics, checkpoint.events], sort_keys=True)
        about = {
            **CHECKPOINT.mark,
            "fingerprint": self._fingerprint,
            "stage": checkpoint.stage,
            "place": list(checkpoint.place),
            "done": checkpoint.done,
            "seconds": checkpoint.seconds,
            "changes": changes,
        }
        latest = self._folder / LATEST
        with writing(latest), suppress(FileNotFoundError):
            latest.replace(self._folder / BEFORE)
        write_tensors(latest, checkpoint.snapshot.tensors, about)
        self._last = time.monotonic()

    def found(self, stage: int) -> Iterator[Checkpoint]:
        """The checkpoints of a stage that can be trusted, the latest first.

        Raises:
            NewerFileError: If one is of a later version.
        """
        for name in (LATEST, BEFORE):
            checkpoint = self._read(self._folder / name, stage)
            if checkpoint is not None:
                yield checkpoint

    def remove(self) -> None:
        """Removes them all: their stage is finished."""
        for name in (LATEST, BEFORE):
            with suppress(OSError):  # one of a finished stage counts for nothing
                (self._folder / name).unlink()
        self._last = time.monotonic()

    def _read(self, path: Path, stage: int) -> Checkpoint | None:
        if not path.exists():
            return None
        try:
            tensors, written = read_tensors(path)
            about = CHECKPOINT.read(written, path)
            if (about["fingerprint"], about["stage"]) != (self._fingerprint, stage) or not _is_whole(written, tensors):
                return None
            changes, statistics, events = json.loads(about["changes"])
            phase, epochs = about["place"]
            return Checkpoint(
                stage=stage,
                snapshot=Snapshot(tensors, changes),
                place=(phase, epochs),
                done=about["done"],
                seconds=about["seconds"],
                statistics=statistics,
                events=events,
            )
        except NewerFileError:
            raise
        except (RatpError, KeyError, TypeError, ValueError, RecursionError):
            return None


def _is_whole(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint of version 1, which has a hash of its own, is as it was written; others are."""
    rest = {name: value for name, value in about.items() if name != "hash"}
    text = json.dumps(rest, sort_keys=True).encode()
    return rest == about or about["hash"] == hash_of(tensors) + hashlib.sha256(text).hexdigest()
