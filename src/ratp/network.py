"""The network: feature extractor → bottleneck → bias-free linear classifier, whose rows are the prototypes."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ratp.backbones import ChannelDropout, check_backbone, make_backbone
from ratp.config import switch
from ratp.errors import ConfigError
from ratp.parts.batch_norm import BatchNorm1d
from ratp.parts.scores import scores
from ratp.precision import Precision

_DROPOUT = 0.5  # of an embedding, in a bottleneck of one layer behind dtn


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of a network."""

    backbone: str = switch("dtn", "feature extractor: dtn, resnet18, resnet50, resnet101 or timm:NAME")
    width: float = switch(1.0, "factor on the channels of dtn", above=0, below=100)
    hidden: int = switch(256, "units of the bottleneck's hidden layer", minimum=1)
    dim: int = switch(128, "dimension of the embedding, and so of the prototypes", minimum=1)
    bottleneck: Literal["two", "one"] = switch(
        "two",
        "linear layers of the bottleneck: two, or one, then BatchNorm and with dtn dropout, as SHOT was published",
        later=True,
    )


def check_network(config: NetworkConfig, image_size: tuple[int, int] | None = None) -> None:
    """Checks what the types cannot, before anything is built.

    Args:
        config: Sizes of the network.
        image_size: Height and width of the images, if they are known.

    Raises:
        ConfigError: With one sentence for every mistake.
    """
    check_backbone(config.backbone, config.width, image_size)


class Output(NamedTuple):
    """What a forward pass gives.

    Attributes:
        embedding: z, after the bottleneck, shape (n, dim).
        logits: z Wᵀ, shape (n, classes).
    """

    embedding: Tensor
    logits: Tensor


class _WideLinear(nn.Linear):
    """A linear layer that a GPU multiplies as it does convolutions: in TF32 if these are.

    PyTorch has a switch for convolutions and another for matrix products, which losses and labels need exact.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x·Wᵀ + b."""
        if not x.is_cuda:
            return super().forward(x)
        return F.conv2d(x[:, :, None, None], self.weight[:, :, None, None], self.bias).flatten(1)


class _Bottleneck(nn.Sequential):
    """Linear, BatchNorm, ReLU, Linear: the middle two in one go."""

    def forward(self, x: Tensor) -> Tensor:
        """The embedding."""
        first, norm, _, last = self
        return cast(Tensor, last(norm(first(x), relu=True)))


class _OneLayer(nn.Sequential):
    """Linear, BatchNorm, dropout."""

    def forward(self, x: Tensor) -> Tensor:
        """The embedding."""
        linear, norm, dropout = self
        embedding: Tensor = norm(linear(x))
        keep = cast(ChannelDropout, dropout).draw(embedding)
        return embedding if keep is None else embedding * keep


class Network(nn.Module):
    """A classifier in three parts.

    Attributes:
        backbone: F, images to features.
        bottleneck: B, Linear · BatchNorm · ReLU · Linear, or Linear · BatchNorm · dropout.
        classifier: W, linear without bias.
    """

    def __init__(self, config: NetworkConfig, classes: int, image_size: tuple[int, int] = (32, 32)) -> None:
        """Builds a network with random weights, drawn from torch's generator.

        Args:
            config: Its sizes.
            classes: Number of classes.
            image_size: Height and width of the images it will see.

        Raises:
            ConfigError: If there is no such backbone, or it cannot work on images of this size.
        """
        super().__init__()
        self.config = config
        self.classes = classes
        self.image_size = image_size
        self.channels_last = False
        self.precision: Precision = "fp32"
        self.backbone, features = make_backbone(config.backbone, image_size, config.width)
        self.bottleneck = _two_layers(features, config) if config.bottleneck == "two" else _one_layer(features, config)
        self.classifier = nn.Linear(config.dim, classes, bias=False)
        linear = [layer for layer in self.bottleneck if isinstance(layer, nn.Linear)]
        for layer in linear:
            nn.init.zeros_(layer.bias)
        if config.bottleneck == "one":
            for layer in (*linear, self.classifier):
                nn.init.xavier_normal_(layer.weight)
            return
        for layer in linear:
            nn.init.normal_(layer.weight, std=0.01)
        # kaiming_uniform with a=√5 on the fan-out, which is the number of classes: U(±1/√K)
        nn.init.uniform_(self.classifier.weight, -1 / math.sqrt(classes), 1 / math.sqrt(classes))

    @property
    def prototypes(self) -> Tensor:
        """The classifier's rows, shape (classes, dim)."""
        return self.classifier.weight

    def on(self, device: torch.device, precision: Precision = "fp32") -> Network:
        """The network on a device, in the layout that is fastest there."""
        self.precision = precision
        self.channels_last = device.type == "cuda"
        self.to(device)
        if self.channels_last:
            self.to(memory_format=torch.channels_last)
        return self

    def laid_out(self, images: Tensor) -> Tensor:
        """Images, or what layers make of them, in the layout of this network's weights."""
        return images.contiguous(memory_format=torch.channels_last) if self.channels_last else images

    def forward(self, images: Tensor) -> Output:
        """Embedding and logits of normalised images."""
        embedding = self.bottleneck(self.features(images))
        return Output(embedding, scores(embedding, self.prototypes))

    def features(self, images: Tensor) -> Tensor:
        """What the feature extractor makes of normalised images, in single precision."""
        images = self.laid_out(images)
        if self.precision != "bf16":
            return cast(Tensor, self.backbone(images))
        # Without autocast's cache of converted weights: a captured step must convert them in every replay.
        with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
            features: Tensor = self.backbone(images)
        return features.float()

    if TYPE_CHECKING:

        def __call__(self, images: Tensor) -> Output:
            """Types what ``nn.Module`` leaves untyped."""

    def use_generator(self, generator: torch.Generator) -> None:
        """Lets all dropout draw from ``generator``."""
        for module in self.modules():
            if isinstance(module, ChannelDropout):
                module.generator = generator

    def frozen_copy(self) -> Network:
        """A copy that no longer learns: in evaluation mode, without gradients, its dropout without a generator."""
        return deepcopy(self).eval().requires_grad_(False)


def check_two_layers(config: NetworkConfig, method: str) -> None:
    """Refuses a bottleneck of one layer, for methods that reach into one of two.

    Raises:
        ConfigError: If it is one.
    """
    if config.bottleneck != "two":
        raise ConfigError(f"{method} needs the bottleneck of two layers: leave network.bottleneck as it is.")


def _two_layers(features: int, config: NetworkConfig) -> nn.Sequential:
    first, last = _WideLinear(features, config.hidden), nn.Linear(config.hidden, config.dim)
    return _Bottleneck(first, BatchNorm1d(config.hidden), nn.ReLU(), last)


def _one_layer(features: int, config: NetworkConfig) -> nn.Sequential:
    dropout = ChannelDropout(_DROPOUT if config.backbone == "dtn" else 0.0)
    return _OneLayer(_WideLinear(features, config.dim), BatchNorm1d(config.dim), dropout)
