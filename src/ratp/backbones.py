"""Feature extractors by name: the digits' DTN, torchvision's ResNets and every model of timm.

A backbone turns normalised images, shape (n, 3, height, width), into features, shape (n, dimension). The names
of its tensors are those of its library, without the library's classifier.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp import kernels
from ratp.errors import ConfigError, unknown
from ratp.parts.batch_norm import BatchNorm2d

# Features of torchvision's ResNets.
RESNETS = {"resnet18": 512, "resnet50": 2048, "resnet101": 2048}
NAMES = ("dtn", *RESNETS)
TIMM = "timm:"
# DTN flattens what it sees: below, little more than padding reaches its last block; above, its features outnumber
# anything a bottleneck can take.
DTN_SIZES = range(8, 257)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Channels = tuple[float, float, float]


class ChannelDropout(nn.Module):
    """Drops whole channels while training, drawing from a generator of its own."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes channels and scales the rest up."""
        keep = self.draw(x)
        return x if keep is None else x * keep[:, :, None, None].to(x.dtype)

    def draw(self, x: Tensor) -> Tensor | None:
        """The factor on every channel of every image, shape (n, c); None where nothing is dropped."""
        if not self.training:
            return None
        keep = torch.rand(x.shape[:2], generator=self.generator, device=x.device) >= self.probability
        return keep / (1 - self.probability)

    def __deepcopy__(self, memo: dict[int, Any]) -> ChannelDropout:
        """A copy without the generator: two modules drawing from one would shift each other's numbers."""
        return ChannelDropout(self.probability).train(self.training)


class DTN(nn.Sequential):
    """DTN's layers one after another, but BatchNorm, dropout and ReLU in one go; on GPUs a bias too."""

    def forward(self, x: Tensor) -> Tensor:
        """Features of normalised images."""
        layers, bias = list(self), None
        for index, layer in enumerate(layers):
            if isinstance(layer, nn.Conv2d) and kernels.usable(x.device):
                x, bias = F.conv2d(x, layer.weight, None, layer.stride, layer.padding), layer.bias
            elif isinstance(layer, BatchNorm2d):
                dropout, last = layers[index + 1 : index + 3]
                assert isinstance(dropout, ChannelDropout)
                x = layer(x, offset=bias, keep=dropout.draw(x), relu=_is_plain_relu(last))
            elif not (isinstance(layer, ChannelDropout) or _is_plain_relu(layer)):
                x = layer(x)
        return x


def _is_plain_relu(layer: nn.Module) -> bool:
    """Whether a layer is ReLU and nothing else: nobody put a module behind it or listens to it."""
    return type(layer) is nn.ReLU and not layer._forward_hooks


def check_backbone(name: str, width: float = 1.0, image_size: tuple[int, int] | None = None) -> None:
    """Finds what can be found wrong without building anything.

    Args:
        name: As for :func:`make_backbone`.
        width: As for :func:`make_backbone`.
        image_size: Height and width of the images, if they are known.

    Raises:
        ConfigError: With one sentence for every mistake.
    """
    problems: list[str] = []
    if name.startswith(TIMM):
        try:
            _check_timm_name(name.removeprefix(TIMM))
        except ConfigError as error:
            problems.extend(error.problems)
    elif name not in NAMES:
        problems.append(f"{unknown('backbone', name, NAMES)} Or any model of timm, as timm:NAME.")
    if width != 1 and name != "dtn" and not problems:
        problems.append(f"network.width belongs to dtn; {name} has one width: set it to 1, not {width}.")
    if name == "dtn" and image_size is not None and not all(side in DTN_SIZES for side in image_size):
        smallest, largest = DTN_SIZES[0], DTN_SIZES[-1]
        problems.append(
            f"dtn works on images from {smallest}×{smallest} to {largest}×{largest}, best on 32×32; these are "
            f"{_by(image_size)}. Set another size, or network.backbone to resnet18."
        )
    if problems:
        raise ConfigError(problems)


