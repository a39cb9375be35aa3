"""A rate that falls with every step reaches the end of its curve with the last one, whatever the method."""

from __future__ import annotations

import pytest

from ratp.config import switches
from ratp.functional.optim import StageSGD
from ratp.methods import METHODS
from source_free_checks import build_method

STEPS = 5
FALLING = [
    name for name, method in METHODS.items() if "sgd.schedule" in {s.name for s in switches(method.config_type())}
]


@pytest.mark.parametrize("name", FALLING)
def test_it_knows_the_steps_of_an_epoch(name, monkeypatch):
    schedules, make = [], StageSGD.__init__

    def watched(self, parameters, lr, epochs, config, steps=1):
        make(self, parameters, lr, epochs, config, steps)
        if config.schedule == "per-step":
            schedules.append(steps)

    monkeypatch.setattr(StageSGD, "__init__", watched)
    more = {"decay": 1} if name == "l2d" else {}  # its own steps of the rate would come on top
    method, source, targets = build_method(name, **{"sgd.schedule": "per-step", "steps": STEPS, "epochs": 2, **more})
    method.fit_source(source)
    if name != "oracle":  # which gets the labels
        method.adapt(targets[0])
    assert schedules
    assert set(schedules) == {STEPS}
