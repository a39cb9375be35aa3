"""The head and the optimisers that source-free methods were published with."""

from __future__ import annotations

import pytest
import torch

import source_free_checks as checks
from helpers import same_tensors, toy_plan
from ratp.config import override
from ratp.functional.optim import SGDConfig
from ratp.methods.shared.source_free import SourceFreeConfig

FAMILY = ("shot", "shot+", "shot++", "gsfda", "bmd")
OWN = {"momentum": 0.9, "weight_decay": 1e-3, "schedule": "per-step", "nesterov": True}
ON_SOURCE = {f"source_sgd.{name}": value for name, value in OWN.items()}
EVERYWHERE = {f"sgd.{name}": value for name, value in OWN.items()}


class TestSourceOptimiser:
    def test_by_default_it_is_that_of_targets(self):
        config = override(SourceFreeConfig(), EVERYWHERE)
        assert SourceFreeConfig().sgd_on_source == SGDConfig()
        assert config.sgd_on_source == config.sgd == SGDConfig(**OWN)
        assert override(config, {"source_sgd.momentum": 0.5}).sgd_on_source == SGDConfig(**OWN | {"momentum": 0.5})
        assert override(config, {"source_sgd.momentum": "0", "source_sgd.nesterov": "false"}).sgd_on_source == (
            SGDConfig(**OWN | {"momentum": 0.0, "nesterov": False})
        )
        plan = toy_plan("shot")
        assert not any(name.startswith("source_sgd") for name in plan.decisions()["switches"])

    @pytest.mark.parametrize("name", FAMILY)
    def test_it_trains_on_the_source_alone(self, name):
        method, source, targets = checks.build_method(name, **ON_SOURCE)
        method.fit_source(source)
        trained = checks.snapshot(method.state())
        other, _, _ = checks.build_method(name, **EVERYWHERE)
        other.fit_source(source)
        assert same_tensors(other.state(), trained)
        plain, _, _ = checks.build_method(name)
        plain.fit_source(source)
        assert not torch.equal(plain.state()["network.classifier.weight"], trained["network.classifier.weight"])

        plain, _, _ = checks.build_method(name)  # on targets it learns as without the switch
        for one in (method, plain):
            one.load_state(trained)
            one.adapt(targets[0])
        assert same_tensors(plain.state(), method.state())
