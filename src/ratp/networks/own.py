"""Backbones of a user's own: a module, or a class or function that builds one.

A run records such a backbone as ``PLACE:NAME#DIGEST``, e.g. ``my_net:TinyNet#0f3a…``: where it was defined, and a hash
of its layers and the shapes of its tensors. An adopted classifier of a user's own becomes a backbone without its head:
``my_net:Classifier without fc#0f3a…``. Its code is never searched for or imported: the user passes the backbone again,
or imports what defines it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ratp._core.environment import Randomness
from ratp._core.files import hash_of
from ratp._core.user_code import load_file, split_file
from ratp.errors import ConfigError, RatpError, unknown
from ratp.networks.backbones import REGISTRY, Backbone, ChannelDropout, ElementDropout
from ratp.networks.weights import Weights

# A module, a class or function that builds one, or FILE.py:NAME of either.
Given = nn.Module | Callable[[], nn.Module] | str
_MARK, _WITHOUT = "#", " without "
_DIGITS = 12  # of a digest


@dataclass(frozen=True)
class OwnBackbone:
    """A registered backbone.

    Attributes:
        name: Its name in the registry and in ``config.json``.
        weights: Initial weights, if a module was given; None: those that its class or function draws.
    """

    name: str
    weights: Weights | None


def register_own(given: Given, recorded: str | None = None, *, head: str | None = None) -> OwnBackbone:
    """Registers a backbone of the user's own, under its name.

    Args:
        given: The backbone; a file is run, because the user names it.
        recorded: Its name in a run; refused if the backbone is another one.
        head: Name of the layer to take off, if it is a whole classifier.
    """
    if recorded is not None:
        head = plain_name(recorded).partition(_WITHOUT)[2] or None
    backbone, place = _find(given)
    with Randomness(0).scope("backbone"):
        module = _built(backbone, place)
    is_module = module is backbone
    kept = _without(deepcopy(module).cpu() if is_module else module, head)  # the user's own module stays as it is
    digest = None if kept is None else _digest(kept)
    if recorded is not None and recorded.rpartition(_MARK)[2] != digest:
        raise RatpError(
            f"the network was trained with {plain_name(recorded)}, and the one given has other layers or shapes "
            f"({place}). Give it as it was."
        )
    assert kept is not None
    name = recorded or f"{place}{f'{_WITHOUT}{head}' if head else ''}{_MARK}{digest}"

    def build() -> nn.Module:
        built = deepcopy(kept) if is_module else _without(_built(backbone, place), head)
        assert built is not None
        return _with_own_dropout(built)

    REGISTRY[name] = Backbone(build)
    tensors = dict(kept.state_dict())
    return OwnBackbone(name, Weights(plain_name(name), hash_of(tensors), tensors) if is_module else None)


def build_own(given: Given) -> nn.Module:
    """Builds what the user gave; a file is run, because the user names it."""
    with Randomness(0).scope("backbone"):
        return _built(*_find(given))


def plain_name(recorded: str) -> str:
    """Returns the name of a backbone without its digest."""
    return recorded.rpartition(_MARK)[0] or recorded


def find_own(owner: Path | str, recorded: str, given: Given | None) -> None:
    """Registers the own backbone of a run or file; refuses if it is needed and not given, or the other way round."""
    if given is None and (problem := _describe_missing(recorded)):
        raise ConfigError(f"{owner} {problem}")
    if given is not None and plain_name(recorded) == recorded:
        raise ConfigError(f"{owner} has the backbone {recorded}, which needs none of your own: leave it out.")
    if given is not None:
        register_own(given, recorded)


def _describe_missing(recorded: str) -> str | None:
    """Says what to do if a run's own backbone is not registered; None if the name is not that of an own backbone."""
    place, _, name = plain_name(recorded).partition(_WITHOUT)[0].rpartition(":")
    if _MARK not in recorded or recorded in REGISTRY:
        return None
    if place.endswith(".py"):
        how = f"Give its file, whose code then runs: --backbone {place}:{name}, in Python backbone='{place}:{name}'"
    elif place == "__main__" or "<" in name:
        how = (
            f"It was defined in {'a script or notebook' if place == '__main__' else 'a function'}: build it again in "
            "the same way and pass it: ratp.load(path, backbone=…)"
        )
    else:
        top = name.partition(".")[0]
        how = f"Import it and pass it: from {place} import {top}; ratp.load(path, backbone={name})"
    return f"has a backbone of your own, {place}:{name}. ratp never imports it by itself. {how}"


def _find(given: Given) -> tuple[Any, str]:
    """Returns what was given, loaded if it is in a file, and where it was defined."""
    if isinstance(given, str):
        found = split_file(given)
        if found is None:
            raise ConfigError(f"{given!r} is no backbone of your own: give FILE.py:NAME, e.g. my_net.py:TinyNet.")
        path, name = found
        module = load_file(path, "backbone")
        if name not in vars(module):
            raise ConfigError(unknown(f"name in {path}:", name, [n for n in vars(module) if not n.startswith("_")]))
        return vars(module)[name], f"{path.name}:{name}"
    kind = type(given) if isinstance(given, nn.Module) else given
    if not callable(given):
        raise ConfigError(
            "a backbone must be a name, a module, or a class or function that builds one, got "
            f"{type(given).__name__}: {given!r}."
        )
    name = getattr(kind, "__qualname__", type(kind).__name__)
    return given, f"{getattr(kind, '__module__', '__main__')}:{name}"


def _built(backbone: Any, place: str) -> nn.Module:
    """Returns the module itself, or builds one with torch's present random numbers."""
    if isinstance(backbone, nn.Module):
        module = backbone
    else:
        try:
            module = backbone()
        except Exception as error:  # of any kind: the code is the user's
            raise ConfigError(
                f"the backbone {place} cannot be built: {type(error).__name__}: {error}. Give a module, or a class or "
                "function without arguments, e.g. lambda: TinyNet(64)."
            ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"the backbone {place} must build an nn.Module, got {type(module).__name__}.")
    if any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigError(f"the backbone {place} has lazy layers: run it once on an image before you pass it.")
    return module


def _without(module: nn.Module, head: str | None) -> nn.Module | None:
    """Replaces a layer by the identity, in place; None if there is no such layer."""
    if head is not None:
        if head not in dict(module.named_modules()):
            return None
        module.set_submodule(head, nn.Identity())
    return module


def _digest(module: nn.Module) -> str:
    """Hashes the layers of a module, and names, types and shapes of its tensors."""
    tensors = sorted((name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in module.state_dict().items())
    return hashlib.sha256(repr((str(module), tensors)).encode()).hexdigest()[:_DIGITS]


def _with_own_dropout(module: nn.Module) -> nn.Module:
    """Replaces torch's dropout by layers that draw from the run's generators, so that the run can be repeated."""
    for name, layer in module.named_children():
        if type(layer) is nn.Dropout:
            setattr(module, name, ElementDropout(layer.p).train(layer.training))
        elif type(layer) is nn.Dropout2d:
            setattr(module, name, ChannelDropout(layer.p).train(layer.training))
        else:
            _with_own_dropout(layer)
    return module
