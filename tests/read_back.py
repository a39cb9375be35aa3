"""Finds steps that a CUDA graph could not record."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ReadBack(TorchDispatchMode):
    """Fails on what would make a GPU wait, take numbers from the host, or have a shape that depends on data."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "is_nonzero", "equal")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::").rstrip("_").removeprefix("_unique")
        assert name not in self.FORBIDDEN, func
        if name in ("index", "index_put", "_index_put_impl"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), func
        return func(*args, **(kwargs or {}))
