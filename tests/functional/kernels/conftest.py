"""Kernels run on the GPU where there is one, and through Triton's interpreter where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device():
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
