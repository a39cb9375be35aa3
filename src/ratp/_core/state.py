"""State by name: what an object saves in the middle of its work and restores in place.

A class lists the attributes that change while it works and that it cannot compute again:

    class Average(Stateful):
        saved = "_values count"

Such an attribute holds a tensor, a generator, a module, a number, a text or None, anything with ``state_dict`` and
``load_state_dict``, or lists and dicts of these. Files hold only values; code creates the objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ratp.errors import RatpError

# Tensors, numbers, texts and None, and lists and dicts of these.
State = dict[str, Any]
_PLAIN = bool, int, float, str, type(None)
# Keys that represent a tensor, and a dict whose keys are not all strings, in plain data.
_TENSOR, _ITEMS = "@tensor", "@items"


class StateError(RatpError):
    """A state cannot be saved, or does not fit the object that should restore it."""


class Stateful:
    """Saves and restores attributes.

    Attributes that do not exist yet are left out. On disk, names have no leading underscore.

    Attributes:
        saved: Names of the attributes, separated by spaces; those of base classes are added.
    """

    saved: ClassVar[str] = ""

    def state_dict(self) -> State:
        """The state of every saved attribute, by name.

        Raises:
            StateError: If one of them has none.
        """
        state = {}
        for name in _saved_names(type(self)):
            if hasattr(self, name):
                try:
                    state[name.lstrip("_")] = save(getattr(self, name))
                except StateError as error:
                    raise StateError(f"{type(self).__name__}.{name}: {error}") from error
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned, in place where possible.

        Raises:
            StateError: If it does not fit.
        """
        names = {name.lstrip("_"): name for name in _saved_names(type(self))}
        expected = {name for name, attribute in names.items() if hasattr(self, attribute)}
        if odd := sorted((state.keys() - names.keys()) | (expected - state.keys())):
            raise StateError(f"{type(self).__name__}: {', '.join(odd)} is saved or expected, but not both")
        for name, saved in state.items():
            try:
                setattr(self, names[name], restore(getattr(self, names[name], None), saved))
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise StateError(f"{type(self).__name__}.{name}: {error!r}") from error


def save(value: Any) -> Any:
    """The state of a value. Tensors are not copied."""
    if isinstance(value, (Tensor, *_PLAIN)):
        return value
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, nn.Module):
        return {"tensors": dict(value.state_dict()), **save_modes(value)}
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    if isinstance(value, list | tuple):
        return [save(item) for item in value]
    if isinstance(value, dict):
        return {key: save(item) for key, item in value.items()}
    raise StateError(f"an object of type {type(value).__name__} needs state_dict and load_state_dict to be saved")


def restore(value: Any, saved: Any) -> Any:
    """Restores a value from its saved state, in place where possible."""
    if value is None or saved is None or isinstance(value, _PLAIN):
        return saved
    if isinstance(value, Tensor):
        if value.shape != saved.shape or value.dtype != saved.dtype:
            return saved
        if not torch.equal(value, saved):  # avoids needless writes to shared or read-only memory
            value.data.copy_(saved)
    elif isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(value, nn.Module):
        value.load_state_dict(saved["tensors"])
        load_modes(value, saved)
    elif isinstance(value, list | tuple):
        there = [*value, *[None] * len(saved)]
        items = [restore(item, part) for item, part in zip(there, saved, strict=False)]
        return tuple(items) if isinstance(value, tuple) else items
    elif isinstance(value, dict):
        return {key: restore(value.get(key), part) for key, part in saved.items()}
    else:
        value.load_state_dict(saved)
    return value


def save_modes(module: nn.Module) -> State:
    """Which layers of a module are in training mode, and the generators they draw from."""
    return {
        "training": "".join(str(int(layer.training)) for layer in module.modules()),
        "generators": [generator.get_state() for generator in _generators(module)],
    }


def load_modes(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Restores what :func:`save_modes` returned; generators only if as many are bound now.

    After a restart, a generator that an earlier stage left bound no longer exists, but nothing uses it either.

    Raises:
        ValueError: If the module has other layers.
    """
    for layer, training in zip(module.modules(), saved["training"], strict=True):
        layer.training = training == "1"
    bound = _generators(module)
    if len(bound) == len(saved["generators"]):
        for generator, state in zip(bound, saved["generators"], strict=True):
            generator.set_state(state)


def _generators(module: nn.Module) -> list[torch.Generator]:
    found = [getattr(layer, "generator", None) for layer in module.modules()]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _saved_names(kind: type) -> list[str]:
    names: list[str] = []
    for base in reversed(kind.__mro__):
        names += vars(base).get("saved", "").split()
    return list(dict.fromkeys(names))


def split_tensors(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Splits a state into plain data and its tensors by name; tensors that share all their memory are kept once."""
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
            if key not in names or not value.numel():
                names[key] = path if path not in tensors else f"{path} ({len(tensors)})"
                tensors[names[key]] = value
            return {_TENSOR: names[key], "on": value.device.type}
        if isinstance(value, Mapping):
            items = [[name, plain(item, f"{path}.{name}".lstrip("."))] for name, item in value.items()]
            return dict(items) if all(isinstance(name, str) for name in value) else {_ITEMS: items}
        if isinstance(value, list | tuple):
            return [plain(item, f"{path}.{index}") for index, item in enumerate(value)]
        return value

    return plain(state, ""), tensors


def join_tensors(packed: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """The state that :func:`split_tensors` split; tensors that were on a GPU go to ``device``."""
    if isinstance(packed, list):
        return [join_tensors(item, tensors, device) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if _TENSOR in packed:
        tensor = tensors[packed[_TENSOR]]
        return tensor if packed["on"] == "cpu" else tensor.to(device)
    return {name: join_tensors(item, tensors, device) for name, item in packed.get(_ITEMS, packed.items())}
