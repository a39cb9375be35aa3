"""ratp: continual domain shift learning.

Train on one labelled source domain, then meet unlabelled target domains one after another.
"""

from __future__ import annotations

import os
import sys

from ratp.version import __version__

# Threads of torch's that wait for one another soon sleep instead of spinning: beside other programs that saves most of
# the time, and no number changes. It is read when torch is loaded, and by the processes that are started from here.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ratp.config import switch
    from ratp.domain import LabelledDomain, UnlabelledDomain
    from ratp.errors import ConfigError, RatpError, RunDirectoryError, TrainingError
    from ratp.evaluate import accuracy
    from ratp.inference import classify
    from ratp.loaded import LoadedRun, load
    from ratp.matrix import Matrix
    from ratp.memory import Memory
    from ratp.method import Method, Setting, pack, unpack
    from ratp.network import Network
    from ratp.phase import Phase
    from ratp.plan import RunPlan, resolve
    from ratp.record import RunRecord, read_run
    from ratp.request import RunRequest
    from ratp.run import Run
    from ratp.stream import DataOptions, Stream

__all__ = [
    "ConfigError",
    "DataOptions",
    "LabelledDomain",
    "LoadedRun",
    "Matrix",
    "Memory",
    "Method",
    "Network",
    "Phase",
    "RatpError",
    "Run",
    "RunDirectoryError",
    "RunPlan",
    "RunRecord",
    "RunRequest",
    "Setting",
    "Stream",
    "TrainingError",
    "UnlabelledDomain",
    "__version__",
    "accuracy",
    "classify",
    "load",
    "pack",
    "read_run",
    "resolve",
    "switch",
    "unpack",
]

# Loaded when first asked for: the command line has something to do before torch is there.
_HOMES = {
    "config": ("switch",),
    "domain": ("LabelledDomain", "UnlabelledDomain"),
    "errors": ("ConfigError", "RatpError", "RunDirectoryError", "TrainingError"),
    "evaluate": ("accuracy",),
    "inference": ("classify",),
    "loaded": ("LoadedRun", "load"),
    "matrix": ("Matrix",),
    "memory": ("Memory",),
    "method": ("Method", "Setting", "pack", "unpack"),
    "network": ("Network",),
    "phase": ("Phase",),
    "plan": ("RunPlan", "resolve"),
    "record": ("RunRecord", "read_run"),
    "request": ("RunRequest",),
    "run": ("Run",),
    "stream": ("DataOptions", "Stream"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"ratp.{home}"), name)
        raise AttributeError(f"module 'ratp' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
