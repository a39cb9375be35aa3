"""The network: feature extractor → bottleneck → linear classifier, whose rows are the prototypes."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp._core.environment import Precision
from ratp.config import switch
from ratp.errors import ConfigError
from ratp.functional import kernels
from ratp.functional.losses import scores
from ratp.functional.norm import BatchNorm1d
from ratp.networks.backbones import ChannelDropout, check_backbone, make_backbone
from ratp.networks.resnet import ResNet

_DROPOUT = 0.5  # of an embedding, in a bottleneck of one layer behind dtn


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of a network."""

    backbone: str = switch(
        "dtn",
        "feature extractor: dtn, resnet18, resnet50, resnet101, timm:NAME, torchvision:NAME or FILE.py:NAME",
    )
    width: float = switch(1.0, "factor on the channels of dtn", above=0, below=100)
    hidden: int = switch(256, "units of the bottleneck's hidden layer", minimum=1)
    dim: int = switch(128, "dimension of the embedding, and so of the prototypes", minimum=1)
    bottleneck: Literal["two", "one", "none"] = switch(
        "two",
        "linear layers of the bottleneck: two; one, then BatchNorm and with dtn dropout, as SHOT was published; or "
        "none: the classifier acts on the features, as in most networks trained elsewhere",
        hash_default=False,
    )
    bias: bool = switch(False, "the classifier has a bias", hash_default=False)
    weight_norm: bool = switch(
        False, "length and direction of a prototype are trained apart (weight norm)", hash_default=False
    )
    frozen: int = switch(
        0,
        "modules at the start of the backbone that keep their weights and BatchNorm statistics; of a ResNet 1 to 6: "
        "conv1, bn1, layer1, …",
        minimum=0,
        hash_default=False,
    )


def check_network(config: NetworkConfig, image_size: tuple[int, int] | None = None) -> None:
    """Checks a configuration before anything is built; raises a ConfigError with one sentence for every mistake."""
    check_backbone(config.backbone, config.width, image_size)


class Output(NamedTuple):
    """Result of a forward pass: embeddings z, shape (n, dim), and logits z Wᵀ + b, shape (n, classes)."""

    embedding: Tensor
    logits: Tensor


class _WideLinear(nn.Linear):
    """A linear layer that runs as a convolution on GPUs, and so in TF32 if convolutions do.

    PyTorch has one switch for convolutions and one for matrix products, and losses and labels need exact products.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Computes x·Wᵀ + b."""
        if not x.is_cuda:
            return super().forward(x)
        return F.conv2d(x[:, :, None, None], self.weight[:, :, None, None], self.bias).flatten(1)


class _Bottleneck(nn.Sequential):
    """Linear, BatchNorm, ReLU, Linear, with the middle two fused."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes the embedding."""
        first, norm, _, last = self
        return cast(Tensor, last(norm(first(x), relu=True)))


class _OneLayer(nn.Sequential):
    """Linear, BatchNorm, dropout, and whatever a method appends."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes the embedding."""
        linear, norm, dropout, *others = self
        embedding: Tensor = norm(linear(x))
        keep = cast(ChannelDropout, dropout).draw(embedding)
        embedding = embedding if keep is None else embedding * keep
        for layer in others:
            embedding = layer(embedding)
        return embedding


class WeightNormLinear(nn.Module):
    """A linear layer whose rows have lengths g and directions v of their own: w = g·v/‖v‖."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        """Draws v from U(±1/√inputs), as SHOT's code does in effect, and begins with w = v."""
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.direction = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.length = nn.Parameter(self.direction.detach().norm(dim=1))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    @property
    def weight(self) -> Tensor:
        """Returns w."""
        return self.length[:, None] * F.normalize(self.direction, dim=1)


