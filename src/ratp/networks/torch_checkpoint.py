"""Checkpoints written by ``torch.save``: the only place where a pickle is read, and only for its tensors.

``torch.load(weights_only=True)`` builds tensors and plain containers and runs nothing else. :func:`import_checkpoint`
extracts a backbone's tensors into a safetensors file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratp._core.environment import quietly
from ratp._core.files import WEIGHTS, open_file, read_tensors, sha256_of, write_tensors
from ratp.errors import ConfigError, RatpError
from ratp.networks.backbones import NAMES, expected_tensors
from ratp.networks.weight_matching import Match, abbreviate, best_match, matching_backbone, refuse_non_finite

# Where training code stores a network in a checkpoint, likeliest first.
_KEYS = ("state_dict", "model_state_dict", "model", "net", "network", "backbone", "encoder", "weights", "params")
_DEPTH = 3
# Prefixes that wrappers put before the names of a network.
_WRAPPERS = frozenset({"module", "backbone", "encoder", "encoder_q", "model", "net", "network", "_orig_mod"})


def read_pickle(path: Path) -> Any:
    """Reads what ``torch.save`` wrote, if it is tensors and plain containers."""
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
    """Explains why a file is refused; torch's own message advises running whatever the file contains."""
    advice = "Where it was made, save the tensors alone: torch.save(model.state_dict(), FILE)."
    asked = re.search(r"\bGLOBAL (\S+)", reason)
    if asked:
        return f"holds more than tensors: it asks for {asked[1]!r}. Nothing in it was run. {advice}"
    if "TorchScript" in reason:
        return f"holds a TorchScript program. Nothing in it was run. {advice}"
    with open_file(path) as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    return "is truncated or damaged. Get it again." if is_zip else f"is damaged, or no checkpoint of tensors. {advice}"


def state_dicts(data: Any, depth: int = _DEPTH) -> Iterator[dict[str, Tensor]]:
    """Yields every mapping from names to tensors within a checkpoint, the likeliest first."""
    if not isinstance(data, Mapping):
        return
    tensors = {key: value for key, value in data.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if tensors:
        yield tensors
    if depth:
        for key in sorted(data, key=lambda key: _KEYS.index(key) if key in _KEYS else len(_KEYS)):
            yield from state_dicts(data[key], depth - 1)


def looks_like(path: Path) -> str | None:
    """Describes what a file that should contain weights seems to be instead; None if nothing else."""
    with open_file(path) as file:
        head = file.read(512)
    if not head:
        return "is empty"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"<":
        return "is a web page; download the file again"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer; fetch the file itself with git lfs pull"
    return None


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    backbone: str  # name of the backbone it belongs to
    kept: tuple[str, ...]  # names that were written
    ignored: tuple[str, ...]  # names in the checkpoint that were not needed
    sha256: str  # hash of the file written


def import_checkpoint(source: Path, target: Path, backbone: str | None = None, *, replace: bool = False) -> Imported:
    """Writes the tensors of a backbone (None: whichever built-in one matches) to a safetensors file.

    They come from a checkpoint of ``torch.save``, or from a safetensors file with other names. ``target`` may exist
    already only with ``replace``.
    """
    _check_files(source, target, replace=replace)
    candidates = {name: expected_tensors(name) for name in ([backbone] if backbone else NAMES)}
    data = read_tensors(source)[0] if source.suffix.lower() == ".safetensors" else read_pickle(source)
    found = list(state_dicts(data))
    if not found:
        raise RatpError(f"{source} holds no tensors under names: expected the state dict of a network.")
    matches: list[tuple[Match, str]] = []
    for (name, expected), tensors in product(candidates.items(), found):
        match = best_match(expected, tensors, _prefixes(tensors))
        if match.complete:
            return _write(source, target, name, match, tensors)
        matches.append((match, name))
    match, name = max(matches, key=lambda item: item[0].score)
    if backbone is None:
        raise RatpError(
            f"{source} matches no built-in backbone; nearest is {name}. {match.explain()} "
            "For another one, add --backbone timm:NAME."
        )
    other = next(filter(None, (matching_backbone(tensors, _prefixes(tensors)) for tensors in found)), None)
    advice = f"It is that of {other}: use --backbone {other}." if other else "Give the backbone it was made with."
    raise RatpError(f"{source} does not fit {name}. {match.explain()} {advice}")


def _check_files(source: Path, target: Path, *, replace: bool) -> None:
    problems = []
    try:
        if not source.is_file():
            kind = "is a folder" if source.is_dir() else "is a pipe or a device"
            problems.append(f"{source} {kind}: give a file." if source.exists() else f"{source} does not exist.")
        if target.suffix.lower() != ".safetensors":
            problems.append(f"the file to write must end in .safetensors, got {str(target)!r}.")
        elif target.is_dir() or (target.exists() and source.exists() and target.samefile(source)):
            problems.append(f"{target} cannot be replaced: choose another name.")
        elif target.exists() and not replace:
            problems.append(f"{target} exists: choose another name, or add --replace.")
        elif not target.parent.is_dir():
            problems.append(f"the folder {target.parent} does not exist: create it first.")
    except OSError as error:  # a name too long, a folder without permission
        problems.append(f"{error.filename}: {error.strerror}.")
    if problems:
        raise ConfigError(problems)


def _prefixes(tensors: Mapping[str, Tensor]) -> list[str]:
    """The empty prefix and all that wrappers may have put before the names, shortest first."""
    found = {"": None}
    for name in tensors:
        prefix = ""
        for part in name.split(".")[:-1]:
            if part not in _WRAPPERS:
                break
            prefix += f"{part}."
            found[prefix] = None
    return sorted(found, key=lambda prefix: prefix.count("."))


def _write(source: Path, target: Path, backbone: str, match: Match, tensors: Mapping[str, Tensor]) -> Imported:
    kept = {name: tensors[original].detach() for name, original in match.names.items()}
    odd = [name for name, t in kept.items() if t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized]
    if odd:
        raise RatpError(f"{source} holds tensors that are sparse, quantised or without data: {abbreviate(odd)}.")
    refuse_non_finite(source.name, kept)
    about = {"backbone": backbone, "source": source.name, "source_sha256": sha256_of(source)}
    write_tensors(target, kept, WEIGHTS.marked(about))
    return Imported(backbone, tuple(kept), match.ignored, sha256_of(target))
