"""The process and machine of a run: device, precision, warnings, randomness and versions.

======  ==========================================================================================
fp32    everything in single precision
tf32    convolutions and the bottleneck's wide layer multiply with 10 bits of mantissa
bf16    the feature extractor works in bfloat16; bottleneck, classifier, losses, labels and all
        statistics stay in single precision
======  ==========================================================================================
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from ratp import __version__
from ratp.errors import ConfigError, unknown

if TYPE_CHECKING:
    import torch


DEVICES = ("auto", "cpu", "cuda", "mps")
Precision = Literal["fp32", "tf32", "bf16"]
_FIRST_WITH_TF32 = (8, 0)
_lock = Lock()
_requested: Precision = "tf32"  # torch's default
_exact = 0


def find_device(name: str) -> torch.device:
    """Returns the device called ``name``; ``auto`` is an NVIDIA GPU if there is one, and never an Apple GPU."""
    if name.partition(":")[0] not in DEVICES:
        raise _unknown_device(name)
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _unknown_device(name) from error
    available = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= available:
        raise ConfigError(f"device {name!r} is not available: {available} CUDA device(s) found. Use cpu or auto.")
    if device.type == "mps" and (device.index or not torch.backends.mps.is_available()):
        raise ConfigError(f"device {name!r} is not available: {_apple_gpus()}")
    return device


def _apple_gpus() -> str:
    """Says which device to use instead of an Apple GPU that is not there."""
    import torch

    if torch.backends.mps.is_available():
        return "a Mac has one GPU. Use mps."
    if platform.system() == "Darwin" and not torch.backends.mps.is_built():
        return f"torch {torch.__version__} was built without support for Apple GPUs. Install another, or use cpu."
    return "no Apple GPU found. Use cpu or auto."


def _unknown_device(name: str) -> ConfigError:
    is_gpu = name.lower().startswith("gpu")  # which looks most like "cpu"
    meant = f"unknown device {name!r}. Did you mean 'cuda'? Valid: {', '.join(DEVICES)}." if is_gpu else ""
    return ConfigError(meant or unknown("device", name, DEVICES))


def find_precision(requested: str, device: torch.device) -> Precision:
    """Returns the requested precision, or fp32 where the device has no other; ``auto`` prefers tf32."""
    import torch

    names = get_args(Precision)
    if requested not in (*names, "auto"):
        raise ConfigError(unknown("precision", requested, ("auto", *names)))
    if device.type == "cpu" and requested == "bf16" and _multiplies_bf16():
        return "bf16"
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_TF32
    if requested == "fp32" or not has_tf32:  # a GPU has both tf32 and bf16 or neither
        return "fp32"
    return "tf32" if requested == "auto" else cast(Precision, requested)


def _multiplies_bf16() -> bool:
    """Whether this CPU has instructions for bf16; without them bf16 is slower than fp32."""
    import torch

    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check, bool)() for check in checks)


def use_precision(precision: Precision) -> None:
    """Sets how all convolutions of this process multiply; torch has no such setting per network."""
    global _requested
    with _lock:
        _requested = precision
        _apply_precision()


@contextmanager
def single_precision() -> Iterator[None]:
    """Keeps all convolutions of this process in fp32 within the block, whatever other threads request.

    Meanwhile, other runs compute at least as precisely as requested.
    """
    global _exact
    with _lock:
        _exact += 1
        _apply_precision()
    try:
        yield
    finally:
        with _lock:
            _exact -= 1
            _apply_precision()


def _apply_precision() -> None:
    import torch

    torch.backends.cudnn.allow_tf32 = _requested != "fp32" and not _exact


class SharedContext:
    """A process-wide change that several threads may enter: the first applies it, the last undoes it.

    Args:
        change: Applies the change and registers with the stack how to undo it.
    """

    def __init__(self, change: Callable[[ExitStack], None]) -> None:
        self._change, self._lock = change, Lock()
        self._inside, self._undo = 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                with ExitStack() as undo:
                    self._change(undo)
                    self._undo = undo.pop_all()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._undo.close()


def _silence(undo: ExitStack) -> None:
    undo.enter_context(warnings.catch_warnings())
    for kind in (UserWarning, DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="PIL")


# Silences warnings of libraries about the contents of a file; our own notes still appear.
quietly = SharedContext(_silence)


_IRRELEVANT = ("determinism", "cores")  # no result depends on these entries
PACKAGES = ("torch", "torchvision", "numpy", "pillow", "scikit-learn", "matplotlib", "safetensors")


def describe_environment(device: torch.device, precision: Precision = "fp32") -> dict[str, Any]:
    """Collects versions, machine and device, as ``environment.json`` stores them."""
    import torch

    return {
        "ratp": __version__,
        "code": code_hash()[:12],
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: package_version(name) for name in PACKAGES},
        "device": device.type,  # which of several identical GPUs makes no difference
        "device_name": device_name(device),
        "instructions": torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else None,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "precision": precision,
        "determinism": "bitwise on one machine" if device.type == "cpu" else "within the seed spread",
    }


@cache
def code_hash() -> str:
    """Hashes all code of this package, which identifies a version between releases."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Compares two environments: both values, by name, of every entry that a result may depend on.

    Old files may lack the code hash and the processor's name and instructions, which then count as equal, and may name
    one of several GPUs, which is ignored.
    """
    known_by = {name: now.get(name) for name in ("code", "instructions")}
    old, new = _flat({**known_by, **before}), _flat(now)
    if "device" in old:
        old["device"] = str(old["device"]).partition(":")[0]
    if "instructions" not in before and old.get("device") == new.get("device") == "cpu":
        old["device_name"] = new.get("device_name")
    return {name: [old.get(name), value] for name, value in new.items() if old.get(name) != value}


def _flat(environment: Mapping[str, Any]) -> dict[str, Any]:
    packages = environment.get("packages")
    rest = {name: value for name, value in environment.items() if name not in ("packages", *_IRRELEVANT)}
    return rest | (packages if isinstance(packages, dict) else {})


def check_installed(modules: Sequence[str], what: str, command: str) -> None:
    """Raises a ConfigError with the command that installs what is missing, without importing anything."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}, which is not installed: {command}")


