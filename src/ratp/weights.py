"""Pretrained weights of backbones: published ones, or a user's own safetensors file, checked before they are loaded."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from ratp.backbones import RESNETS, TIMM, check_backbone, timm_library
from ratp.checkpoint import looks_like, read_pickle
from ratp.errors import ConfigError, RatpError, unknown
from ratp.files import hash_of, read_tensors, sha256_of
from ratp.fit import OWN_PREFIX, best_fit, fitting_backbone, refuse_non_numbers
from ratp.notes import Note
from ratp.schema import WEIGHTS

# Endings of files that hold pickles.
PICKLED = frozenset({".pth", ".pt", ".bin", ".ckpt", ".pkl", ".tar", ".th"})
OTHERWISE = "Give a file of your own by --weights FILE, or --weights none to start from random numbers."


class PartWarning(Note):
    """Of a file of weights, a part is taken."""


@dataclass(frozen=True)
class Weights:
    """Weights to start a backbone from.

    Attributes:
        name: Name of the file or of the published weights; never a path.
        sha256: Hash of the file, or of the tensors where there is no one file.
        tensors: The tensors by name.
    """

    name: str
    sha256: str
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)  # the hash says it all


def find_weights(asked: str, backbone: str) -> Weights | None:
    """Finds weights, and reads them.

    Args:
        asked: ``none``, ``imagenet`` for the published ones, or the path of a safetensors file.
        backbone: Name of the backbone they are for.

    Returns:
        The weights; None to start from random numbers.

    Raises:
        ConfigError: If there are none, or the file is a pickle.
        RatpError: If they cannot be downloaded or read.
    """
    if asked == "none":
        return None
    if asked == "imagenet":
        check_backbone(backbone)
        if backbone in RESNETS:
            return _published_by_torchvision(backbone)
        if backbone.startswith(TIMM):
            return _published_by_timm(backbone)
        raise ConfigError(f"there are no published weights for {backbone}. {OTHERWISE}")
    return _read_file(asked, backbone)


def load_backbone(backbone: nn.Module, weights: Weights) -> tuple[str, ...]:
    """Loads weights into a backbone, all of them or none.

    Names are the backbone's, or all begin with ``backbone.`` as in the weights of a run.

    Args:
        backbone: Module to load into; floating-point tensors are converted to its type.
        weights: What to load.

    Returns:
        Names that were not needed: classifiers, and what lies outside of ``backbone.``

    Raises:
        RatpError: If something is missing, superfluous, of another shape or not a number.
    """
    expected = backbone.state_dict()
    fit = best_fit(expected, weights.tensors, ("", OWN_PREFIX))
    if not fit.fits:
        raise RatpError(
            f"the weights {weights.name} do not fit the backbone. {fit.explain()} {advise(weights.tensors)}"
        )
    found = {name: weights.tensors[source] for name, source in fit.names.items()}
    refuse_non_numbers(weights.name, found)
    backbone.load_state_dict({name: tensor.to(expected[name].dtype) for name, tensor in found.items()}, strict=False)
    return fit.ignored


def advise(found: Mapping[str, Tensor]) -> str:
    """The nearest fix for weights that do not fit."""
    fitting = fitting_backbone(found, ("", OWN_PREFIX))
    if fitting:
        setting = f"network.backbone={fitting}" + (" and network.width=1" if fitting == "dtn" else "")
        return f"They are those of {fitting}: set {setting}, or give other weights."
    return "Give weights of this backbone at this width, or --weights none to start from random numbers."


def import_command(path: str, backbone: str | None = None) -> str:
    """The command that makes a safetensors file of a checkpoint."""
    option = ["--backbone", backbone] if backbone else []
    return shlex.join(["ratp", "import-weights", path, str(Path(path).with_suffix(".safetensors")), *option])


def _read_file(asked: str, backbone: str) -> Weights:
    path = Path(asked)
    try:
        if not path.exists():
            if path.name == asked and not path.suffix:
                names = unknown("weights", asked, ("none", "imagenet"))
                raise ConfigError(f"{names} Or give the path of a .safetensors file.")
            raise ConfigError(f"the weights file {asked!r} does not exist. Or use --weights imagenet or none.")
        if path.is_dir():
            inside = path / "weights.safetensors"
            hint = f"give {str(inside)!r}" if inside.is_file() else "give a .safetensors file"
            raise ConfigError(f"the weights {asked!r} are a folder: {hint}.")
        if path.suffix.lower() in PICKLED:
            raise ConfigError(
                f"{path.name} may be a pickle, which can run code when it is read. "
                f"Import it once: {import_command(asked, backbone)}"
            )
        problem = looks_like(path)
        if problem:
            raise RatpError(f"the weights file {asked} {problem}.")
        return _read_once(path, _state_of(path))
    except OSError as error:
        raise ConfigError(f"cannot read the weights file {asked!r}: {error.strerror or error}.") from error


def _state_of(path: Path) -> tuple[int, ...]:
    """What changes if a file does."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=2)
def _read_once(path: Path, state: tuple[int, ...]) -> Weights:
    """The weights in a file: all runs of a study share them, as long as the file's state does not change."""
    tensors, about = read_tensors(path)
    WEIGHTS.read(about, path)
    own = [name for name in tensors if name.startswith(OWN_PREFIX)]
    others = list(dict.fromkeys(name.partition(".")[0] for name in tensors if name not in own))
    if own and others:
        told = f"of {path}, the network of a run, the feature extractor is taken ({len(own)} tensors)"
        warnings.warn(f"{told}; the rest ({', '.join(others)}) begins anew", PartWarning, stacklevel=4)
    return Weights(path.name, sha256_of(path), tensors)


def _published_by_torchvision(backbone: str) -> Weights:
    import torchvision.models

    from ratp.data.download import download

    published = torchvision.models.get_model_weights(backbone)["IMAGENET1K_V1"]
    name = published.url.rpartition("/")[2]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    download([published.url], path, None, manual=OTHERWISE)
    return _read_published_once(path, _state_of(path))


@lru_cache(maxsize=2)
def _read_published_once(path: Path, state: tuple[int, ...]) -> Weights:
    """The weights in a file of torchvision's, likewise."""
    digest = sha256_of(path)
    wanted = path.stem.rpartition("-")[2]  # torchvision's names end in the first digits of the hash
    if not digest.startswith(wanted):
        raise RatpError(f"{path} is damaged: expected a sha256 {wanted}…, found {digest}. Delete it and retry.")
    return Weights(path.name, digest, read_pickle(path))


@lru_cache(maxsize=2)
def _published_by_timm(backbone: str) -> Weights:
    timm = timm_library()
    name = backbone.removeprefix(TIMM)
    architecture = name.partition(".")[0]
    if not timm.list_pretrained(f"{architecture}.*"):
        raise ConfigError(f"timm has no published weights for {name}. {OTHERWISE}")
    try:
        with torch.random.fork_rng(devices=[]):
            model = timm.create_model(name, num_classes=0, pretrained=True)
    except Exception as error:  # timm, its hub and the network each fail in their own ways
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise RatpError(f"could not get timm's published weights for {name} ({reason}). {OTHERWISE}") from error
    tensors = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    tag = model.pretrained_cfg.get("tag")
    return Weights(f"{architecture}.{tag}" if tag else architecture, hash_of(tensors), tensors)
