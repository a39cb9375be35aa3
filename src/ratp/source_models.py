"""Networks trained on a source, kept on disk: methods that begin with the same training share it.

What is kept is found again only by a run that would compute the same: same images, sizes, switches, seed, starting
weights, device and libraries, and the same code of this package, to the letter. A file that is missing, damaged or not
ours is no reason to stop: the network is then trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratp.errors import RunDirectoryError
from ratp.files import read_tensors, write_tensors

# Networks kept; the one that was used least recently goes first.
MOST = 40


class SourceModels:
    """The networks of one folder, for runs of one kind.

    Args:
        folder: Where they lie; made if need be.
        about: What they depend on, beside the method: everything but the code, as plain data.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._folder = folder
        self._about = {**about, "torch": torch.__version__, "threads": torch.get_num_threads(), "code": _code()}

    def find(self, key: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """The tensors kept under ``key``; None: there are none."""
        path = self._path(key)
        try:
            tensors, about = read_tensors(path)
        except RunDirectoryError:
            return None
        if about.get("key") != path.stem or about.get("hash") != _hash_of(tensors):
            return None
        with suppress(OSError):
            path.touch()
        return tensors

    def keep(self, key: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keeps tensors for the next time, if the folder can be written."""
        path = self._path(key)
        with suppress(OSError, RunDirectoryError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_tensors(path, tensors, {"key": path.stem, "hash": _hash_of(tensors)})
            kept = sorted(self._folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
            for file in kept[:-MOST]:
                file.unlink()

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps([self._about, key], sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.safetensors"


def _hash_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@cache
def _code() -> str:
    """The hash of all code of this package."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
