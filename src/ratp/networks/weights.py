"""Pretrained weights of backbones: published ones, or a user's own safetensors file, checked before they are loaded."""

from __future__ import annotations

import logging
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from ratp._core.files import WEIGHTS, hash_of, read_tensors, sha256_of
from ratp.errors import ConfigError, Note, RatpError, unknown
from ratp.networks.backbones import REGISTRY, TIMM, check_backbone, timm_library
from ratp.networks.torch_checkpoint import looks_like, read_pickle
from ratp.networks.weight_matching import best_match, matching_backbone, refuse_non_finite

# The prefix of the backbone's tensors in ratp's own networks.
OWN_PREFIX = "backbone."
# Suffixes of files that hold pickles.
PICKLED = frozenset({".pth", ".pt", ".bin", ".ckpt", ".pkl", ".tar", ".th"})
OTHERWISE = "Give your own file with --weights FILE, or --weights none to start from random numbers."


class PartWarning(Note):
    """Only part of a weights file is used."""


class DownloadWarning(Note):
    """Weights are downloaded, which takes a while."""


@dataclass(frozen=True)
class Weights:
    """Initial weights of a backbone."""

    name: str  # name of the file or of the published weights; never a path
    sha256: str  # hash of the file, or of the tensors where there is no single file
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)  # by name; the hash identifies them


def find_weights(asked: str, backbone: str) -> Weights | None:
    """Finds and reads weights for a backbone; None: random ones.

    ``asked`` is ``none``, ``imagenet`` for the published ones, or the path of a safetensors file.
    """
    if asked == "none":
        return None
    if asked == "imagenet":
        check_backbone(backbone)
        if backbone.startswith(TIMM):
            return _published_by_timm(backbone)
        if REGISTRY[backbone].pretrained:
            return _published_by_torchvision(backbone)
        raise ConfigError(f"there are no published weights for {backbone}. {OTHERWISE}")
    return _read_file(asked, backbone)


def load_backbone(backbone: nn.Module, weights: Weights) -> tuple[str, ...]:
    """Loads weights into a backbone, all of them or none, converting floating-point tensors to its type.

    Names are the backbone's, or all begin with ``backbone.`` as in the weights of a run. Returns those that were not
    needed: classifiers, and everything outside ``backbone.``
    """
    expected, prefixes = backbone.state_dict(), ("", OWN_PREFIX)
    match = best_match(expected, weights.tensors, prefixes)
    if not match.complete:
        advice = "Give weights of this backbone at this width, or --weights none to start from random numbers."
        if other := matching_backbone(weights.tensors, prefixes):
            setting = f"network.backbone={other}" + (" and network.width=1" if REGISTRY[other].scalable else "")
            advice = f"They are those of {other}: set {setting}, or give other weights."
        raise RatpError(f"the weights {weights.name} do not fit the backbone. {match.explain()} {advice}")
    found = {name: weights.tensors[source] for name, source in match.names.items()}
    refuse_non_finite(weights.name, found)
    backbone.load_state_dict({name: tensor.to(expected[name].dtype) for name, tensor in found.items()}, strict=False)
    return match.ignored


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
            target = str(path.with_suffix(".safetensors"))
            command = shlex.join(["ratp", "import-weights", asked, target, "--backbone", backbone])
            raise ConfigError(f"{path.name} may be a pickle, which can run code when read. Import it once: {command}")
        problem = looks_like(path)
        if problem:
            raise RatpError(f"the weights file {asked} {problem}.")
        return _read_once(path, _state_of(path))
    except OSError as error:
        raise ConfigError(f"cannot read the weights file {asked!r}: {error.strerror or error}.") from error


def _state_of(path: Path) -> tuple[int, ...]:
    """Identifies the content of a file without reading it."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=2)
def _read_once(path: Path, state: tuple[int, ...]) -> Weights:
    """Reads a file once; all runs of a study share its weights until the file changes."""
    tensors, about = read_tensors(path)
    WEIGHTS.read(about, path)
    own = [name for name in tensors if name.startswith(OWN_PREFIX)]
    others = list(dict.fromkeys(name.partition(".")[0] for name in tensors if name not in own))
    if own and others:
        taken = f"{path} is the network of a run: its feature extractor is used ({len(own)} tensors)"
        warnings.warn(f"{taken}; the rest ({', '.join(others)}) is not", PartWarning, stacklevel=4)
    return Weights(path.name, sha256_of(path), tensors)


def _published_by_torchvision(backbone: str) -> Weights:
    import torchvision.models

    from ratp.data.catalogue.download import download

    published = torchvision.models.get_model_weights(backbone)["IMAGENET1K_V1"]
    name = published.url.rpartition("/")[2]
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not path.is_file():
        size = f"{published.meta['_file_size']:.0f} MB"
        warnings.warn(f"downloading {name} ({size}) to {path.parent}, once", DownloadWarning, stacklevel=4)
    download([published.url], path, None, manual=OTHERWISE)
    return _read_published_once(path, _state_of(path))


@lru_cache(maxsize=2)
def _read_published_once(path: Path, state: tuple[int, ...]) -> Weights:
    """Reads a file of torchvision once, in the same way."""
    digest = sha256_of(path)
    wanted = path.stem.rpartition("-")[2]  # torchvision's names end in the first digits of the hash
    if not digest.startswith(wanted):
        raise RatpError(f"{path} is damaged: expected a sha256 {wanted}…, found {digest}. Delete it and retry.")
    return Weights(path.name, digest, read_pickle(path))


@contextmanager
def _without_messages(*libraries: str) -> Iterator[None]:
    """Silences what libraries log: a failed download is one error, not a page of its repetitions."""
    loggers = [logging.getLogger(name) for name in libraries]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@lru_cache(maxsize=2)
def _published_by_timm(backbone: str) -> Weights:
    timm = timm_library()
    name = backbone.removeprefix(TIMM)
    architecture = name.partition(".")[0]
    if not timm.list_pretrained(f"{architecture}.*"):
        raise ConfigError(f"timm has no published weights for {name}. {OTHERWISE}")
    try:
        with torch.random.fork_rng(devices=[]), _without_messages("huggingface_hub", "timm", "httpx", "urllib3"):
            model = timm.create_model(name, num_classes=0, pretrained=True)
    except Exception as error:  # timm, its hub and the network each fail in their own way
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise RatpError(f"could not get timm's published weights for {name} ({reason}). {OTHERWISE}") from error
    tensors = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    tag = model.pretrained_cfg.get("tag")
    return Weights(f"{architecture}.{tag}" if tag else architecture, hash_of(tensors), tensors)
