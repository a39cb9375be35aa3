"""A checkpoint as ``torch.save`` wrote it: the one place where a pickle is read, and only for its tensors.

``torch.load(weights_only=True)`` builds tensors and plain containers and runs nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratp.errors import ConfigError, RatpError
from ratp.notes import quietly

# Where training code keeps a network in what it saves; looked at in this order.
_KEYS = ("state_dict", "model_state_dict", "model", "net", "network", "backbone", "encoder", "weights", "params")
_DEPTH = 3


def read_pickle(path: Path) -> Any:
    """Reads what ``torch.save`` wrote, if it is tensors and plain containers.

    Raises:
        RatpError: If it is anything else. Nothing in it is run.
    """
    try:
        problem = looks_like(path)
        if problem:
            raise RatpError(f"{path} {problem}.")
        with quietly:
            return torch.load(path, map_location="cpu", weights_only=True)
    except RatpError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist.") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # a damaged file can break the reader anywhere
        raise RatpError(f"{path} {_refusal(path, str(error))}") from error


def _refusal(path: Path, reason: str) -> str:
    """Why a file is not read. What torch says itself goes on to advise running whatever the file holds."""
    advice = "Where it comes from, save the tensors alone: torch.save(model.state_dict(), FILE)."
    asked = re.search(r"\bGLOBAL (\S+)", reason)
    if asked:
        return f"holds more than tensors: it asks for {asked[1]!r}. Nothing in it was run. {advice}"
    if "TorchScript" in reason:
        return f"holds a program of TorchScript. Nothing in it was run. {advice}"
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    return "is truncated or damaged. Get it anew." if is_zip else f"is damaged, or no checkpoint of tensors. {advice}"


def state_dicts(data: Any, depth: int = _DEPTH) -> Iterator[dict[str, Tensor]]:
    """Every mapping from names to tensors within a checkpoint, the likeliest first."""
    if not isinstance(data, Mapping):
        return
    tensors = {key: value for key, value in data.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if tensors:
        yield tensors
    if depth:
        known = [key for key in _KEYS if key in data]
        for key in [*known, *(key for key in data if key not in known)]:
            yield from state_dicts(data[key], depth - 1)


def looks_like(path: Path) -> str | None:
    """What a file that should hold weights seems to be instead, in words."""
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return "is empty"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"<":
        return "is a web page; download the file anew"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer; fetch the file itself with git lfs pull"
    return None
