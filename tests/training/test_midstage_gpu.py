"""On a GPU too, a run stopped in the middle of a stage goes on with the next step; there, to a tolerance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import QUICK, tensors_of, toy_plan
from ratp.methods import METHODS
from ratp.runs.events import StageStarted, Trained
from ratp.runs.run import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = {"epochs": 2, "steps": 6, "network.width": 0.25, "network.hidden": 32, "network.dim": 16, "lr": 0.001}
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(autouse=True)
def _repeatable():
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


def run_of(method, folder):
    plan = toy_plan(method, changes={**SIZES, **QUICK.get(method, {})})
    return Run(replace(plan, device=torch.device("cuda")), folder)


@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_resumes_at_the_next_step(method, share, tmp_path):
    ticks = sum(isinstance(event, Trained) for event in run_of(method, tmp_path / "whole").events())
    events, seen = run_of(method, tmp_path / "cut").events(), 0
    for event in events:
        seen += isinstance(event, Trained)
        if seen == max(1, int(share * ticks)):
            break
    events.close()
    started = [event for event in run_of(method, tmp_path / "cut").events() if isinstance(event, StageStarted)]
    assert started[0].done or started[0].stage  # not from the very beginning
    whole, cut = (tensors_of(tmp_path / name, "weights") for name in ("whole", "cut"))
    for name, tensor in whole.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(cut[name], tensor, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)
