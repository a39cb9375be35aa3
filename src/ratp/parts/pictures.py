"""What can be told of images, and made of them, without a model: their structure, and their pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Images whose pixels are in memory as numbers at the same time.
IMAGES_AT_ONCE = 64
# Deviation of an image's pixels, of 255, below which it is blank.
LEAST_CONTRAST = 1.0
# Pieces along a side, where images are broken into pieces, and pixels that a piece has at least.
PIECES, LEAST_PIECE = (2, 4, 8), 6


def picture_structure(images: Tensor) -> float:
    """Correlation of neighbouring pixels, mean over uint8 images and both directions.

    In pictures it is near 1, in noise 0; images of one colour, in which nothing correlates, count as 0.
    """
    found = []
    for part in torch.split(images, IMAGES_AT_ONCE):
        grey = part.double().mean(dim=1)
        pairs = (grey[:, :, 1:], grey[:, :, :-1]), (grey[:, 1:], grey[:, :-1])
        found += [_correlation(a.flatten(1), b.flatten(1)) for a, b in pairs if a.numel()]
    return torch.cat(found).mean().item() if found else 0.0


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Of the numbers in each row of ``a`` with those in ``b``; 0 where they are all the same."""
    a, b = a - a.mean(dim=1, keepdim=True), b - b.mean(dim=1, keepdim=True)
    size = (a.square().mean(dim=1) * b.square().mean(dim=1)).sqrt()
    return torch.where(size > LEAST_CONTRAST, (a * b).mean(dim=1) / size.clamp_min(LEAST_CONTRAST), 0.0)


def broken(images: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Images that have all that these have, but not as a whole: in 4, 16 and 64 pieces, and lying on a side.

    Small images are not broken into so many pieces that nothing could be in them.

    Args:
        images: Shape (n, channels, height, width).
        generator: What the order of the pieces is drawn from, on the CPU.
    """
    height, width = images.shape[2:]
    for pieces in PIECES:
        if min(height, width) >= pieces * LEAST_PIECE:
            yield _shuffled(images, pieces, generator)
    if height == width:
        yield images.rot90(1, (2, 3))


def _shuffled(images: Tensor, pieces: int, generator: torch.Generator) -> Tensor:
    """Every image with its ``pieces`` × ``pieces`` pieces in another order; what is left over at the edge stays."""
    count, channels, height, width = images.shape
    height, width = height // pieces, width // pieces
    inner = images[..., : height * pieces, : width * pieces]
    grid = inner.reshape(count, channels, pieces, height, pieces, width).permute(0, 2, 4, 1, 3, 5)
    order = torch.rand(count, pieces**2, generator=generator).argsort(dim=1).to(images.device)
    mixed = grid.flatten(1, 2)[torch.arange(count, device=images.device)[:, None], order].view_as(grid)
    result = images.clone()
    result[..., : height * pieces, : width * pieces] = mixed.permute(0, 3, 1, 4, 2, 5).reshape_as(inner)
    return result
