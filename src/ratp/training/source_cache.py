"""A cache of source networks on disk, shared by runs that begin with the same training.

Only a run that would compute the same network finds it: same images, sizes, switches, seed, initial weights, device or
kind of processor, libraries and code of this package. A run waits while another trains the network it needs. If a file
is missing, damaged or foreign, the network is trained.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ratp._core.environment import code_hash
from ratp._core.files import SOURCE_MODEL, is_leftover, read_tensors, write_tensors
from ratp._core.locks import HeldLock, try_acquire
from ratp.errors import RatpError, RunDirectoryError, warn_not_cached
from ratp.training.finite import lost_weights

# Networks to keep; the least recently used is deleted first.
MOST = 40
DAY = 24 * 60 * 60.0

# Locks held by threads of this process: a thread must not wait for a lock that it holds itself.
_HOLDERS: dict[Path, int] = {}


class TakenError(RatpError):
    """Another run trains the network that this one needs."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"another run is training the network for {path}; start again when it has finished.")
        self.path = path  # where that run will store it


class SourceModels:
    """The networks of one folder, which is created if missing, for runs of one kind.

    ``about`` is what the networks depend on besides method and code, as plain data.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._folder = folder
        self._about = {**about, "torch": torch.__version__, "threads": torch.get_num_threads(), "code": code_hash()}
        self._held: HeldLock | None = None

    def find(self, key: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Returns the tensors stored under ``key``; None if there are none, and other runs wait for this one."""
        path = self._path(key)
        lock = _lock_of(path)
        tensors = _read(path)
        # Waiting for a run that this thread interleaves with this one would never end.
        if tensors is None and self._holds != lock and _HOLDERS.get(lock) != threading.get_ident():
            if not self._claim(lock):
                raise TakenError(path)
            tensors = _read(path)  # another run may have trained them meanwhile
        if tensors is not None:
            self.release()
        return tensors

    def is_there_or_claimed(self, path: Path) -> bool:
        """Whether another run has stored its network, or has given up, so that this run could claim it."""
        return _read(path) is not None or self._claim(_lock_of(path))

    def _claim(self, lock: Path) -> bool:
        """Makes other runs wait for this one; False if another run was first. Without locks, no run waits."""
        self.release()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            held = try_acquire(lock)
        except OSError:  # the folder is not writable
            return True
        if held is None:
            return False
        if held.keeps_out:
            self._held = held
            _HOLDERS[lock] = threading.get_ident()
        else:
            with suppress(OSError):
                held.release()
        return True

    def keep(self, key: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Stores tensors, if they are finite and the folder can be written."""
        path = self._path(key)
        try:
            if not lost_weights(tensors):
                self._folder.mkdir(parents=True, exist_ok=True)
                write_tensors(path, tensors, SOURCE_MODEL.marked({"key": path.stem}))
        except (OSError, RunDirectoryError) as error:
            warn_not_cached("the source network", self._folder, error)
        self.release()
        self._tidy()

    def _tidy(self) -> None:
        """Removes surplus networks and leftovers of killed writers; other processes may do the same."""
        with suppress(OSError):
            last_used = {file: file.stat().st_mtime for file in self._folder.iterdir() if file.suffix != ".lock"}
            written = sorted((file for file in last_used if not is_leftover(file)), key=last_used.__getitem__)
            stale = [file for file in last_used if is_leftover(file) and last_used[file] < time.time() - DAY]
            for file in (*written[:-MOST], *stale):
                file.unlink(missing_ok=True)

    def release(self) -> None:
        """Lets waiting runs continue, whether something was stored or not."""
        if self._held is not None:
            held, self._held = self._held, None
            _HOLDERS.pop(held.path, None)
            with suppress(OSError):
                held.release()

    @property
    def _holds(self) -> Path | None:
        return self._held.path if self._held else None

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps([self._about, key], sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.safetensors"


class AdoptedSource:
    """Stands in for the cache of source networks: every network that a run would train is the adopted one.

    Attributes:
        used: Whether a phase has taken it.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.used = False

    def find(self, key: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the adopted network."""
        del key
        self.used = True
        return self._tensors

    def keep(self, key: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Does nothing: the network is not trained."""

    def release(self) -> None:
        """Does nothing: no other run waits."""


class SharedTraining:
    """The training of a source network, which another run may have done already.

    ``models`` are networks of other runs (None: nothing is shared), ``key`` is what the result depends on besides.
    """

    def __init__(self, models: SourceModels | AdoptedSource | None, key: Mapping[str, Any], network: nn.Module) -> None:
        self._models, self._key, self._network = models, key, network
        self._found = models.find(key) if models else None

    @property
    def is_done(self) -> bool:
        """Whether another run has trained the network."""
        return self._found is not None

    def finish(self) -> dict[str, float]:
        """Loads the trained network, or stores it for other runs; returns statistics to record."""
        if self._found is not None:
            self._network.load_state_dict(self._found)
            return {"from_cache": 1.0}
        if self._models:
            self._models.keep(self._key, self._network.state_dict())
        return {}


def _lock_of(path: Path) -> Path:
    """Returns the lock of the run that trains the network at ``path``."""
    return path.with_suffix(".lock")


def _read(path: Path) -> dict[str, Tensor] | None:
    """Reads a file; None if it is missing or damaged."""
    try:
        tensors, about = read_tensors(path)
        about = SOURCE_MODEL.read(about, path)
    except RunDirectoryError:
        return None
    if about.get("key") != path.stem:
        return None
    with suppress(OSError):
        path.touch()
    return tensors
