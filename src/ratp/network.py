"""The network: feature extractor → bottleneck → bias-free linear classifier, whose rows are the prototypes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ratp.config import switch


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of a network."""

    backbone: Literal["dtn"] = switch("dtn", "feature extractor")
    width: float = switch(1.0, "factor on the feature extractor's channels", above=0, below=100)
    hidden: int = switch(256, "units of the bottleneck's hidden layer", minimum=1)
    dim: int = switch(128, "dimension of the embedding, and so of the prototypes", minimum=1)


class Output(NamedTuple):
    """What a forward pass gives.

    Attributes:
        embedding: z, after the bottleneck, shape (n, dim).
        logits: z Wᵀ, shape (n, classes).
    """

    embedding: Tensor
    logits: Tensor


class ChannelDropout(nn.Module):
    """Drops whole channels while training, drawing from a generator of its own."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes channels and scales the rest up."""
        if not self.training:
            return x
        keep = torch.rand(x.shape[:2], generator=self.generator, device=x.device) >= self.probability
        return x * (keep / (1 - self.probability))[:, :, None, None].to(x.dtype)


def dtn(width: float) -> tuple[nn.Sequential, int]:
    """DTN, the LeNet variant for 32×32 digits, and the dimension of its features.

    Three blocks of strided 5×5 convolution, BatchNorm, channel dropout and ReLU, with 64, 128 and 256
    channels at width 1.
    """
    layers: list[nn.Module] = []
    before = 3
    for channels, dropout in ((64, 0.1), (128, 0.3), (256, 0.5)):
        after = max(1, round(channels * width))
        layers += [
            nn.Conv2d(before, after, kernel_size=5, stride=2, padding=2),
            nn.BatchNorm2d(after),
            ChannelDropout(dropout),
            nn.ReLU(),
        ]
        before = after
    return nn.Sequential(*layers, nn.Flatten()), before * 4 * 4


class Network(nn.Module):
    """A classifier in three parts.

    Attributes:
        backbone: F, images to features.
        bottleneck: B, Linear · BatchNorm · ReLU · Linear.
        classifier: W, linear without bias.
    """

    def __init__(self, config: NetworkConfig, classes: int) -> None:
        super().__init__()
        self.config = config
        self.classes = classes
        self.backbone, features = dtn(config.width)
        self.bottleneck = nn.Sequential(
            nn.Linear(features, config.hidden),
            nn.BatchNorm1d(config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, config.dim),
        )
        self.classifier = nn.Linear(config.dim, classes, bias=False)
        for layer in (self.bottleneck[0], self.bottleneck[3]):
            nn.init.normal_(layer.weight, std=0.01)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        # kaiming_uniform with a=√5 on the fan-out, which is the number of classes: U(±1/√K)
        nn.init.uniform_(self.classifier.weight, -1 / math.sqrt(classes), 1 / math.sqrt(classes))

    @property
    def prototypes(self) -> Tensor:
        """The classifier's rows, shape (classes, dim)."""
        return self.classifier.weight

    def forward(self, images: Tensor) -> Output:
        """Embedding and logits of normalised images."""
        embedding = self.bottleneck(self.backbone(images))
        return Output(embedding, self.classifier(embedding))

    if TYPE_CHECKING:

        def __call__(self, images: Tensor) -> Output:
            """Types what ``nn.Module`` leaves untyped."""

    def use_generator(self, generator: torch.Generator) -> None:
        """Lets all dropout draw from ``generator``."""
        for module in self.modules():
            if isinstance(module, ChannelDropout):
                module.generator = generator

    def frozen_copy(self) -> Network:
        """A copy that no longer learns: in evaluation mode, without gradients."""
        device = self.prototypes.device
        with torch.random.fork_rng(devices=[]):
            copy = Network(self.config, self.classes)
        copy.load_state_dict(self.state_dict())
        return copy.to(device).eval().requires_grad_(False)
