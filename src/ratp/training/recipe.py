"""The recipe of a stream: sizes that all methods share, how images become inputs, and networks run over many images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ratp.config import override, switch
from ratp.data.domain import check_images
from ratp.data.streamed import StreamedImages
from ratp.functional.numerics import in_chunks
from ratp.functional.transforms import NONE, Transform, TransformConfig
from ratp.networks.backbones import REGISTRY, is_pretrained, pretrained_input
from ratp.networks.network import Network, NetworkConfig, check_network
from ratp.training.cuda_graphs import on_two_streams

LabelShift = Literal["none", "half", "few", "long-tail", "90/10"]


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
    label_shift: LabelShift = switch("none", "how targets are thinned by class", hash_default=False)
    label_shift_seed: int = switch(
        0, "seed of the classes and images that label_shift leaves out", minimum=0, hash_default=False
    )
    missing_classes: str = switch(
        "none", "classes left out of targets, e.g. rain:dog,cat; night:cat", hash_default=False
    )

    @property
    def shifts_labels(self) -> bool:
        """Whether any target is thinned by class."""
        return self.label_shift != "none" or self.missing_classes not in ("", "none")


def usual_values(backbone: str) -> dict[str, Any]:
    """Returns the usual sizes and scaling of a feature extractor, by their names in a recipe."""
    values: dict[str, Any] = {"network.backbone": backbone, "network.width": 1.0}
    if (usual := pretrained_input(backbone)) is None:
        return values
    bottleneck = (512, 256) if is_pretrained(backbone) else (256, 128)
    values |= {"network.hidden": bottleneck[0], "network.dim": bottleneck[1]}
    return values | dict(zip(("size", "mean", "std"), usual, strict=True))


def follow_backbone(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Returns the recipe with the usual sizes and scaling of another feature extractor, if ``changes`` names one.

    ``changes`` are all requested values, by their names in a recipe.
    """
    asked = changes.get("network.backbone")
    if not isinstance(asked, str) or asked.strip() == recipe.network.backbone:
        return recipe
    check_network(override(recipe.network, {"backbone": asked, "width": 1.0}))
    return override(recipe, usual_values(asked.strip()))


def quick_values(recipe: Recipe) -> dict[str, Any]:
    """Returns what the preset ``quick`` changes in a recipe, by name.

    The values were chosen on PACS for two processor cores (docs/how-to/set-up-a-run.md).
    """
    values: dict[str, Any] = {"epochs": min(recipe.epochs, 4), "steps": min(recipe.steps, 10)}
    if recipe.network.backbone in REGISTRY and is_pretrained(recipe.network.backbone):
        values |= {"size": 96, "network.frozen": 5, "batch": 32, "lr": 0.02}
    return values


class Scaling:
    """Normalises uint8 images."""

    def __init__(self, mean: tuple[float, float, float], std: tuple[float, float, float], device: torch.device) -> None:
        self.mean = torch.tensor(mean, device=device)
        self.std = torch.tensor(std, device=device)
        # (x/255 − mean)/std = x·factor + offset
        self._factor = (1 / (255 * self.std)).reshape(1, -1, 1, 1)
        self._offset = (-self.mean / self.std).reshape(1, -1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Returns normalised float images."""
        return images.to(self.mean.device) * self._factor + self._offset

    def unit(self, images: Tensor) -> Tensor:
        """Normalises float images with values in [0, 1]."""
        return images * (255 * self._factor) + self._offset

    def invert(self, images: Tensor) -> Tensor:
        """Converts normalised images to uint8, clipping values outside the displayable range."""
        return ((images - self._offset) / self._factor).round().clamp(0, 255).to(torch.uint8)


class TrainingInputs:
    """Augments and normalises uint8 images for training."""

    def __init__(self, config: TransformConfig, size: int, scaling: Scaling) -> None:
        self._transform = None if config == NONE else Transform(config, size)
        self._scaling = scaling

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Returns normalised float images, augmented with random numbers from ``generator``."""
        if self._transform is None:
            return self._scaling(images)
        return self._scaling.unit(self._transform(images, generator))


T = TypeVar("T")
U = TypeVar("U")

# Bytes of a chunk of normalised images; activations take some ten to twenty times as much.
CPU_ROOM, GPU_ROOM = 6 * 2**20, 80 * 2**20


def chunk_size(image_shape: torch.Size, device: torch.device) -> int:
    """Returns images per chunk: of 32×32 pixels 512 on a CPU and 4,096 on a GPU, of 224×224 there 128."""
    images = (GPU_ROOM if device.type == "cuda" else CPU_ROOM) // max(4 * image_shape.numel(), 1)
    return 1 << max(images.bit_length() - 1, 0)


@torch.no_grad()
def run_in_chunks(
    network: nn.Module, function: Callable[[Tensor], tuple[Tensor, ...]], images: Tensor, scaling: Scaling
) -> tuple[Tensor, ...]:
    """Applies ``function`` to uint8 images, normalised by ``scaling``, with the network in evaluation mode.

    The function returns tensors with one row per image. A chunk that exceeds the GPU's memory is halved.
    """
    was_training = network.training
    network.eval()
    try:
        device = scaling.mean.device
        chunk = chunk_size(images.shape[1:], device)
        if device.type == "cuda" and images.device.type == "cpu" and len(images) > chunk:
            images = StreamedImages(images, device)
        return in_chunks(lambda rows: function(scaling(images[rows])), len(images), chunk)
    finally:
        network.train(was_training)


def at_once(device: torch.device, one: Callable[[], T], other: Callable[[], U]) -> tuple[T, U]:
    """Calls two functions, at the same time on a GPU, which small kernels leave idle.

    Neither may depend on the other or draw from the same generators.
    """
    return on_two_streams(device, one, other) if device.type == "cuda" else (one(), other())


def classify(network: Network, images: Tensor, scaling: Scaling) -> Tensor:
    """Returns logits of uint8 images."""
    check_images(images, network.image_size)
    return run_in_chunks(network, lambda x: (network(x).logits,), images, scaling)[0]


def embed(network: Network, images: Tensor, scaling: Scaling) -> Tensor:
    """Returns embeddings of uint8 images."""
    check_images(images, network.image_size)
    return run_in_chunks(network, lambda x: (network(x).embedding,), images, scaling)[0]
