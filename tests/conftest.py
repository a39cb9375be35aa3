"""Settings shared by all tests."""

import os
import signal
from contextlib import nullcontext

import pytest
import torch
from hypothesis import settings

# A program started in the background ignores Ctrl-C, and so would the tests that send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Kernels run through Triton's interpreter where there is no GPU; Triton reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """One cache for all tests and their processes, new for every session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ratp-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RATP_CACHE", str(folder))
        yield


@pytest.fixture
def _no_processes(request):
    """Executes the runs of studies in this process, except in slow tests."""
    from helpers import no_processes

    with nullcontext() if request.node.get_closest_marker("slow") else no_processes():
        yield
