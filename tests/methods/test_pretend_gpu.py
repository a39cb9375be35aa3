"""Every method on a device like an Apple GPU, which has no float64; no test has seen a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from ratp.methods import METHODS

PROGRAM = Path(__file__).parents[1] / "pretend_gpu.py"


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="needs a newer torch"
)
def test_runs_on_a_device_without_float64():
    """In a process of its own, since torch cannot forget a device."""
    done = subprocess.run([sys.executable, PROGRAM, *METHODS], capture_output=True, text=True, check=False)
    assert done.stdout.split() == list(METHODS), done.stderr[-4000:]
