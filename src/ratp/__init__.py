"""ratp: continual domain shift learning.

Train on one labelled source domain, then adapt to unlabelled target domains one after another.
"""

from __future__ import annotations

import os
import sys

__version__ = "0.1.0"

# Makes torch's waiting threads sleep early instead of spinning, which saves most of the time while other programs run
# and changes no number. OpenMP reads the variable when torch is loaded, and child processes inherit it.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Has the processor compute what torch cannot on an Apple GPU. Torch reads this variable, too, when it is loaded.
if sys.platform == "darwin" and "torch" not in sys.modules:
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")


def _check_platform() -> None:
    """Raises an ImportError where files cannot be locked, as on Windows."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        raise ImportError("ratp runs on Linux and macOS; on Windows, use WSL.") from None


TYPE_CHECKING = False
if TYPE_CHECKING:
    from ratp.api.fit import fit as fit
    from ratp.api.loss import loss_method as loss_method
    from ratp.api.result import FitResult as FitResult
    from ratp.api.result import RollbackWarning as RollbackWarning
    from ratp.config import switch as switch
    from ratp.data.domain import LabelledDomain as LabelledDomain
    from ratp.data.domain import UnlabelledDomain as UnlabelledDomain
    from ratp.deploy.deployment import Deployment as Deployment
    from ratp.deploy.export import export as export
    from ratp.errors import ConfigError as ConfigError
    from ratp.errors import RatpError as RatpError
    from ratp.errors import RunDirectoryError as RunDirectoryError
    from ratp.errors import TrainingError as TrainingError
    from ratp.evaluation.accuracy import accuracy as accuracy
    from ratp.evaluation.matrix import Matrix as Matrix
    from ratp.functional.optim import SGDConfig as SGDConfig
    from ratp.functional.optim import StageSGD as StageSGD
    from ratp.networks.adopted import adopt as adopt
    from ratp.networks.backbones import register_backbone as register_backbone
    from ratp.networks.network import Network as Network
    from ratp.runs.load import LoadedRun as LoadedRun
    from ratp.runs.load import load as load
    from ratp.runs.plan import RunPlan as RunPlan
    from ratp.runs.plan import resolve as resolve
    from ratp.runs.record import RunRecord as RunRecord
    from ratp.runs.record import read_run as read_run
    from ratp.runs.request import RunRequest as RunRequest
    from ratp.runs.run import Run as Run
    from ratp.runs.track import track as track
    from ratp.streams.own import own_stream as own_stream
    from ratp.streams.stream import DataOptions as DataOptions
    from ratp.streams.stream import Stream as Stream
    from ratp.training.memory import Batch as Batch
    from ratp.training.memory import Batches as Batches
    from ratp.training.memory import Memory as Memory
    from ratp.training.method import Method as Method
    from ratp.training.method import OnlineMethod as OnlineMethod
    from ratp.training.method import Setting as Setting
    from ratp.training.method import pack as pack
    from ratp.training.method import unpack as unpack
    from ratp.training.phase import Phase as Phase
    from ratp.training.phases import NetworkMethod as NetworkMethod
    from ratp.training.phases import NetworkPhase as NetworkPhase
    from ratp.training.phases import SupervisedPhase as SupervisedPhase
    from ratp.training.recipe import classify as classify

# The public names and their modules, loaded on first use, so that the command line starts without torch.
_MODULES = {
    "Batch": "training.memory",
    "Batches": "training.memory",
    "ConfigError": "errors",
    "DataOptions": "streams.stream",
    "Deployment": "deploy.deployment",
    "FitResult": "api.result",
    "LabelledDomain": "data.domain",
    "LoadedRun": "runs.load",
    "Matrix": "evaluation.matrix",
    "Memory": "training.memory",
    "Method": "training.method",
    "Network": "networks.network",
    "NetworkMethod": "training.phases",
    "NetworkPhase": "training.phases",
    "OnlineMethod": "training.method",
    "Phase": "training.phase",
    "RatpError": "errors",
    "RollbackWarning": "api.result",
    "Run": "runs.run",
    "RunDirectoryError": "errors",
    "RunPlan": "runs.plan",
    "RunRecord": "runs.record",
    "RunRequest": "runs.request",
    "SGDConfig": "functional.optim",
    "Setting": "training.method",
    "StageSGD": "functional.optim",
    "Stream": "streams.stream",
    "SupervisedPhase": "training.phases",
    "TrainingError": "errors",
    "UnlabelledDomain": "data.domain",
    "accuracy": "evaluation.accuracy",
    "adopt": "networks.adopted",
    "classify": "training.recipe",
    "export": "deploy.export",
    "fit": "api.fit",
    "load": "runs.load",
    "loss_method": "api.loss",
    "own_stream": "streams.own",
    "pack": "training.method",
    "read_run": "runs.record",
    "register_backbone": "networks.backbones",
    "resolve": "runs.plan",
    "switch": "config",
    "track": "runs.track",
    "unpack": "training.method",
}
__all__ = sorted([*_MODULES, "__version__"])

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module 'ratp' has no attribute {name!r}")
        _check_platform()
        return getattr(import_module(f"ratp.{_MODULES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
