"""ratp: continual domain shift learning.

Train on one labelled source domain, then meet unlabelled target domains one after another.
"""

from __future__ import annotations

from ratp.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ratp.domain import LabelledDomain, UnlabelledDomain
    from ratp.errors import ConfigError, RatpError
    from ratp.evaluate import accuracy
    from ratp.matrix import Matrix
    from ratp.memory import Memory
    from ratp.method import Method, Phase, Setting
    from ratp.network import Network
    from ratp.plan import RunRequest, resolve
    from ratp.record import RunRecord, read_run
    from ratp.run import Run
    from ratp.stream import DataOptions, Stream

__all__ = [
    "ConfigError",
    "DataOptions",
    "LabelledDomain",
    "Matrix",
    "Memory",
    "Method",
    "Network",
    "Phase",
    "RatpError",
    "Run",
    "RunRecord",
    "RunRequest",
    "Setting",
    "Stream",
    "UnlabelledDomain",
    "__version__",
    "accuracy",
    "read_run",
    "resolve",
]

# Loaded when first asked for: the command line has something to do before torch is there.
_HOMES = {
    "domain": ("LabelledDomain", "UnlabelledDomain"),
    "errors": ("ConfigError", "RatpError"),
    "evaluate": ("accuracy",),
    "matrix": ("Matrix",),
    "memory": ("Memory",),
    "method": ("Method", "Phase", "Setting"),
    "network": ("Network",),
    "plan": ("RunRequest", "resolve"),
    "record": ("RunRecord", "read_run"),
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
