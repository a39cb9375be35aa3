"""Where a kernel runs: on the device of its tensors, as PyTorch's own do.

Triton launches on the current device of the thread, which is the first GPU unless somebody has chosen another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class AtHome:
    """A kernel of Triton that runs on the device of its first tensor; as a decorator above ``triton.jit``."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        launch = self._kernel[grid]

        def launched(*values: Any, **settings: Any) -> None:
            home = next(value.device for value in values if isinstance(value, Tensor))
            if home.type != "cuda":  # Triton's interpreter computes elsewhere
                launch(*values, **settings)
                return
            with torch.cuda.device(home):
                launch(*values, **settings)

        return launched
