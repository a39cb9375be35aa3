"""Matrix products in full single precision, whatever the process allows itself elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ratp.together import Together

_EXACT = ("ieee", "none")


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Within it, float32 matrices are multiplied as such: neither in TF32 nor in bfloat16.

    Autocast is switched off for this thread only. What else decides is a setting of the process: it is changed only
    where it allows less, and the last thread to leave puts it back. Until then others compute more exactly, never
    less.
    """
    with _forbidding_less, torch.autocast(device.type, enabled=False):
        yield


def _forbid_less(back: ExitStack) -> None:
    """Sets what allows less, in both interfaces PyTorch has for it."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    for backend in backends:
        if backend.fp32_precision not in _EXACT:
            back.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it does not describe what was set through the newer interface
        precision = "highest"
    if precision != "highest":
        back.callback(torch.set_float32_matmul_precision, precision)
        torch.set_float32_matmul_precision("highest")
    for backend in backends:
        if backend.fp32_precision not in _EXACT:
            backend.fp32_precision = "ieee"


_forbidding_less = Together(_forbid_less)
