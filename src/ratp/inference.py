"""Running a network over many images, in chunks, without learning."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ratp.domain import check_images
from ratp.network import Network
from ratp.parts.chunks import in_chunks
from ratp.recipe import Scaling

# Bytes of a chunk of images as the network sees them. What a network makes of them on the way takes some ten to twenty
# times as much.
CPU_ROOM, GPU_ROOM = 6 * 2**20, 80 * 2**20


def chunk_size(image_shape: torch.Size, device: torch.device) -> int:
    """Images a chunk: a power of two. 512 of 32×32 pixels on a CPU, 4,096 on a GPU, where of 224×224 it is 128."""
    images = (GPU_ROOM if device.type == "cuda" else CPU_ROOM) // max(4 * image_shape.numel(), 1)
    return 1 << max(images.bit_length() - 1, 0)


@torch.no_grad()
def run_in_chunks(
    network: nn.Module, function: Callable[[Tensor], tuple[Tensor, ...]], images: Tensor, scaling: Scaling
) -> tuple[Tensor, ...]:
    """Applies ``function`` to normalised images with the network in evaluation mode.

    If the GPU's memory does not suffice for a chunk, it is halved.

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
        chunk = chunk_size(images.shape[1:], scaling.mean.device)
        return in_chunks(lambda rows: function(scaling(images[rows])), len(images), chunk)
    finally:
        network.train(was_training)


def classify(network: Network, images: Tensor, scaling: Scaling) -> Tensor:
    """Logits of uint8 images.

    Raises:
        RatpError: If they are no uint8 images of the network's size.
    """
    check_images(images, network.image_size)
    return run_in_chunks(network, lambda x: (network(x).logits,), images, scaling)[0]


def embed(network: Network, images: Tensor, scaling: Scaling) -> Tensor:
    """Embeddings of uint8 images.

    Raises:
        RatpError: If they are no uint8 images of the network's size.
    """
    check_images(images, network.image_size)
    return run_in_chunks(network, lambda x: (network(x).embedding,), images, scaling)[0]
