"""Kernels run where their tensors are."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ratp.functional.kernels.common import DeviceKernel


class Kernel:
    """As much of one of Triton's as a launch uses."""

    def __init__(self, chosen):
        self.chosen, self.launches = chosen, []

    def __getitem__(self, grid):
        return lambda *values, **settings: self.launches.append((grid, values, settings, tuple(self.chosen)))


@pytest.fixture
def chosen(monkeypatch):
    """Devices set as current."""
    found = []

    @contextmanager
    def device(which):
        found.append(which)
        yield
        found.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return found


def test_a_kernel_runs_on_the_device_of_its_first_tensor(chosen):
    kernel = Kernel(chosen)
    last = torch.device("cuda", (torch.cuda.device_count() or 2) - 1)  # without a GPU any will do
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = torch.empty(1, device=last)
    DeviceKernel(kernel)[2, 3](5, there, torch.ones(1), SIZE=4)
    ((grid, values, settings, current),) = kernel.launches
    assert (grid, values[0], settings) == ((2, 3), 5, {"SIZE": 4}) and values[1] is there
    assert current == (last,) and not chosen


def test_triton_s_interpreter_needs_no_device(chosen):
    kernel = Kernel(chosen)
    DeviceKernel(kernel)[(1,)](torch.ones(1))
    assert kernel.launches[0][3] == ()
