"""A device like an Apple GPU, on any machine: it has no float64, and its tensors do not mix with those of the CPU.

``python pretend_gpu.py METHOD …`` executes a whole run of each method on it: all stages, guard, saved states, tests.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from helpers import toy_plan
from ratp.functional import numerics
from ratp.runs.run import Run

NAME = "pretend"
COPIES = ("copy_", "_to_copy")
# They take positions from the CPU, too.
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
CHANGES = {"ratp": {"t2pl.class_mix": "em"}, "arc": {"class_mix": "confusion"}}


class Backend:
    """What torch asks a device module for."""

    def __getattr__(self, name: str) -> Any:
        answers = {"is_initialized": True, "is_available": True, "_is_in_bad_fork": False}
        counts = {"current_device": 0, "device_count": 1, "manual_seed_all": None}
        if name not in answers | counts:
            raise AttributeError(name)
        return lambda *_: (answers | counts)[name]

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class OnDevice(Tensor):
    """A tensor that says it is on the device; its numbers are in a tensor on the CPU."""

    @staticmethod
    def __new__(cls, held):
        if held.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"a tensor of {held.dtype} on a device without float64")
        return Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=torch.device(NAME, 0)
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})

    def tolist(self):
        return self.held.tolist()

    def data_ptr(self):
        return self.held.data_ptr()

    def new_tensor(self, values):
        return OnDevice(self.held.new_tensor(values))

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = OnDevice(self.held.detach().clone()).requires_grad_(self.requires_grad)
            copy.__dict__.update({name: value for name, value in self.__dict__.items() if name != "held"})
            memo[id(self)] = copy
        return memo[id(self)]


class Everywhere(TorchDispatchMode):
    """Also creates tensors on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


def computed(func, args, kwargs):
    """The result of an operation, on the CPU, as a tensor on the device if that is where it belongs."""
    name, requested = func.overloadpacket.__name__, kwargs.get("device")
    values, form = tree_flatten((args, kwargs))
    held = {id(value.held): value for value in values if isinstance(value, OnDevice)}
    if held and name not in COPIES:
        checked = values[:1] if name in INDEXING else values
        mixed = [v.shape for v in checked if isinstance(v, Tensor) and v.ndim and not isinstance(v, OnDevice)]
        assert not mixed, f"{func} of tensors on two devices: {mixed} is on the CPU"
    args, kwargs = tree_unflatten([_on_cpu(value) for value in values], form)
    result = func(*args, **kwargs)
    is_here = bool(held) if requested is None else torch.device(requested).type == NAME
    if name == "copy_":
        is_here = id(result) in held
    if not is_here:
        return result
    return tree_map_only(Tensor, lambda t: held[id(t)] if id(t) in held else OnDevice(t), result)


def _on_cpu(value):
    if isinstance(value, OnDevice):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


_Generator, _tensor = torch.Generator, torch.tensor


class _AnyGenerator(type(_Generator)):
    def __instancecheck__(cls, value):
        return isinstance(value, _Generator)


class Generator(_Generator, metaclass=_AnyGenerator):
    """A generator of the CPU that says which device it is for."""

    def __new__(cls, device="cpu"):
        made = _Generator.__new__(cls, "cpu")
        made.place = torch.device(device)
        return made

    @property
    def device(self):
        return self.place

    def manual_seed(self, seed):
        super().manual_seed(seed)
        return self


def tensor(values, *, device="cpu", **kwargs):
    """Like ``torch.tensor``, which creates nothing on devices that are written in Python."""
    return _tensor(values, **kwargs).to(device)


def main(methods):
    backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
    for method in methods:
        plan = replace(toy_plan(method, changes=CHANGES.get(method)), device=torch.device(NAME))
        with tempfile.TemporaryDirectory() as folder, Everywhere():
            assert Run(plan, Path(folder) / "run", save_every=1).execute().matrix.complete, method
        print(method, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with (
        patch.object(numerics, "WITHOUT_DOUBLE", (NAME,)),
        patch.object(torch, "Generator", Generator),
        patch.object(torch, "tensor", tensor),
    ):
        main(sys.argv[1:])
