"""Every method on a device like an Apple GPU, which has no float64; no test has seen a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from helpers import slow
from ratp.methods import METHODS

# Those that compute in float64 themselves.
QUICK = ["ratp", "shot++", "aucid"]
PROGRAM = Path(__file__).parents[1] / "pretend_gpu.py"

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="needs a newer torch"
)


@pytest.mark.parametrize("methods", [slow(QUICK), slow([name for name in METHODS if name not in QUICK])])
def test_runs_on_a_device_without_float64(methods):
    """In a process of its own, since torch cannot forget a device."""
    done = subprocess.run([sys.executable, PROGRAM, *methods], capture_output=True, text=True, check=False)
    assert done.stdout.split() == methods, done.stderr[-4000:]
