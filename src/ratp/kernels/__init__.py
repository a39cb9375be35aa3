"""GPU kernels of our own, in Triton, where PyTorch would launch many small ones one after another.

Each does what a plain function of :mod:`ratp.parts` does, and is used in its place where it can be: on a CUDA device
that Triton can compile for. Everywhere else, and if that fails, the plain function does the work.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from ratp.notes import Note

_OLDEST = (8, 0)
_allowed = True


class KernelWarning(Note):
    """Plain functions do what kernels were to do."""


def usable(device: torch.device) -> bool:
    """Whether kernels can be used on a device."""
    return _allowed and device.type == "cuda" and _works(device)


@contextmanager
def plain() -> Iterator[None]:
    """Within the block, no kernel of ours is used: for comparisons, and not in several threads."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


@cache
def _works(device: torch.device) -> bool:
    """Tries the shortest kernel; says so once if it cannot be had."""
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return False
    try:
        from ratp.kernels.norm import infer

        one = torch.ones(1, 1, device=device)
        zero = torch.zeros(1, device=device)
        works = infer(one, zero, zero + 1, zero + 1, zero, 0.0).item() == 1
        reason = "it computes wrongly" * (not works)
    except Exception as error:  # no Triton, no compiler, no room for its cache: whatever it is
        works, reason = False, str(error).strip().partition("\n")[0] or type(error).__name__
    if not works:
        warnings.warn(f"training goes on without kernels of Triton: {reason}", KernelWarning, stacklevel=2)
    return works
