"""The training sizes of a stream, shared by every method that runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ratp.backbones import pretrained_input
from ratp.config import override, switch
from ratp.network import NetworkConfig, check_network
from ratp.parts.transforms import NONE, Transform, TransformConfig


@dataclass(frozen=True)
class Recipe:
    """What all methods share on one stream: network, image scaling, batch, length of a stage, memory."""

    network: NetworkConfig = switch(NetworkConfig(), "the network")
    size: int = switch(32, "side of the images", minimum=1)
    batch: int = switch(64, "images in a batch", minimum=2)
    epochs: int = switch(30, "epochs a stage", minimum=1)
    steps: int = switch(800, "steps an epoch", minimum=1)
    lr: float = switch(0.01, "initial learning rate of a stage", above=0, below=3.4e38)
    memory: int = switch(200, "exemplars kept over all domains", minimum=0)
    hold_out: float = switch(
        0.0, "share of a target kept for testing; 0: tested on what it trains on", minimum=0, below=1
    )
    mean: tuple[float, float, float] = switch((0.5, 0.5, 0.5), "channel means taken off the images")
    std: tuple[float, float, float] = switch((0.5, 0.5, 0.5), "channel deviations the images are divided by", above=0)
    source_transform: TransformConfig = switch(NONE, "random changes of source images while training")
    target_transform: TransformConfig = switch(NONE, "random changes of target and memory images while training")


def usual_values(backbone: str) -> dict[str, Any]:
    """The sizes and the scaling a feature extractor is usually run with, by their names in a recipe."""
    if backbone == "dtn":
        bottleneck, size, mean, std = (256, 128), 32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    else:
        bottleneck, (size, mean, std) = (512, 256), pretrained_input(backbone)
    return {
        "network.backbone": backbone,
        "network.width": 1.0,
        "network.hidden": bottleneck[0],
        "network.dim": bottleneck[1],
        "size": size,
        "mean": mean,
        "std": std,
    }


def follow_backbone(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with the sizes and scaling that are usual for another feature extractor, if one is asked for.

    Args:
        recipe: Where to start from.
        changes: All values that are asked for, by their names in a recipe.

    Raises:
        ConfigError: If there is no such feature extractor.
    """
    asked = changes.get("network.backbone")
    if not isinstance(asked, str) or asked.strip() == recipe.network.backbone:
        return recipe
    check_network(override(recipe.network, {"backbone": asked, "width": 1.0}))
    return override(recipe, usual_values(asked.strip()))


class Scaling:
    """From stored uint8 images to what the network sees."""

    def __init__(self, mean: tuple[float, float, float], std: tuple[float, float, float], device: torch.device) -> None:
        self.mean = torch.tensor(mean, device=device)
        self.std = torch.tensor(std, device=device)
        # (x/255 − mean)/std = x·factor + offset
        self._factor = (1 / (255 * self.std)).reshape(1, -1, 1, 1)
        self._offset = (-self.mean / self.std).reshape(1, -1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalised float images."""
        return images.to(self.mean.device).float() * self._factor + self._offset

    def unit(self, images: Tensor) -> Tensor:
        """Normalised images from float images with values in [0, 1]."""
        return images * (255 * self._factor) + self._offset

    def invert(self, images: Tensor) -> Tensor:
        """uint8 images from normalised ones, clipped to what can be shown."""
        return ((images - self._offset) / self._factor).round().clamp(0, 255).to(torch.uint8)


class TrainingInputs:
    """From stored uint8 images to what the network sees while it trains: randomly changed, then scaled."""

    def __init__(self, config: TransformConfig, size: int, scaling: Scaling) -> None:
        self._transform = None if config == NONE else Transform(config, size)
        self._scaling = scaling

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Normalised float images, changed by numbers drawn from ``generator``."""
        if self._transform is None:
            return self._scaling(images)
        return self._scaling.unit(self._transform(images, generator))
