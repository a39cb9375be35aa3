"""Adopting a classifier that was trained elsewhere, with its head and its preprocessing, as a trained network.

The result is one safetensors file. A run that is given it does not train on the source: it starts with this network,
and the source's images only fill the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ratp._core.files import ADOPTED, hash_of, read_tensors, write_tensors
from ratp._core.user_code import split_file
from ratp.config import override
from ratp.data.domain import check_images
from ratp.errors import ConfigError, RatpError, RunDirectoryError
from ratp.networks.backbones import TIMM, TORCHVISION, PretrainedInput, pretrained_input, split_head, whole_model
from ratp.networks.network import Network, NetworkConfig
from ratp.networks.own import Given, build_own, find_own, plain_name, register_own
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
    def load(cls, path: Path | str, *, backbone: Given | None = None) -> Adopted:
        """Reads what :meth:`save` wrote.

        Args:
            path: The file.
            backbone: The class of a model of your own, as for :func:`adopt`.
        """
        tensors, written = read_tensors(Path(path))
        about = ADOPTED.read(written, path).get("adopted")
        if not isinstance(about, dict):
            raise RunDirectoryError(f"{path} is no adopted model: make one with ratp adopt CHECKPOINT.")
        try:
            kind = str(about["network"]["backbone"])
        except (KeyError, TypeError) as error:
            raise RunDirectoryError(f"{path} is damaged: {error!r}") from error
        find_own(path, kind, backbone)
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
    backbone: Given | None = None,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    head: str | None = None,
    images: Tensor | None = None,
) -> Adopted:
    """Takes over a trained classifier, and checks that it gives the same answers as before.

    Args:
        model: The classifier, with its head, or its checkpoint: a safetensors file or what ``torch.save`` wrote of a
            state dict. It stays as it is.
        classes: Names of the classes, in the order of the logits.
        backbone: What kind of model it is: ``timm:NAME``, ``torchvision:NAME``, or your own class, or a function that
            builds one, or ``FILE.py:NAME`` of either, which is run. None: the class of ``model``.
        size: Side of its images; None: that of the published weights of its kind. Your own class needs one.
        mean: Channel means taken off images in [0, 1]; None likewise.
        std: Channel deviations that images are divided by; None likewise.
        head: Name of its last layer; None: the linear layer whose output is the logits.
        images: uint8 images to compare the answers on; None: random ones.

    Returns:
        The model, whose ``save`` writes a file for ``model`` of :class:`ratp.RunRequest`.

    Raises:
        RatpError: If the model is of another kind, or answers differently here.

    Examples:
        >>> adopted = ratp.adopt("model.pth", ["ant", "bee"], backbone="timm:resnet18")
        >>> half = (0.5, 0.5, 0.5)
        >>> ratp.adopt(net, ["ant", "bee"], size=64, mean=half, std=half).save("model.safetensors")
    """
    names = _check_classes(classes)
    kind = _check_kind(model if backbone is None else backbone)
    is_own = _is_own(kind)
    side, scaling = _preprocessing(None if is_own else pretrained_input(str(kind)), size, mean, std)
    original = deepcopy(model).cpu() if isinstance(model, nn.Module) else _read(Path(model), kind, len(names))
    expected, pictures = _answers(original, side, scaling, images)
    if expected.shape[1] != len(names):
        raise ConfigError(f"the model has {expected.shape[1]} classes, and {len(names)} names are given.")
    rebuilt = deepcopy(original) if is_own else _whole(kind, len(names))
    rebuilt.load_state_dict(original.state_dict())
    body, layer, head = split_head(rebuilt, side, head)
    _check_body(body, layer, head, _scaled(pictures, scaling))
    name = register_own(kind, head=head).name if is_own else str(kind)
    config = override(NetworkConfig(), {"backbone": name, "bottleneck": "none", "bias": True})
    with torch.random.fork_rng(devices=[]):
        network = Network(config, len(names), (side, side))
    _load_into(network.backbone, body, name)
    with torch.no_grad():
        network.classifier.weight.copy_(layer.weight)
        if layer.bias is not None and network.classifier.bias is not None:
            network.classifier.bias.copy_(layer.bias)
    network.config = config = override(config, {"dim": layer.in_features})
    with torch.no_grad():
        found = network.eval()(_scaled(pictures, scaling)).logits
    difference = ((found - expected).abs().max() / expected.abs().max().clamp_min(1)).item()
    if not difference <= TOLERANCE:
        raise RatpError(
            f"the adopted model differs from the original by {difference:.1e}, and {TOLERANCE:.0e} is allowed: its "
            f"answers are not the output of the layer {head!r}, or it computes something that its kind does not."
        )
    tensors = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    return Adopted(config, names, side, *scaling, tensors, difference)


def _check_kind(kind: Given | Path) -> Given:
    """Returns the kind of model: a name of timm or torchvision, or what builds one of the user's own."""
    if isinstance(kind, Path) or (
        isinstance(kind, str) and not (kind.startswith((TIMM, TORCHVISION)) or split_file(kind))
    ):
        raise ConfigError(
            f"a model to adopt is of a kind timm:NAME, torchvision:NAME, or FILE.py:NAME for your own class; got "
            f"{str(kind)!r}."
        )
    return kind


