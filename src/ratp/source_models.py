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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ratp.environment import code_hash
from ratp.errors import RatpError, RunDirectoryError
from ratp.file_lock import FileLock, hold_if_free
from ratp.files import is_leftover, read_tensors, write_tensors
from ratp.notes import note_not_kept
from ratp.numbers import lost_weights
from ratp.schema import SOURCE_MODEL

# Networks kept; the one that was used least recently goes first.
MOST = 40
DAY = 24 * 60 * 60.0

# The locks that a thread of this process has: a thread that waited for itself would wait forever.
_HOLDERS: dict[Path, int] = {}


class TakenError(RatpError):
    """Another run trains the network that is looked for.

    Attributes:
        path: Where that run will keep it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(f"another run trains the network that is to be kept in {path}; start again when it has.")
        self.path = path


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
        """The tensors kept under ``key``; None: there are none, and the others wait until this run keeps them.

        Raises:
            TakenError: If another run trains them; :meth:`is_there_or_claimed` tells when it does so no more.
        """
        path = self._path(key)
        lock = _lock_of(path)
        tensors = _read(path)
        # Another run that this thread makes in turn with this one would be waited for in vain.
        if tensors is None and self._holds != lock and _HOLDERS.get(lock) != threading.get_ident():
            if not self._claim(lock):
                raise TakenError(path)
            tensors = _read(path)  # another run may have trained them meanwhile
        if tensors is not None:
            self.release()
        return tensors

    def is_there_or_claimed(self, path: Path) -> bool:
        """Whether another run has kept its network or given up; in the latter case the others wait for this one now."""
        return _read(path) is not None or self._claim(_lock_of(path))

    def _claim(self, lock: Path) -> bool:
        """Makes others wait who look for the same; False: another run does so. Without locks, nobody waits."""
        self.release()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            held = hold_if_free(lock)
        except OSError:  # not to be written
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
        """Keeps tensors for the next time, if the folder can be written and they are numbers."""
        path = self._path(key)
        try:
            if not lost_weights(tensors):
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

    @property
    def _holds(self) -> Path | None:
        return self._held.path if self._held else None

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


def _lock_of(path: Path) -> Path:
    """What a run holds that trains the network to be kept at ``path``."""
    return path.with_suffix(".lock")


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
