"""Decodes one image for a model in use, from the bytes of its file."""

from __future__ import annotations

import torch
from torch import Tensor

from ratp.data.decode.decode import MAX_PIXELS, decode_picture


def decode_image(data: bytes, size: tuple[int, int], max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decodes an image file to a uint8 tensor of shape (3, height, width), as for a run; raises BadImage."""
    picture = decode_picture(data, size, max_pixels)
    return torch.frombuffer(bytearray(picture.planes()), dtype=torch.uint8).view(3, *size)