def _preprocessing(
    usual: PretrainedInput | None, size: int | None, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[int, tuple[Channels, Channels]]:
    """Returns side, and means and deviations: the given ones, else the usual ones of the kind of model."""
    given = {"size": size, "mean": mean, "std": std}
    missing = [name for name, value in given.items() if value is None]
    if usual is None and missing:
        raise ConfigError(
            f"ratp cannot know how your own model's images are prepared: give {', '.join(missing)} as it was trained "
            "with; of images in [0, 1], mean (0, 0, 0) and std (1, 1, 1) change nothing."
        )
    side, usual_mean, usual_std = usual or (0, (), ())
    if size is not None and size < 1:
        raise ConfigError(f"size must be 1 or more, got {size}.")
    return size or side, (_channels("mean", mean or usual_mean), _channels("std", std or usual_std))


def _is_own(kind: Given) -> bool:
    return not isinstance(kind, str) or split_file(kind) is not None


def _whole(kind: Given, classes: int) -> nn.Module:
    """Builds the whole model; one of the user's own knows its classes itself."""
    if _is_own(kind):
        return deepcopy(build_own(kind))
    assert isinstance(kind, str)
    with torch.random.fork_rng(devices=[]):
        return whole_model(kind, classes)


@torch.no_grad()
def _check_body(body: nn.Module, head: nn.Linear, name: str, inputs: Tensor) -> None:
    """Raises ConfigError unless the model without its head gives what enters the head."""
    try:
        features = body.eval()(inputs)
    except Exception:  # each model fails in its own way
        features = None
    if not isinstance(features, Tensor) or features.shape != (len(inputs), head.in_features):
        raise ConfigError(
            f"the layer {name!r} is not the head: the model computes more than a reshaping with its output, or needs "
            "its shape. Name the last linear layer, whose output is the logits."
        )


def _load_into(backbone: nn.Module, body: nn.Module, name: str) -> None:
    try:
        backbone.load_state_dict(body.state_dict())
    except RuntimeError as error:
        raise ConfigError(
            f"the model has other layers than {plain_name(name)}: {str(error).splitlines()[-1].strip()}"
        ) from error


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
    try:
        logits = model.eval()(_scaled(images, scaling))
    except Exception as error:  # each model fails in its own way
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(f"the model cannot work on {side}×{side} images ({reason}). Give its size.") from error
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise ConfigError("the model must return its logits, of shape (images, classes).")
    if not logits.isfinite().all():
        raise RatpError("the model's logits are NaN or infinite.")
    return logits, images


def _scaled(images: Tensor, scaling: tuple[Channels, Channels]) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in scaling)
    return (images.float() / 255 - mean) / std


def _read(path: Path, kind: Given, classes: int) -> nn.Module:
    """Builds the whole model of a checkpoint."""
    model = _whole(kind, classes)
    data = read_pickle(path) if path.suffix.lower() in PICKLED else read_tensors(path)[0]
    expected = model.state_dict()
    matches = [
        (best_match(expected, tensors, ("", "module.", "model.", "_orig_mod.")), tensors)
        for tensors in state_dicts(data)
    ]
    said = kind if isinstance(kind, str) else getattr(kind, "__qualname__", type(kind).__name__)
    said += "" if _is_own(kind) else f" with {classes} classes"
    if not matches:
        raise RatpError(f"{path} holds no tensors under names: expected the state dict of {said}.")
    match, tensors = max(matches, key=lambda item: item[0].score)
    if not match.complete:
        raise RatpError(
            f"{path} is not a {said}. {match.explain()} Give the kind of model and the class names it was trained with."
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
