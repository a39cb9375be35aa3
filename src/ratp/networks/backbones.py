"""Feature extractors by name: the digits' DTN, torchvision's ResNets, every model of timm, and a user's own.

A backbone turns normalised images, shape (n, 3, height, width), into features, shape (n, dimension). Its tensors have
the names of their library, without the library's classifier. Adding a backbone is one entry of ``REGISTRY``; user code
adds one with :func:`register_backbone`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.errors import ConfigError, unknown
from ratp.functional import kernels
from ratp.functional.norm import BatchNorm2d
from ratp.networks.resnet import resnet

TIMM, TORCHVISION = "timm:", "torchvision:"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
Channels = tuple[float, float, float]
PretrainedInput = tuple[int, Channels, Channels]


class ChannelDropout(nn.Module):
    """Drops whole channels while training, with its own random generator."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes channels and scales up the rest."""
        keep = self.draw(x)
        return x if keep is None else x * keep[:, :, None, None].to(x.dtype)

    def draw(self, x: Tensor) -> Tensor | None:
        """Draws the factor on every channel of every image, shape (n, c); None in evaluation mode."""
        if not self.training:
            return None
        numbers = torch.rand(x.shape[:2], generator=self.generator, device=x.device)
        return numbers.ge_(self.probability).div_(max(1 - self.probability, 1e-9))

    def __deepcopy__(self, memo: dict[int, Any]) -> ChannelDropout:
        """Copies all but the generator: two modules sharing one would shift each other's numbers."""
        return type(self)(self.probability).train(self.training)


class ElementDropout(ChannelDropout):
    """Drops single values while training, with its own random generator, like ``nn.Dropout``."""

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes values and scales up the rest."""
        keep = self.draw(x.flatten(1))
        return x if keep is None else x * keep.reshape(x.shape).to(x.dtype)


class DTN(nn.Sequential):
    """DTN's layers in sequence, with BatchNorm, dropout and ReLU fused; on GPUs the bias too."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes the features of normalised images."""
        layers, bias = list(self), None
        for index, layer in enumerate(layers):
            if isinstance(layer, nn.Conv2d) and x.is_cuda and kernels.usable(x.device):
                x, bias = F.conv2d(x, layer.weight, None, layer.stride, layer.padding), layer.bias
            elif index + 2 < len(layers) and isinstance(dropout := layers[index + 1], ChannelDropout):
                x = layer(x, offset=bias, keep=dropout.draw(x), relu=_is_plain_relu(layers[index + 2]))
            elif not (isinstance(layer, ChannelDropout) or _is_plain_relu(layer)):
                x = layer(x)
        return x


def _is_plain_relu(layer: nn.Module) -> bool:
    """Whether a layer is ReLU and nothing else: neither a subclass nor hooked."""
    return type(layer) is nn.ReLU and not layer._forward_hooks


def dtn(width: float = 1.0) -> DTN:
    """Builds DTN, the LeNet variant for 32×32 digits.

    Three blocks of strided 5×5 convolution, BatchNorm, channel dropout and ReLU, with 64, 128 and 256
    channels at width 1. Every block halves height and width, rounding up.
    """
    layers: list[nn.Module] = []
    before = 3
    for channels, dropout in ((64, 0.1), (128, 0.3), (256, 0.5)):
        after = max(1, round(channels * width))
        convolution = nn.Conv2d(before, after, kernel_size=5, stride=2, padding=2)
        layers += [convolution, BatchNorm2d(after), ChannelDropout(dropout), nn.ReLU()]
        before = after
    return DTN(*layers, nn.Flatten())


@dataclass(frozen=True)
class Backbone:
    """One entry of the registry."""

    # builds the module with random weights from torch's generator; takes ``width`` if ``scalable``
    build: Callable[..., nn.Module]
    features: int | None = None  # dimension of the features; None: measured by a forward pass
    # image side, channel means and deviations of its usual input; None: those of the stream
    usual: PretrainedInput | None = None
    pretrained: bool = False  # whether torchvision publishes weights under this name
    scalable: bool = False  # whether ``network.width`` applies
    sides: range | None = None  # image sides it accepts; None: any


