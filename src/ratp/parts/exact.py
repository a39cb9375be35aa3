"""Matrix products in full single precision, whatever the process allows itself elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch

_EXACT = ("ieee", "none")
_lock = Lock()
_inside = 0
_way_back = ExitStack()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Within it, float32 matrices are multiplied as such: neither in TF32 nor in bfloat16.

    Autocast is switched off for this thread only. What else decides is a setting of the process: it is changed only
    where it allows less, and the last thread to leave puts it back. Until then others compute more exactly, never
    less.
    """
    global _inside, _way_back
    with _lock:
        _inside += 1
        if _inside == 1:
            _way_back = _forbid_less()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _way_back.close()


def _forbid_less() -> ExitStack:
    """Sets what allows less, in both interfaces PyTorch has for it; closing the result undoes it."""
    back = ExitStack()
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
    return back
