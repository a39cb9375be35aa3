"""How exactly a GPU computes: what it multiplies in fewer bits, to be faster.

======  ==========================================================================================
fp32    everything in single precision
tf32    convolutions, and the bottleneck's wide layer with them, multiply with 10 bits of mantissa
bf16    the feature extractor works in bfloat16; bottleneck, classifier, losses, labels and all
        statistics stay in single precision
======  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal, cast, get_args

import torch

from ratp.errors import ConfigError, unknown

Precision = Literal["fp32", "tf32", "bf16"]
_FIRST_WITH_TF32 = (8, 0)
_lock = Lock()
_asked: Precision = "tf32"  # as torch begins
_exact = 0


def find_precision(asked: str, device: torch.device) -> Precision:
    """The precision asked for, or the best the device has instead of it; ``auto``: tf32 on GPUs that have it.

    Raises:
        ConfigError: If there is no such precision.
    """
    names = get_args(Precision)
    if asked not in (*names, "auto"):
        raise ConfigError(unknown("precision", asked, ("auto", *names)))
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_TF32
    if asked == "fp32" or not has_tf32:  # a GPU has both or neither
        return "fp32"
    return "tf32" if asked == "auto" else cast(Precision, asked)


def use_precision(precision: Precision) -> None:
    """Sets what cannot be said to a single network: how all convolutions of this process multiply."""
    global _asked
    with _lock:
        _asked = precision
        _set()


@contextmanager
def single_precision() -> Iterator[None]:
    """Within it all convolutions of this process multiply as in fp32, whatever other runs ask for meanwhile.

    Those compute more exactly until the last one leaves, never less.
    """
    global _exact
    with _lock:
        _exact += 1
        _set()
    try:
        yield
    finally:
        with _lock:
            _exact -= 1
            _set()


def _set() -> None:
    torch.backends.cudnn.allow_tf32 = _asked != "fp32" and not _exact