_IMAGENET: PretrainedInput = 224, IMAGENET_MEAN, IMAGENET_STD
_DIGITS: PretrainedInput = 32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
REGISTRY: dict[str, Backbone] = {
    # Below these sides, little more than padding reaches DTN's last block; above, its features are too many.
    "dtn": Backbone(dtn, usual=_DIGITS, scalable=True, sides=range(8, 257)),
    "resnet18": Backbone(partial(resnet, "resnet18"), 512, _IMAGENET, pretrained=True),
    "resnet50": Backbone(partial(resnet, "resnet50"), 2048, _IMAGENET, pretrained=True),
    "resnet101": Backbone(partial(resnet, "resnet101"), 2048, _IMAGENET, pretrained=True),
}
NAMES = tuple(REGISTRY)


def register_backbone(
    name: str, build: Callable[[], nn.Module], *, features: int | None = None, usual: PretrainedInput | None = None
) -> None:
    """Makes your own module available as ``network.backbone=NAME`` in this process.

    Registering a name again replaces the earlier entry. A method file may register what it needs when it is imported.

    Args:
        name: The name; none of the built-in ones.
        build: A module class or function that returns a new module, with random weights from torch's generator, that
            maps normalised images (n, 3, height, width) to features (n, dimension).
        features: Their dimension; None: measured by a forward pass.
        usual: Usual image side, channel means and deviations; None: those of the stream.

    Examples:
        >>> ratp.register_backbone("tiny", lambda: nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.Flatten()))
    """
    if name in NAMES or name.startswith(TIMM) or not name or name != name.strip():
        raise ConfigError(f"a backbone cannot be registered as {name!r}: choose a name other than {', '.join(NAMES)}.")
    REGISTRY[name] = Backbone(build, features, usual)


def check_backbone(name: str, width: float = 1.0, image_size: tuple[int, int] | None = None) -> None:
    """Checks a backbone's settings without building it."""
    if name.startswith(TIMM):
        _check_timm_name(name.removeprefix(TIMM))
    elif name.startswith(TORCHVISION):
        _check_torchvision_name(name.removeprefix(TORCHVISION))
    elif name not in REGISTRY:
        raise ConfigError(
            f"{unknown('backbone', name, REGISTRY)} Or timm:NAME or torchvision:NAME for any of their classifiers; "
            "one of your own is FILE.py:NAME, or must be registered in this process first: "
            "ratp.register_backbone(NAME, BUILD)."
        )
    entry = REGISTRY.get(name)
    problems = []
    if width != 1 and not (entry and entry.scalable):
        problems.append(f"network.width belongs to dtn; {name} has one width: set it to 1, not {width}.")
    if entry and entry.sides and image_size and not all(side in entry.sides for side in image_size):
        smallest, largest = entry.sides[0], entry.sides[-1]
        problems.append(
            f"{name} works on images from {smallest}×{smallest} to {largest}×{largest}, best on 32×32; these are "
            f"{_by(image_size)}. Set another size, or network.backbone to resnet18."
        )
    if problems:
        raise ConfigError(problems)


def make_backbone(name: str, image_size: tuple[int, int] = (32, 32), width: float = 1.0) -> tuple[nn.Module, int]:
    """Builds a feature extractor with random weights from torch's generator."""
    check_backbone(name, width, image_size)
    model = _build(name, width)
    return model, (name in REGISTRY and REGISTRY[name].features) or _measure(model, name, image_size)


def pretrained_input(name: str) -> PretrainedInput | None:
    """Returns the usual input of a backbone: side, channel means and deviations; None: whatever the stream has."""
    check_backbone(name)
    if name.startswith(TORCHVISION):
        return _IMAGENET
    if not name.startswith(TIMM):
        return REGISTRY[name].usual
    published = timm_library().get_pretrained_cfg(name.removeprefix(TIMM))
    return (published.input_size[-1], tuple(published.mean), tuple(published.std)) if published else _IMAGENET


def is_pretrained(name: str) -> bool:
    """Whether a backbone usually starts from published weights, as all but dtn and a user's own do."""
    return name not in REGISTRY or REGISTRY[name].pretrained


def expected_tensors(name: str) -> dict[str, Tensor]:
    """Returns the tensors of a backbone at width 1, of which only names and shapes are meaningful."""
    check_backbone(name)
    # Built-in backbones need no values and use the meta device. Others may compute with their values.
    device = torch.device("meta" if name in NAMES else "cpu")
    with torch.random.fork_rng(devices=[]), device:
        return dict(_build(name).state_dict())


