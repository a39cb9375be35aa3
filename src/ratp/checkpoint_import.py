"""A user's own checkpoint made into a safetensors file: the tensors of a backbone, found, checked and copied out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ratp.backbones import NAMES, expected_tensors
from ratp.checkpoint import read_pickle, state_dicts
from ratp.errors import ConfigError, RatpError
from ratp.files import read_tensors, sha256_of, write_tensors
from ratp.fit import Fit, abbreviate, best_fit, refuse_non_numbers
from ratp.schema import WEIGHTS

# What wrappers put before the names of a network.
_WRAPPERS = frozenset({"module", "backbone", "encoder", "encoder_q", "model", "net", "network", "_orig_mod"})


@dataclass(frozen=True)
class Imported:
    """What came of a checkpoint.

    Attributes:
        backbone: Name of the backbone it fits.
        kept: Names that were written.
        ignored: Names in the checkpoint that were not needed.
        sha256: Hash of the file written.
    """

    backbone: str
    kept: tuple[str, ...]
    ignored: tuple[str, ...]
    sha256: str


def import_checkpoint(source: Path, target: Path, backbone: str | None = None, *, replace: bool = False) -> Imported:
    """Writes the tensors of a backbone, found in a checkpoint, as a safetensors file.

    Args:
        source: The checkpoint, as ``torch.save`` wrote it; or a safetensors file with other names.
        target: The file to write.
        backbone: Name of the backbone it is for; None: whichever of the built-in ones it fits.
        replace: Whether ``target`` may exist already.

    Raises:
        ConfigError: If ``target`` cannot be written, or there is no such backbone.
        RatpError: If the checkpoint holds anything but data, is damaged, or does not fit.
    """
    _check_files(source, target, replace=replace)
    candidates = {name: expected_tensors(name) for name in ([backbone] if backbone else NAMES)}
    data = read_tensors(source)[0] if source.suffix.lower() == ".safetensors" else read_pickle(source)
    found = list(state_dicts(data))
    if not found:
        raise RatpError(f"{source} holds no tensors under names: expected the state dict of a network.")
    misfits: list[tuple[Fit, str]] = []
    for name, expected in candidates.items():
        for tensors in found:
            fit = best_fit(expected, tensors, _prefixes(tensors))
            if fit.fits:
                return _write(source, target, name, fit, tensors)
            misfits.append((fit, name))
    fit, name = max(misfits, key=lambda item: (len(item[0].names), -len(item[0].missing)))
    if backbone is None:
        others = ", ".join(other for other in NAMES if other != name)
        raise RatpError(
            f"{source} fits no built-in backbone; nearest is {name}. {fit.explain()} "
            f"It fits {others} even less: name another by --backbone timm:NAME."
        )
    other = next((o for o in NAMES if o != name and any(_fits(o, tensors) for tensors in found)), None)
    advice = f"It is that of {other}: use --backbone {other}." if other else "Give the backbone it was made with."
    raise RatpError(f"{source} does not fit {name}. {fit.explain()} {advice}")


def _check_files(source: Path, target: Path, *, replace: bool) -> None:
    problems = []
    try:
        if not source.is_file():
            problems.append(f"{source} is a folder: give a file." if source.is_dir() else f"{source} does not exist.")
        if target.suffix.lower() != ".safetensors":
            problems.append(f"the file to write must end in .safetensors, got {str(target)!r}.")
        elif target.is_dir() or (target.exists() and source.exists() and target.samefile(source)):
            problems.append(f"{target} cannot be replaced: choose another name.")
        elif target.exists() and not replace:
            problems.append(f"{target} exists: choose another name, or add --replace.")
        elif not target.parent.is_dir():
            problems.append(f"the folder {target.parent} does not exist: make it first.")
    except OSError as error:  # a name too long, a folder that may not be entered
        problems.append(f"{error.filename}: {error.strerror}.")
    if problems:
        raise ConfigError(problems)


def _prefixes(tensors: Mapping[str, Tensor]) -> list[str]:
    """Nothing, and everything wrappers may have put before the names; shortest first."""
    found = {"": None}
    for name in tensors:
        prefix = ""
        for part in name.split(".")[:-1]:
            if part not in _WRAPPERS:
                break
            prefix += f"{part}."
            found[prefix] = None
    return sorted(found, key=lambda prefix: prefix.count("."))


def _fits(backbone: str, tensors: Mapping[str, Tensor]) -> bool:
    return best_fit(expected_tensors(backbone), tensors, _prefixes(tensors)).fits


def _write(source: Path, target: Path, backbone: str, fit: Fit, tensors: Mapping[str, Tensor]) -> Imported:
    kept = {name: tensors[original].detach() for name, original in fit.names.items()}
    odd = [name for name, t in kept.items() if t.layout != torch.strided or t.device.type != "cpu" or t.is_quantized]
    if odd:
        raise RatpError(f"{source} holds tensors that are sparse, quantised or without data: {abbreviate(odd)}.")
    refuse_non_numbers(source.name, kept)
    about = {"backbone": backbone, "source": source.name, "source_sha256": sha256_of(source)}
    write_tensors(target, kept, WEIGHTS.marked(about))
    return Imported(backbone, tuple(kept), fit.ignored, sha256_of(target))