class Network(nn.Module):
    """A classifier in three parts.

    Attributes:
        backbone: F, images to features.
        bottleneck: B, Linear · BatchNorm · ReLU · Linear, Linear · BatchNorm · dropout, or nothing.
        classifier: W, linear, by default without bias; it is applied by :meth:`classify`.
    """

    def __init__(self, config: NetworkConfig, classes: int, image_size: tuple[int, int] = (32, 32)) -> None:
        """Builds a network with random weights from torch's generator."""
        super().__init__()
        self.config = config
        self.classes = classes
        self.image_size = image_size
        self.channels_last = False
        self.precision: Precision = "fp32"
        self.backbone, features = make_backbone(config.backbone, image_size, config.width)
        self.bottleneck = _BOTTLENECKS[config.bottleneck](features, config)
        dim = features if config.bottleneck == "none" else config.dim
        self.classifier: nn.Linear | WeightNormLinear
        if config.weight_norm:
            self.classifier = WeightNormLinear(dim, classes, bias=config.bias)
        else:
            self.classifier = nn.Linear(dim, classes, bias=config.bias)
        self._initialise()
        self._frozen = _first_modules(self.backbone, config)
        for module in self._frozen:
            module.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Network:
        """Switches to training or evaluation mode; the frozen modules stay in evaluation mode."""
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    def _initialise(self) -> None:
        linear = [layer for layer in self.bottleneck if isinstance(layer, nn.Linear)]
        classifier = self.classifier if isinstance(self.classifier, nn.Linear) else None
        if classifier is not None and classifier.bias is not None:
            nn.init.zeros_(classifier.bias)
        for layer in linear:
            nn.init.zeros_(layer.bias)
        if self.config.bottleneck == "one":
            for layer in linear + ([] if classifier is None else [classifier]):
                nn.init.xavier_normal_(layer.weight)
            return
        for layer in linear:
            nn.init.normal_(layer.weight, std=0.01)
        if classifier is not None:
            # kaiming_uniform with a=√5 on the fan-out, which is the number of classes: U(±1/√K)
            bound = 1 / math.sqrt(self.classes)
            nn.init.uniform_(classifier.weight, -bound, bound)

    @property
    def prototypes(self) -> Tensor:
        """The classifier's rows, shape (classes, dim); :meth:`set_prototypes` changes them."""
        return self.classifier.weight

    @torch.no_grad()
    def set_prototypes(self, rows: Tensor) -> None:
        """Replaces the classifier's rows in place."""
        if isinstance(self.classifier, nn.Linear):
            self.classifier.weight.copy_(rows)
        else:
            self.classifier.direction.copy_(rows)
            self.classifier.length.copy_(rows.norm(dim=1))

    def classify(self, embedding: Tensor, classifier: nn.Linear | WeightNormLinear | None = None) -> Tensor:
        """Computes the logits of embeddings; ``classifier`` may be another one of the same kind."""
        head = classifier or self.classifier
        logits = scores(embedding, head.weight)
        return logits if head.bias is None else logits + head.bias

    def on(self, device: torch.device, precision: Precision = "fp32") -> Network:
        """Moves the network to a device, in the memory layout that is fastest there."""
        self.precision = precision
        on_cpu = device.type == "cpu" and precision == "fp32" and self.config.backbone != "dtn"
        self.channels_last = on_cpu or device.type == "cuda"
        self.to(device)
        if self.channels_last:
            self.to(memory_format=torch.channels_last)
        return self

    def laid_out(self, images: Tensor) -> Tensor:
        """Converts images or feature maps to the memory layout of this network."""
        return images.contiguous(memory_format=torch.channels_last) if self.channels_last else images

    def forward(self, images: Tensor) -> Output:
        """Computes embedding and logits of normalised images."""
        embedding = self.bottleneck(self.features(images))
        return Output(embedding, self.classify(embedding))

    def features(self, images: Tensor) -> Tensor:
        """Computes the backbone's features of normalised images, in single precision."""
        if not isinstance(self.backbone, ResNet):  # whose first layer reads any layout
            images = self.laid_out(images)
        if self.precision != "bf16":
            return cast(Tensor, self.backbone(images))
        # No autocast cache: a captured step must convert the weights in every replay.
        with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
            features: Tensor = self.backbone(images)
        return features.float()

    if TYPE_CHECKING:

        def __call__(self, images: Tensor) -> Output:
            """Adds the types that ``nn.Module`` lacks."""

    def use_generator(self, generator: torch.Generator) -> None:
        """Makes all channel dropout draw from ``generator``."""
        for module in self.modules():
            if isinstance(module, ChannelDropout):
                module.generator = generator

    def frozen_copy(self) -> Network:
        """Copies the network in evaluation mode, without gradients."""
        return deepcopy(self).eval().requires_grad_(False)

    def folded(self) -> Network:
        """Returns a network that infers the same, faster: on a GPU a frozen copy (:mod:`.folded`), else this one."""
        device = self.prototypes.device
        if not (device.type == "cuda" and kernels.usable(device)):
            return self
        from ratp.networks.folded import fold

        return fold(self)


def _first_modules(backbone: nn.Module, config: NetworkConfig) -> list[nn.Module]:
    """Returns the frozen modules of a backbone, of those that have weights."""
    modules = {name: m for name, m in backbone.named_children() if any(True for _ in m.parameters())}
    if config.frozen > len(modules):
        raise ConfigError(
            f"network.frozen must be at most {len(modules)}, got {config.frozen}: {config.backbone} has the modules "
            f"{', '.join(modules)}."
        )
    return list(modules.values())[: config.frozen]


def _two_layers(features: int, config: NetworkConfig) -> nn.Sequential:
    first, last = _WideLinear(features, config.hidden), nn.Linear(config.hidden, config.dim)
    return _Bottleneck(first, BatchNorm1d(config.hidden), nn.ReLU(), last)


def _one_layer(features: int, config: NetworkConfig) -> nn.Sequential:
    dropout = ChannelDropout(_DROPOUT if config.backbone == "dtn" else 0.0)
    return _OneLayer(_WideLinear(features, config.dim), BatchNorm1d(config.dim), dropout)


def _no_layer(features: int, config: NetworkConfig) -> nn.Sequential:
    del features, config
    return nn.Sequential()


_BOTTLENECKS = {"two": _two_layers, "one": _one_layer, "none": _no_layer}