def make_backbone(name: str, image_size: tuple[int, int] = (32, 32), width: float = 1.0) -> tuple[nn.Module, int]:
    """Builds a feature extractor with random weights, drawn from torch's generator.

    Args:
        name: ``dtn``, ``resnet18``, ``resnet50``, ``resnet101``, or ``timm:NAME``.
        image_size: Height and width of the images it will see.
        width: Factor on the channels of ``dtn``; 1 for all others.

    Returns:
        The module, and the dimension of its features.

    Raises:
        ConfigError: If there is none of this name, or it cannot work on images of this size.
    """
    check_backbone(name, width, image_size)
    if name == "dtn":
        return dtn(width, image_size)
    model = _library_model(name)
    return model, RESNETS[name] if name in RESNETS else _measure(model, name, image_size)


def pretrained_input(name: str) -> tuple[int, Channels, Channels]:
    """The side of the images, and the mean and deviation of their channels, that published weights were trained with.

    Raises:
        ConfigError: If there is none of this name.
    """
    check_backbone(name)
    if not name.startswith(TIMM):
        return 224, IMAGENET_MEAN, IMAGENET_STD
    published = timm_library().get_pretrained_cfg(name.removeprefix(TIMM))
    if published is None:
        return 224, IMAGENET_MEAN, IMAGENET_STD
    return published.input_size[-1], tuple(published.mean), tuple(published.std)


def expected_tensors(name: str) -> dict[str, Tensor]:
    """What weights of a backbone have to look like: its tensors, at width 1, of which only names and shapes count.

    Raises:
        ConfigError: If there is none of this name.
    """
    check_backbone(name)
    with torch.random.fork_rng(devices=[]):
        if name.startswith(TIMM):
            return dict(_library_model(name).state_dict())
        with torch.device("meta"):  # names and shapes, without the numbers
            return dict((dtn(1.0)[0] if name == "dtn" else _library_model(name)).state_dict())


def dtn(width: float, image_size: tuple[int, int] = (32, 32)) -> tuple[DTN, int]:
    """DTN, the LeNet variant for 32×32 digits, and the dimension of its features.

    Three blocks of strided 5×5 convolution, BatchNorm, channel dropout and ReLU, with 64, 128 and 256
    channels at width 1. Every block halves height and width, rounding up.
    """
    layers: list[nn.Module] = []
    before = 3
    height, width_left = image_size
    for channels, dropout in ((64, 0.1), (128, 0.3), (256, 0.5)):
        after = max(1, round(channels * width))
        layers += [
            nn.Conv2d(before, after, kernel_size=5, stride=2, padding=2),
            BatchNorm2d(after),
            ChannelDropout(dropout),
            nn.ReLU(),
        ]
        before = after
        height, width_left = -(-height // 2), -(-width_left // 2)
    return DTN(*layers, nn.Flatten()), before * height * width_left


def _library_model(name: str) -> nn.Module:
    model: nn.Module
    if name.startswith(TIMM):
        model = timm_library().create_model(name.removeprefix(TIMM), num_classes=0, pretrained=False)
        return model
    from ratp.resnet import resnet  # torchvision takes seconds

    return resnet(name)


def timm_library() -> ModuleType:
    """The library timm, imported when it is needed.

    Raises:
        ConfigError: If it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise ConfigError('backbones timm:NAME need timm, which is not here: pip install "ratp[timm]".') from error


def _check_timm_name(name: str) -> None:
    timm = timm_library()
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise ConfigError(unknown("model of timm", name, timm.list_models()))
    tags = [model.partition(".")[2] for model in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise ConfigError(unknown(f"pretraining of timm's {architecture}", tag, tags))


def _measure(model: nn.Module, name: str, image_size: tuple[int, int]) -> int:
    """The dimension of a model's features: what timm declares is not what every model gives."""
    was = model.training
    try:
        with torch.no_grad():
            features = model.eval()(torch.zeros(1, 3, *image_size))
    except Exception as error:  # each model complains in its own way
        made_for = getattr(model, "pretrained_cfg", {}).get("input_size", ())[1:]
        advice = f" It is made for {_by(made_for)}: set that size, or take another backbone." if made_for else ""
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(f"{name} cannot work on {_by(image_size)} images ({reason}).{advice}") from error
    finally:
        model.train(was)
    if not isinstance(features, Tensor) or features.ndim != 2:
        found = _by(features.shape[1:]) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(f"{name} gives no feature vectors but {found}: take another backbone.")
    return features.shape[1]


def _by(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))
