"""Images turned by quarters, and the task of telling by how many (SHOT+, TPAMI 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

TURNS = 4


def rotate(images: Tensor, turns: Tensor) -> Tensor:
    """Images turned by 90° as often as ``turns`` says, each on its own; they must be square.

    Args:
        images: Shape (n, c, s, s).
        turns: Whole numbers from 0 to 3, shape (n,).
    """
    turns = turns[:, None, None, None]
    turned = images
    for number in range(1, TURNS):
        turned = torch.where(turns == number, torch.rot90(images, number, (2, 3)), turned)
    return turned


def draw_turns(count: int, generator: torch.Generator) -> Tensor:
    """Random numbers of quarter turns, shape (count,)."""
    return torch.randint(TURNS, (count,), generator=generator, device=generator.device)


def rotation_input(upright: Tensor, turned: Tensor) -> Tensor:
    """What the rotation head sees: [sg(z(x)); z(rot(x))]. No gradient reaches the upright half."""
    return torch.cat([upright.detach(), turned], dim=1)
