"""Networks trained on a source, kept on disk: runs that begin with the same training share it.

What is kept is found again only by a run that would compute the same: same images, sizes, switches, seed, starting
weights, device and libraries, and the same code of this package, to the letter. A run that comes while another trains
the network waits for it. A file that is missing, damaged or not ours is no reason to stop: the network is then trained.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ratp.environment import code_hash
from ratp.errors import RunDirectoryError
from ratp.file_lock import FileLock, hold, hold_if_free
from ratp.files import is_leftover, read_tensors, write_tensors
from ratp.notes import Note, note_not_kept
from ratp.schema import SOURCE_MODEL

# Networks kept; the one that was used least recently goes first.
MOST = 40
DAY = 24 * 60 * 60.0

# The locks that a thread of this process has: a thread that waited for itself would wait forever.
_HOLDERS: dict[Path, int] = {}


class WaitingWarning(Note):
    """A run waits for another that trains the network both begin with."""


class SourceModels:
    """The networks of one folder, for runs of one kind.

    Args:
        folder: Where they lie; made if need be.
        about: What they depend on, beside the method: everything but the code, as plain data.
    """

    transient: ClassVar[bool] = True

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._folder = folder
        self._about = {**about, "torch": torch.__version__, "threads": torch.get_num_threads(), "code": code_hash()}
        self._held: FileLock | None = None

    def find(self, key: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The tensors kept under ``key``; None: there are none, and the others wait until this run keeps them."""
        path = self._path(key)
        tensors = _read(path)
        if tensors is None and self._hold(path):
            tensors = _read(path)  # another run may have trained them meanwhile
            if tensors is not None:
                self.release()
        return tensors

    def keep(self, key: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keeps tensors for the next time, if the folder can be written."""
        path = self._path(key)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_tensors(path, tensors, SOURCE_MODEL.marked({"key": path.stem}))
        except (OSError, RunDirectoryError) as error:
            note_not_kept("the source network", self._folder, error)
        self.release()
        self._tidy()

    def _tidy(self) -> None:
        """Removes networks beyond those that are kept, and what killed writers left; others may do the same."""
        with suppress(OSError):
            last_used = {file: file.stat().st_mtime for file in self._folder.iterdir() if file.suffix != ".lock"}
            written = sorted((file for file in last_used if not is_leftover(file)), key=last_used.__getitem__)
            stale = [file for file in last_used if is_leftover(file) and last_used[file] < time.time() - DAY]
            for file in (*written[:-MOST], *stale):
                file.unlink(missing_ok=True)

    def release(self) -> None:
        """Lets the others go on, whether something was kept or not."""
        if self._held is not None:
            held, self._held = self._held, None
            _HOLDERS.pop(held.path, None)
            with suppress(OSError):
                held.release()

    def _hold(self, path: Path) -> bool:
        """Makes others wait who look for the same, after waiting for one who did so; False: that is not possible."""
        self.release()
        lock = path.with_suffix(".lock")
        if _HOLDERS.get(lock) == threading.get_ident():  # another run that this thread makes in turn with this one
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            held = hold_if_free(lock)
            if held is None:
                warnings.warn("waiting for another run that trains the same source network", WaitingWarning, 3)
                held = hold(lock)
            if not held.keeps_out:
                held.release()
                return False
        except OSError:  # not to be written
            return False
        self._held = held
        _HOLDERS[lock] = threading.get_ident()
        return True

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps([self._about, key], sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.safetensors"


class SharedTraining:
    """The training of a network on a source, which another run may have done already.

    Args:
        models: What other runs have trained; None: nothing is shared.
        key: What the result depends on, beside what ``models`` knows.
        network: What is to be trained.
    """

    transient: ClassVar[bool] = True

    def __init__(self, models: SourceModels | None, key: Mapping[str, Any], network: nn.Module) -> None:
        self._models, self._key, self._network = models, key, network
        self._found = models.find(key) if models else None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to train."""
        return self._found is not None

    def finish(self) -> dict[str, float]:
        """Ends the training: the network is the trained one now, and others can take it. Returns what to record."""
        if self._found is not None:
            self._network.load_state_dict(self._found)
            return {"from_cache": 1.0}
        if self._models:
            self._models.keep(self._key, self._network.state_dict())
        return {}


def _read(path: Path) -> dict[str, Tensor] | None:
    """What was kept in a file; None if it is not there, or not as it was written."""
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
