"""ratp: continual domain shift learning.

Train on one labelled source domain, then meet unlabelled target domains one after another.
"""

from __future__ import annotations

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
from ratp.streams import load_stream
from ratp.version import __version__

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
    "load_stream",
    "read_run",
    "resolve",
]
