"""Adopting a classifier that was trained elsewhere, with its head and its preprocessing, as a trained network.

The result is one safetensors file. A run that is given it does not train on the source: it starts with this network,
and the source's images only fill the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ratp._core.files import ADOPTED, hash_of, read_tensors, write_tensors
from ratp.config import override
from ratp.data.domain import check_images
from ratp.errors import ConfigError, RatpError, RunDirectoryError
from ratp.networks.backbones import TIMM, TORCHVISION, pretrained_input, split_head, whole_model
from ratp.networks.network import Network, NetworkConfig
from ratp.networks.torch_checkpoint import read_pickle, state_dicts
from ratp.networks.weight_matching import best_match, refuse_non_finite
from ratp.networks.weights import PICKLED

Channels = tuple[float, float, float]
# The largest difference from the original's logits, relative to the largest of them.
TOLERANCE = 1e-5
_CHECKED = 8  # images


@dataclass(frozen=True)
class Adopted:
    """A classifier trained elsewhere.

    Attributes:
        config: Its network.
        classes: Names of the classes, in the order of the logits.
        size: Side of its images.
        mean: Channel means taken off the images, which are in [0, 1].
        std: Channel deviations the images are divided by.
        tensors: State of the network.
        difference: Largest difference between its logits and the original's, relative to the largest logit.
    """

    config: NetworkConfig
    classes: tuple[str, ...]
    size: int
    mean: Channels
    std: Channels
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)
    difference: float = 0.0

    @property
    def sha256(self) -> str:
        """Identifies the weights."""
        return hash_of(self.tensors)

    @property
    def recipe_values(self) -> dict[str, Any]:
        """Returns the values that the recipe of a run needs, by dotted name."""
        fixed = "backbone", "width", "dim", "bottleneck", "bias", "weight_norm"
        network = {f"network.{name}": getattr(self.config, name) for name in fixed}
        return {**network, "size": self.size, "mean": self.mean, "std": self.std}

    def network(self) -> Network:
        """Builds the network."""
        with torch.random.fork_rng(devices=[]):
            network = Network(self.config, len(self.classes), (self.size, self.size))
        network.load_state_dict(dict(self.tensors))
        return network.eval()

    def save(self, path: Path | str) -> None:
        """Writes everything to one safetensors file."""
        about = {
            "network": dict(vars(self.config)),
            "classes": list(self.classes),
            "size": self.size,
            "mean": list(self.mean),
            "std": list(self.std),
            "difference": self.difference,
        }
        write_tensors(Path(path), self.tensors, ADOPTED.marked({"adopted": about}))

    @classmethod
    def load(cls, path: Path | str) -> Adopted:
        """Reads what :meth:`save` wrote."""
        tensors, written = read_tensors(Path(path))
        about = ADOPTED.read(written, path).get("adopted")
        if not isinstance(about, dict):
            raise RunDirectoryError(f"{path} is no adopted model: make one with ratp adopt CHECKPOINT.")
        try:
            config = override(NetworkConfig(), about["network"])
            mean, std = _channels("mean", about["mean"]), _channels("std", about["std"])
            found = cls(config, tuple(about["classes"]), int(about["size"]), mean, std, tensors, about["difference"])
            found.network()
        except (RatpError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RunDirectoryError(f"{path} is damaged: {error}") from error
        return found


def adopt(
    model: nn.Module | Path | str,
    classes: Sequence[str],
    *,
    backbone: str,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    images: Tensor | None = None,
) -> Adopted:
    """Takes over a trained classifier, and checks that it gives the same answers as before.

    Args:
        model: The classifier, with its head, or its checkpoint: a safetensors file or what ``torch.save`` wrote of a
            state dict. It stays as it is.
        classes: Names of the classes, in the order of the logits.
        backbone: What kind of model it is: ``timm:NAME`` or ``torchvision:NAME``.
        size: Side of its images; None: that of the published weights of its kind.
        mean: Channel means taken off images in [0, 1]; None likewise.
        std: Channel deviations that images are divided by; None likewise.
        images: uint8 images to compare the answers on; None: random ones.

    Returns:
        The model, whose ``save`` writes a file for ``model`` of :class:`ratp.RunRequest`.

    Raises:
        RatpError: If the model is of another kind, or answers differently here.

    Examples:
        >>> adopted = ratp.adopt("model.pth", ["ant", "bee"], backbone="timm:resnet18")
    """
    if not backbone.startswith((TIMM, TORCHVISION)):
        raise ConfigError(f"a model to adopt is of a kind timm:NAME or torchvision:NAME, got {backbone!r}.")
    names = _check_classes(classes)
    usual = pretrained_input(backbone)
    assert usual is not None
    side = size or usual[0]
    scaling = _channels("mean", mean or usual[1]), _channels("std", std or usual[2])
    original = model if isinstance(model, nn.Module) else _read(Path(model), backbone, len(names))
    expected, pictures = _answers(original, side, scaling, images)
    if expected.shape[1] != len(names):
        raise ConfigError(f"the model has {expected.shape[1]} classes, and {len(names)} names are given.")
    config = override(NetworkConfig(), {"backbone": backbone, "bottleneck": "none", "bias": True})
    with torch.random.fork_rng(devices=[]):
        network = Network(config, len(names), (side, side))
        rebuilt = whole_model(backbone, len(names))
    rebuilt.load_state_dict(original.state_dict())
    body, head = split_head(rebuilt, side)
    network.backbone.load_state_dict(body.state_dict())
    with torch.no_grad():
        network.classifier.weight.copy_(head.weight)
        if head.bias is not None and network.classifier.bias is not None:
            network.classifier.bias.copy_(head.bias)
    network.config = config = override(config, {"dim": head.in_features})
    with torch.no_grad():
        found = network.eval()(_scaled(pictures, scaling)).logits
    difference = ((found - expected).abs().max() / expected.abs().max().clamp_min(1)).item()
    if not difference <= TOLERANCE:
        raise RatpError(
            f"the adopted model differs from the original by {difference:.1e}, and {TOLERANCE:.0e} is allowed: it "
            "computes something that its kind does not."
        )
    tensors = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    return Adopted(config, names, side, *scaling, tensors, difference)


@torch.no_grad()
def _answers(
    model: nn.Module, side: int, scaling: tuple[Channels, Channels], images: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the original's logits of some images, and these."""
    if images is None:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (_CHECKED, 3, side, side), generator=generator, dtype=torch.uint8)
    images = images[:_CHECKED]
    check_images(images, (side, side))
    was = model.training
    try:
        logits = model.eval()(_scaled(images, scaling))
    except Exception as error:  # each model fails in its own way
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(f"the model cannot work on {side}×{side} images ({reason}). Give its size.") from error
    finally:
        model.train(was)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise ConfigError("the model must return its logits, of shape (images, classes).")
    if not logits.isfinite().all():
        raise RatpError("the model's logits are NaN or infinite.")
    return logits, images


