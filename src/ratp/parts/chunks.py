"""Work on many rows in chunks, so that a chunk decides on the memory it takes and not the number of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def in_chunks(function: Callable[[slice], tuple[Tensor, ...]], count: int, chunk: int) -> tuple[Tensor, ...]:
    """Applies ``function`` to all rows, some at a time.

    If the GPU's memory does not suffice, the chunk is halved and the work goes on where it stopped.

    Args:
        function: From rows, given as a slice, to one or more tensors with a row for each. It may be called again for
            rows it failed on.
        count: Number of rows. Without any, the function is called once, for an empty slice.
        chunk: Rows to begin with.

    Returns:
        The function's results over all rows.

    Raises:
        torch.cuda.OutOfMemoryError: If the memory does not suffice for one row.
    """
    results: tuple[Tensor, ...] | None = None
    start = 0
    while results is None or start < count:
        rows = slice(start, min(start + chunk, count))
        part = _unless_out_of_memory(function, rows)
        if part is None:
            chunk = (rows.stop - rows.start) // 2
            continue
        if rows.stop - rows.start == count:
            return part
        if results is None:
            results = tuple(tensor.new_empty((count, *tensor.shape[1:])) for tensor in part)
        for whole, tensor in zip(results, part, strict=True):
            whole[rows] = tensor
        start = rows.stop
    return results


def _unless_out_of_memory(function: Callable[[slice], tuple[Tensor, ...]], rows: slice) -> tuple[Tensor, ...] | None:
    """What the function gives, or None; the failed call's tensors are free again when this returns."""
    try:
        return function(rows)
    except torch.cuda.OutOfMemoryError:
        if rows.stop - rows.start <= 1:
            raise
        return None
