"""A small trained run in use, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from helpers import toy_domain, toy_plan
from ratp import Deployment, Run
from ratp.data.domain import LabelledDomain
from ratp.deploy.settings import Settings

SIZES = {"epochs": 3, "steps": 60, "batch": 32, "lr": 0.05, "network.width": 0.2}


def trained(folder: Path, method: str = "tent") -> Path:
    """A finished run on a source and one target."""
    domains = [toy_domain("ink", 400), toy_domain("mud", 64)]
    Run(toy_plan(method, domains, changes=SIZES), folder).execute()
    return folder


def held_back() -> LabelledDomain:
    """Source images that the run did not train on: the same tint, other noise."""
    return rest_of(toy_domain("ink", 900), 400)


def rest_of(domain: LabelledDomain, start: int) -> LabelledDomain:
    return domain.subset(torch.arange(start, len(domain)))


def deploy(run: Path, folder: Path, **settings) -> Deployment:
    return Deployment.create(run, folder, held_back(), settings=Settings(**settings), device="cpu")


def strange(count: int = 256) -> Tensor:
    """The source's images in negative."""
    return 255 - toy_domain("ink", 900).images[-count:]


def feed(model: Deployment, images: Tensor, at_once: int = 32) -> list[str]:
    """Observes images in batches; returns the levels of their windows."""
    seen = [model.observe(part) for part in images.split(at_once)]
    return [window.level for found in seen for window in found.windows]