def _scaled(images: Tensor, scaling: tuple[Channels, Channels]) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in scaling)
    return (images.float() / 255 - mean) / std


def _read(path: Path, backbone: str, classes: int) -> nn.Module:
    """Builds the whole model of a checkpoint."""
    data = read_pickle(path) if path.suffix.lower() in PICKLED else read_tensors(path)[0]
    with torch.random.fork_rng(devices=[]):
        model = whole_model(backbone, classes)
    expected = model.state_dict()
    matches = [
        (best_match(expected, tensors, ("", "module.", "model.", "_orig_mod.")), tensors)
        for tensors in state_dicts(data)
    ]
    if not matches:
        raise RatpError(f"{path} holds no tensors under names: expected the state dict of {backbone}.")
    match, tensors = max(matches, key=lambda item: item[0].score)
    if not match.complete:
        raise RatpError(
            f"{path} is not a {backbone} with {classes} classes. {match.explain()} "
            "Give the kind of model and the class names it was trained with."
        )
    found = {name: tensors[source] for name, source in match.names.items()}
    refuse_non_finite(path.name, found)
    model.load_state_dict({**expected, **found})
    return model


def _check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    names = tuple(classes)
    if isinstance(classes, str) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError("classes must be a list of names, in the order of the logits.")
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError("classes must be two or more names, each different.")
    return names


def _channels(name: str, values: Sequence[float]) -> Channels:
    found = tuple(map(float, values))
    if len(found) != 3 or (name == "std" and min(found) <= 0):
        raise ConfigError(f"{name} must be three numbers, one per channel{', above 0' if name == 'std' else ''}.")
    return found