def package_version(name: str) -> str | None:
    """Returns the installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU or the processor."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        import torch

        return f"{torch.backends.mps.get_name()}, GPU"
    return _processor_name()


@cache
def _processor_name() -> str:
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:  # Linux only
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Counts the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# All threads share torch's global generator.
_GLOBAL_GENERATOR = threading.RLock()


@dataclass(frozen=True)
class Randomness:
    """The seed of a run and the generators derived from it."""

    seed: int

    def derive(self, *name: str | int) -> int:
        """Derives a 63-bit seed for the purpose called ``name``."""
        digest = hashlib.blake2b(repr((self.seed, *name)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def generator(self, *name: str | int, device: torch.device | str = "cpu") -> torch.Generator:
        """Makes a fresh generator for the purpose called ``name``."""
        import torch

        return torch.Generator(device=device).manual_seed(self.derive(*name))

    @contextmanager
    def scope(self, *name: str | int) -> Iterator[None]:
        """Seeds torch's global CPU generator within the block and restores it afterwards.

        For code that accepts no generator, such as the initialisation of library modules. Only one thread at a time
        may be inside.
        """
        import torch

        with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.derive(*name))
            yield


def find_devices(names: str, precision: str = "auto") -> tuple[torch.device, ...]:
    """Returns the requested devices, if there are several.

    Args:
        names: Devices separated by commas, repeats allowed; ``auto`` or ``cuda`` alone means all GPUs that compute in
            the precision of the first.
        precision: The requested precision.

    Returns:
        The devices; empty for a single one, which is in the plan.

    Raises:
        ConfigError: If a device does not exist, or they differ in precision.
    """
    if "," not in names:
        return _all_gpus(precision) if names in ("auto", "cuda") else ()
    devices: list[torch.device] = []
    problems: list[str] = []
    for name in names.split(","):
        try:
            devices.append(_one_of_several(name.strip(), names))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    precisions = {find_precision(precision, device): device for device in devices}
    if len(precisions) > 1:
        differing = " and ".join(f"{device} in {name}" for name, device in precisions.items())
        raise ConfigError(f"the devices differ, {differing}: choose some of a kind, or --precision fp32.")
    return tuple(devices)


def _one_of_several(name: str, names: str) -> torch.device:
    if name in ("", "auto"):
        what = "auto" if name else "an empty place"
        raise ConfigError(f"the devices {names!r} have {what} among them: name every one, e.g. cuda:0,cuda:1.")
    device = find_device(name)
    if device.type == "mps":
        raise ConfigError(f"an Apple GPU takes one run at a time: use --device {name} alone.")
    return device


def _all_gpus(precision: str) -> tuple[torch.device, ...]:
    """Returns all GPUs with the same precision as the first, if there are several."""
    import torch

    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    alike = [gpu for gpu in gpus if find_precision(precision, gpu) == find_precision(precision, gpus[0])]
    return tuple(alike) if len(alike) > 1 else ()
