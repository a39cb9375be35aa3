"""Running a network over many images, in chunks, without learning."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ratp.network import Network
from ratp.recipe import Scaling

CHUNK = 512


@torch.no_grad()
def run_in_chunks(
    network: nn.Module, function: Callable[[Tensor], tuple[Tensor, ...]], images: Tensor, scaling: Scaling
) -> tuple[Tensor, ...]:
    """Applies ``function`` to normalised images with the network in evaluation mode.

    Args:
        network: Put into evaluation mode, and back as it was afterwards.
        function: From normalised images to one or more tensors with a row an image.
        images: uint8.
        scaling: From stored images to what the network sees.

    Returns:
        The function's results over all images.
    """
    was_training = network.training
    network.eval()
    try:
        parts = [function(scaling(images[start : start + CHUNK])) for start in range(0, len(images), CHUNK)]
    finally:
        network.train(was_training)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def classify(network: Network, images: Tensor, scaling: Scaling) -> Tensor:
    """Logits of uint8 images."""
    return run_in_chunks(network, lambda x: (network(x).logits,), images, scaling)[0]
