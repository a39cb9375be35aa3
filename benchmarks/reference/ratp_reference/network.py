"""Feature extractor, bottleneck and bias-free classifier from torch's own layers."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from ratp.networks.network import NetworkConfig


class ChannelDropout(nn.Module):
    """Drops whole channels while training, with numbers from a given generator."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes channels and scales the others up."""
        if not self.training:
            return x
        keep = torch.rand(x.shape[:2], generator=self.generator, device=x.device) >= self.probability
        return x * keep[:, :, None, None] / (1 - self.probability)


class PlainNetwork(nn.Module):
    """F → B → W; the rows of W are the prototypes. Tensors are named and begin as those of the fast path."""

    def __init__(self, config: NetworkConfig, classes: int, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.backbone, features = dtn(config.width, image_size) if config.backbone == "dtn" else resnet(config.backbone)
        self.bottleneck = nn.Sequential(
            nn.Linear(features, config.hidden),
            nn.BatchNorm1d(config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, config.dim),
        )
        self.classifier = nn.Linear(config.dim, classes, bias=False)
        for layer in (self.bottleneck[0], self.bottleneck[3]):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
        nn.init.uniform_(self.classifier.weight, -1 / math.sqrt(classes), 1 / math.sqrt(classes))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding z and logits."""
        embedding = self.bottleneck(self.backbone(images))
        return embedding, self.classifier(embedding)

    def draw_dropout_from(self, generator: torch.Generator | None) -> None:
        """Lets all dropout draw from ``generator``."""
        for module in self.modules():
            if isinstance(module, ChannelDropout):
                module.generator = generator

    def frozen_copy(self) -> PlainNetwork:
        """The old model: a copy that stays as it is."""
        self.draw_dropout_from(None)
        return copy.deepcopy(self).eval().requires_grad_(False)


def dtn(width: float, image_size: tuple[int, int]) -> tuple[nn.Module, int]:
    """Three blocks of strided convolution, BatchNorm, dropout of channels and ReLU; and the number of features."""
    layers: list[nn.Module] = []
    before, (height, across) = 3, image_size
    for channels, dropout in ((64, 0.1), (128, 0.3), (256, 0.5)):
        after = max(1, round(channels * width))
        layers.append(nn.Conv2d(before, after, kernel_size=5, stride=2, padding=2))
        layers.append(nn.BatchNorm2d(after))
        layers.append(ChannelDropout(dropout))
        layers.append(nn.ReLU())
        before, height, across = after, math.ceil(height / 2), math.ceil(across / 2)
    return nn.Sequential(*layers, nn.Flatten()), before * height * across


def resnet(name: str) -> tuple[nn.Module, int]:
    """A network of torchvision without its classifier, and the number of its features."""
    import torchvision.models

    model = torchvision.models.get_model(name, weights=None)
    features, model.fc = model.fc.in_features, nn.Identity()
    return model, features
