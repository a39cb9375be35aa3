"""A store of fixed size that forgets its oldest rows."""

from __future__ import annotations

import torch
from torch import Tensor


class Ring:
    """Columns of equal length whose rows are written in turn, from the first again after the last.

    Args:
        columns: What is stored, each of shape (capacity, …); written in place.
        filled: How many rows hold something; None: all.
        pointer: The row to be written next.

    Attributes:
        columns: The same, whole.
        filled: How many rows hold something.
        pointer: The row to be written next.
    """

    def __init__(self, *columns: Tensor, filled: int | None = None, pointer: int = 0) -> None:
        self.columns = columns
        self.filled = len(columns[0]) if filled is None else filled
        self.pointer = pointer

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Of every column the rows that hold something."""
        return tuple(column[: self.filled] for column in self.columns)

    @torch.no_grad()
    def put(self, *rows: Tensor) -> None:
        """Writes a batch over the oldest rows; of more rows than there is room for, the last ones."""
        capacity, count = len(self.columns[0]), len(rows[0])
        skipped = max(count - capacity, 0)
        places = (torch.arange(skipped, count, device=rows[0].device) + self.pointer) % max(capacity, 1)
        for column, new in zip(self.columns, rows, strict=True):
            column[places] = new[skipped:].to(column.dtype)
        self.pointer = (self.pointer + count) % max(capacity, 1)
        self.filled = min(self.filled + count, capacity)
