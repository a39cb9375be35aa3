"""Triton kernels that fuse what PyTorch would launch as many small kernels.

Each replaces a plain function of :mod:`ratp.functional` on CUDA devices that Triton can compile for. Everywhere else,
and if compiling fails, the plain function runs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from ratp.errors import Note

_OLDEST = (8, 0)
_MOST_PIXELS = 1024  # of an image that one program can hold
_allowed = True


class KernelWarning(Note):
    """Plain functions run instead of the kernels."""


def usable(device: torch.device) -> bool:
    """Whether a device can run the kernels."""
    return _allowed and device.type == "cuda" and _works(device)


def usable_for(images: Tensor) -> bool:
    """Whether the kernels that hold an image as a whole can process images of this size on their device."""
    return math.prod(images.shape[2:]) <= _MOST_PIXELS and usable(images.device)


def may_round() -> bool:
    """Whether RandMix may round as TF32 does; its kernels then process images of any size."""
    return torch.backends.cudnn.allow_tf32


@contextmanager
def plain() -> Iterator[None]:
    """Disables the kernels within the block: for comparisons; not thread-safe."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


@cache
def _works(device: torch.device) -> bool:
    """Tries the shortest kernel; warns once if it does not work."""
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return False
    try:
        from ratp.functional.kernels.norm import infer

        one = torch.ones(1, 1, device=device)
        zero = torch.zeros(1, device=device)
        works = infer(one, zero, zero + 1, zero + 1, zero, 0.0).item() == 1
        reason = "wrong result"
    except Exception as error:  # no Triton, no compiler, no room for its cache, …
        works, reason = False, str(error).strip().partition("\n")[0] or type(error).__name__
    if not works:
        warnings.warn(f"training continues without Triton kernels: {reason}", KernelWarning, stacklevel=2)
    return works