def _build(name: str, width: float = 1.0) -> nn.Module:
    model: nn.Module
    if name.startswith(TIMM):
        model = timm_library().create_model(name.removeprefix(TIMM), num_classes=0, pretrained=False)
        return model
    if name.startswith(TORCHVISION):
        return split_head(whole_model(name, 2), pretrained_side(name))[0]
    entry = REGISTRY[name]
    return entry.build(width=width) if entry.scalable else entry.build()


def pretrained_side(name: str) -> int:
    """Returns the usual image side of a backbone; 32 if it has none."""
    usual = pretrained_input(name)
    return usual[0] if usual else 32


def whole_model(name: str, classes: int) -> nn.Module:
    """Builds a classifier of timm or torchvision, head included, with random weights from torch's generator."""
    check_backbone(name)
    model: nn.Module
    if name.startswith(TIMM):
        model = timm_library().create_model(name.removeprefix(TIMM), num_classes=classes, pretrained=False)
    else:
        from torchvision import models  # takes seconds

        model = models.get_model(name.removeprefix(TORCHVISION), weights=None, num_classes=classes)
    return model


def split_head(model: nn.Module, side: int, head: str | None = None) -> tuple[nn.Module, nn.Linear, str]:
    """Takes a classifier apart, in place: the model without its last layer, that layer, and its name.

    Args:
        model: Maps normalised images to logits.
        side: Side of its images.
        head: Name of the last layer; None: the linear layer whose output is the model's output.
    """
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name}
    found = _find_head(model, linear, side) if head is None else head
    if found is None or linear.get(found) is None or linear[found].weight.ndim != 2:
        known = f"Its linear layers: {', '.join(linear)}." if linear else "It has no linear layer."
        raise ConfigError(
            "the model's head cannot be found: no linear layer gives its output. A model to adopt must end in a linear "
            f"layer and return its logits, without a softmax; name this layer as head if it does. {known}"
            if head is None
            else f"the model has no linear layer {head!r}, so that cannot be its head. {known}"
        )
    model.set_submodule(found, nn.Identity())
    return model, linear[found], found


def _find_head(model: nn.Module, linear: Mapping[str, nn.Linear], side: int) -> str | None:
    """Returns the name of the last linear layer whose output is the model's output."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: outputs.__setitem__(name, output)

    handles = [module.register_forward_hook(keep(name)) for name, module in linear.items()]
    was = model.training
    images = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            logits = model.eval()(images)
    except Exception as error:  # each model fails in its own way
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(f"the model cannot work on {side}×{side} images ({reason}). Give its size.") from error
    finally:
        model.train(was)
        for handle in handles:
            handle.remove()
    heads = [name for name, output in outputs.items() if isinstance(logits, Tensor) and torch.equal(output, logits)]
    return heads[-1] if heads else None


def _check_torchvision_name(name: str) -> None:
    from torchvision import models  # takes seconds

    names = models.list_models(module=models)
    if name not in names:
        raise ConfigError(unknown("classifier of torchvision", name, names))


def timm_library() -> ModuleType:
    """Imports timm."""
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise ConfigError('backbones timm:NAME need timm, which is not here: pip install "ratp-cdsl[timm]".') from error


def _check_timm_name(name: str) -> None:
    timm = timm_library()
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise ConfigError(unknown("model of timm", name, timm.list_models()))
    tags = [model.partition(".")[2] for model in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise ConfigError(unknown(f"pretraining of timm's {architecture}", tag, tags))


def _measure(model: nn.Module, name: str, image_size: tuple[int, int]) -> int:
    """Measures the dimension of a model's features, which timm does not always declare correctly."""
    was = model.training
    try:
        with torch.no_grad():
            features = model.eval()(torch.zeros(1, 3, *image_size))
    except Exception as error:  # each model fails in its own way
        made_for = getattr(model, "pretrained_cfg", {}).get("input_size", ())[1:]
        advice = f" It is made for {_by(made_for)}: set that size, or take another backbone." if made_for else ""
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(f"{name} cannot work on {_by(image_size)} images ({reason}).{advice}") from error
    finally:
        model.train(was)
    if not isinstance(features, Tensor) or features.ndim != 2:
        found = _by(features.shape[1:]) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(
            f"{name} gives no feature vectors but {found}: end it with nn.Flatten(), or take another backbone."
        )
    return features.shape[1]


def _by(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))
