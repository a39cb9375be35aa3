"""The methods, each in one file with the mathematics that it alone needs; `shared` has what a family of them shares.

This module is their registry: the built-in ones by name, and any Python file that defines one. Listing the methods
imports none of them, and so no torch: a class is loaded on first use, and :func:`describe` reads its source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ratp.errors import ConfigError, unknown

if TYPE_CHECKING:
    from ratp.training.method import Method

# To add a method, add its line: name, module and class.
_HOMES = {
    "ratp": ("ratp", "RaTP"),
    "arc": ("arc", "ARC"),
    "source-only": ("source_only", "SourceOnly"),
    "oracle": ("oracle", "Oracle"),
    "shot": ("shot", "SHOT"),
    "shot+": ("shot_plus", "SHOTPlus"),
    "shot++": ("shot_plus_plus", "SHOTPlusPlus"),
    "gsfda": ("gsfda", "GSFDA"),
    "bmd": ("bmd", "BMD"),
    "aucid": ("aucid", "AuCID"),
    "snr": ("snr", "SNR"),
    "pcl": ("pcl", "PCL"),
    "efdm": ("efdm", "EFDM"),
    "l2d": ("l2d", "L2D"),
    "pden": ("pden", "PDEN"),
    "adabn": ("adabn", "AdaBN"),
    "tent": ("tent", "Tent"),
    "t3a": ("t3a", "T3A"),
    "eata": ("eata", "EATA"),
    "cotta": ("cotta", "CoTTA"),
    "adacon": ("adacontrast", "AdaContrast"),
    "codag": ("codag", "CoDAG"),
    "mpm": ("mpm", "MPM"),
    "sar": ("sar", "SAR"),
    "rmt": ("rmt", "RMT"),
    "roid": ("roid", "ROID"),
    "deyo": ("deyo", "DeYO"),
}


class _Registry(Mapping[str, "type[Method]"]):
    """The built-in methods by name; a class is imported on first use."""

    def __getitem__(self, name: str) -> type[Method]:
        module, class_name = _HOMES[name]
        method: type[Method] = getattr(import_module(f"{__name__}.{module}"), class_name)
        return method

    def __contains__(self, name: object) -> bool:
        return name in _HOMES

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


METHODS: Mapping[str, type[Method]] = _Registry()


class Description(NamedTuple):
    """The descriptive attributes of a method's class; see :class:`ratp.training.method.Method`."""

    name: str
    title: str
    family: str
    paper: str
    needs: str = ""


def describe(name: str) -> Description:
    """Describes a built-in method without importing it."""
    module, class_name = _HOMES[name]
    source = resources.files(__name__).joinpath(f"{module}.py").read_text(encoding="utf-8")
    (definition,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == class_name)
    attributes = {}
    for node in definition.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            attributes[node.targets[0].id] = node.value
    return Description(**{key: ast.literal_eval(attributes[key]) for key in Description._fields if key in attributes})


def find_method(name: str) -> type[Method]:
    """Returns the method called ``name``, or the one defined in the Python file ``name``."""
    if name in METHODS:
        return METHODS[name]
    if name.endswith(".py"):
        from ratp.methods.custom import from_file

        method = from_file(Path(name))
        if method.name in METHODS:
            raise ConfigError(f"the method in {name!r} has the name of a built-in one, {method.name!r}: rename it.")
        return method
    raise ConfigError(unknown("method", name, METHODS) + " Or give the path of a .py file that defines one.")
