"""What a run was computed with."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ratp.precision import Precision
from ratp.version import __version__

# Of these no result depends: the one is said by others, the other only limits them.
_IDLE = ("determinism", "cores")
PACKAGES = ("torch", "torchvision", "numpy", "pillow", "scikit-learn", "matplotlib", "safetensors")


def describe_environment(device: torch.device, precision: Precision = "fp32") -> dict[str, Any]:
    """Versions, machine and device, as ``environment.json`` keeps them."""
    return {
        "ratp": __version__,
        "code": code_hash()[:12],
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: package_version(name) for name in PACKAGES},
        "device": device.type,  # which of several alike makes no difference
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "precision": precision,
        "determinism": "bitwise on one machine" if device.type == "cpu" else "within the seed spread",
    }


@cache
def code_hash() -> str:
    """The hash of all code of this package: what a version is between releases."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What differs between two environments, so far as a result may depend on it: both values, by name.

    Of code a hash was not always kept: where there is none, nothing is known to differ. Which of several GPUs it was
    was kept once, and makes no difference.
    """
    old, new = _flat({"code": now.get("code"), **before}), _flat(now)
    if "device" in old:
        old["device"] = str(old["device"]).partition(":")[0]
    return {name: [old.get(name), value] for name, value in new.items() if old.get(name) != value}


def _flat(environment: Mapping[str, Any]) -> dict[str, Any]:
    packages = environment.get("packages")
    rest = {name: value for name, value in environment.items() if name not in ("packages", *_IDLE)}
    return rest | (packages if isinstance(packages, dict) else {})


def package_version(name: str) -> str | None:
    """Installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """What the device is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
