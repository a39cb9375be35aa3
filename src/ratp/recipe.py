"""The training sizes of a stream, shared by every method that runs on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ratp.config import switch
from ratp.network import NetworkConfig


@dataclass(frozen=True)
class Recipe:
    """What all methods share on one stream: network, image scaling, batch, length of a stage, memory."""

    network: NetworkConfig = switch(NetworkConfig(), "the network")
    batch: int = switch(64, "images in a batch", minimum=2)
    epochs: int = switch(30, "epochs a stage", minimum=1)
    steps: int = switch(800, "steps an epoch", minimum=1)
    lr: float = switch(0.01, "initial learning rate of a stage", above=0, below=3.4e38)
    memory: int = switch(200, "exemplars kept over all domains", minimum=0)
    mean: tuple[float, float, float] = switch((0.5, 0.5, 0.5), "channel means taken off the images")
    std: tuple[float, float, float] = switch((0.5, 0.5, 0.5), "channel deviations the images are divided by", above=0)


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

    def invert(self, images: Tensor) -> Tensor:
        """uint8 images from normalised ones, clipped to what can be shown."""
        return ((images - self._offset) / self._factor).round().clamp(0, 255).to(torch.uint8)
