"""The state of objects in the middle of their work, and objects put back into it.

A method and the phases it trains in are a graph of objects: networks, optimisers, generators, labels, counters. What
has changed in it since it was built is found by walking it, by the names of attributes:

    marks = Marks({"method": method, "phases": phases})     # just built
    ...                                                     # some steps
    snapshot = marks.snapshot()                             # what differs from then

    Marks({"method": method, "phases": phases}).restore(snapshot)   # built once more, and as it was

Only values travel: tensors, states of generators, numbers, texts, and lists of these. Objects are made by the code that
builds them, never by a file. So a phase makes its objects when it is built; while it trains, it may change them and
replace tensors, numbers and lists of them, but it makes no objects of other types that it needs in a later epoch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ratp.errors import RatpError

# Images, and larger tensors of whole numbers, are left out if nobody has written to them.
SMALL = 2**20
CPU = torch.device("cpu")
_PLAIN = bool, int, float, str, type(None)
_SEQUENCES = {list: "list", tuple: "tuple", deque: "deque"}
_FOREIGN = {"torch", "numpy", "triton", "torchvision", *sys.stdlib_module_names}
_FUNCTIONS = FunctionType, MethodType, BuiltinFunctionType, ModuleType, partial
_NOTHING = object()


@dataclass(frozen=True)
class Snapshot:
    """What changed.

    Attributes:
        tensors: Changed tensors and states of generators, by number, on the CPU.
        changes: Where they belong, and changed numbers and texts: plain data.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)


class Marks:
    """How objects are when this is made.

    Args:
        roots: The objects, by name.
        device: What they compute on: a tensor of a GPU that has no place yet when it is put back goes there.
    """

    def __init__(self, roots: Mapping[str, Any], device: torch.device = CPU) -> None:
        self._roots, self._device = dict(roots), device
        self._before: dict[str, Any] = {}
        _Marker(self._before).visit(self._roots, "")

    def snapshot(self) -> Snapshot:
        """What differs from when this was made."""
        taker = _Taker(self._before)
        return Snapshot(taker.tensors, taker.visit(self._roots, "") or {})

    def restore(self, snapshot: Snapshot) -> None:
        """Puts objects that were built the same way into the state of a snapshot.

        Raises:
            RatpError: If the snapshot does not fit them.
        """
        with torch.no_grad():
            _Restorer(snapshot.tensors, self._device).load(self._roots, snapshot.changes, "")


def is_transient(value: Any) -> bool:
    """Whether an object says that it has no state worth keeping (``transient = True`` on its class)."""
    return bool(getattr(type(value), "transient", False))


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that is to be walked; None: it is left alone."""
    if isinstance(value, (type, Enum, *_FUNCTIONS)) or is_transient(value):
        return None
    package = type(value).__module__.partition(".")[0]
    if package in _FOREIGN and not isinstance(value, nn.Module):
        return None
    return getattr(value, "__dict__", None)


class _Marker:
    """Notes what can be told apart later without a copy."""

    def __init__(self, before: dict[str, Any]) -> None:
        self._before = before
        self._seen: set[int] = set()

    def visit(self, value: Any, path: str) -> None:
        if isinstance(value, _PLAIN):
            self._before[path] = value
        elif isinstance(value, Tensor):
            self._before[path] = (value, value._version)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            for name, child in _children(value):
                self.visit(child, f"{path}{name}")
            if type(value) in _SEQUENCES or isinstance(value, tuple | dict):
                self._before[f"{path}#"] = len(value)


def _children(value: Any) -> list[tuple[str, Any]]:
    """The parts of an object with their names."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", child) for key, child in value.items() if isinstance(key, str | int)]
    if isinstance(value, list | tuple | deque):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    attributes = _attributes(value)
    return [] if attributes is None else [(f".{name}", child) for name, child in attributes.items()]


class _Taker:
    """Collects what has changed."""

    def __init__(self, before: dict[str, Any]) -> None:
        self._before = before
        self._seen: set[int] = set()
        self._numbers: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}

    def visit(self, value: Any, path: str) -> dict[str, Any] | None:
        """What has changed in a value; None: nothing."""
        if isinstance(value, _PLAIN):
            before = self._before.get(path, _NOTHING)
            same = type(before) is type(value) and (before == value or (before != before and value != value))
            return None if same else {"value": value}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.Generator):
            return {"generator": self._keep(value, value.get_state()), "on": value.device.type}
        if id(value) in self._seen:
            return None
        self._seen.add(id(value))
        found = {name: self.visit(child, f"{path}{name}") for name, child in _children(value)}
        changed = {name: child for name, child in found.items() if child is not None}
        if isinstance(value, list | tuple | deque):
            kind = next((name for type_, name in _SEQUENCES.items() if isinstance(value, type_)), "list")
            if changed or self._before.get(f"{path}#") != len(value):
                return {kind: len(value), "parts": changed}
            return None
        if isinstance(value, dict):
            if changed or self._before.get(f"{path}#") != len(value):
                keys = [key for key in value if isinstance(key, str | int)]
                return {"dict": keys, "parts": changed}
            return None
        return {"object": type(value).__qualname__, "parts": changed} if changed else None

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any] | None:
        before = self._before.get(path)
        is_same = isinstance(before, tuple) and before[0] is value and before[1] == value._version
        is_data = value.dtype == torch.uint8 or (not value.is_floating_point() and value.numel() > SMALL)
        if is_same and is_data:
            return None
        return {"tensor": self._keep(value, value), "on": value.device.type}

    def _keep(self, value: Any, tensor: Tensor) -> str:
        """The number of a tensor; one that is met again has the same."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = number = str(len(self._numbers))
            self.tensors[number] = tensor.detach().to("cpu", copy=True).contiguous()
        return self._numbers[id(value)]


class _Restorer:
    """Writes changes into objects."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._made: dict[str, Tensor] = {}
        self._generators: dict[str, torch.Generator] = {}

    def load(self, value: Any, change: Mapping[str, Any], path: str) -> Any:
        """The value as it was: the same object, changed, where that is possible."""
        try:
            if "value" in change:
                return change["value"]
            if "tensor" in change:
                return self._tensor(value, change)
            if "generator" in change:
                return self._generator(value, change)
            if "dict" in change:
                return self._dict(value, change, path)
            if "object" in change:
                return self._object(value, change, path)
            return self._sequence(value, change, path)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise RatpError(f"the checkpoint does not fit at {path.lstrip('.') or 'its root'} ({error!r}).") from error

    def _tensor(self, value: Any, change: Mapping[str, Any]) -> Tensor:
        number = change["tensor"]
        if number not in self._made:
            kept = self._tensors[number]
            if isinstance(value, Tensor) and value.shape == kept.shape and value.dtype == kept.dtype:
                if not torch.equal(value.cpu(), kept):  # what may be shared, or only read, is not written to in vain
                    value.data.copy_(kept)
                self._made[number] = value
            else:
                self._made[number] = kept.to(self._place(value, change["on"]))
        return self._made[number]

    def _generator(self, value: Any, change: Mapping[str, Any]) -> torch.Generator:
        number = change["generator"]
        if number not in self._generators:
            found = value if isinstance(value, torch.Generator) else torch.Generator(self._place(None, change["on"]))
            found.set_state(self._tensors[number])
            self._generators[number] = found
        return self._generators[number]

    def _place(self, value: Any, kind: str) -> torch.device:
        if isinstance(value, Tensor):
            return value.device
        return CPU if kind == "cpu" else self._device

    def _object(self, value: Any, change: Mapping[str, Any], path: str) -> Any:
        if _attributes(value) is None or type(value).__qualname__ != change["object"]:
            raise TypeError(f"there is no {change['object']}, but {type(value).__qualname__}")
        attributes = vars(value)
        for name, part in change["parts"].items():
            before = attributes.get(name[1:], _NOTHING)
            after = self.load(None if before is _NOTHING else before, part, f"{path}{name}")
            if after is not before:
                attributes[name[1:]] = after
        return value

    def _dict(self, value: Any, change: Mapping[str, Any], path: str) -> dict[Any, Any]:
        found: dict[Any, Any] = value if isinstance(value, dict) else {}
        for key in change["dict"]:
            part = change["parts"].get(f"[{key!r}]")
            if part is not None:
                found[key] = self.load(found.get(key), part, f"{path}[{key!r}]")
        for key in [key for key in found if isinstance(key, str | int) and key not in change["dict"]]:
            del found[key]
        return found

    def _sequence(self, value: Any, change: Mapping[str, Any], path: str) -> Any:
        (kind,) = (kind for kind in _SEQUENCES.values() if kind in change)
        there = list(value) if isinstance(value, list | tuple | deque) else []
        after = [
            self.load(there[k] if k < len(there) else None, change["parts"][f"[{k}]"], f"{path}[{k}]")
            if f"[{k}]" in change["parts"]
            else there[k]
            for k in range(change[kind])
        ]
        if kind == "tuple":
            return type(value)._make(after) if hasattr(type(value), "_make") else tuple(after)
        if isinstance(value, list):
            value[:] = after
            return value
        return after if kind == "list" else deque(after, maxlen=getattr(value, "maxlen", None))
