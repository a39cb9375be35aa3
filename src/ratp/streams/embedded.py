"""The stream that comes with the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.data import demo
from ratp.data.drawing import SIZE
from ratp.network import NetworkConfig
from ratp.recipe import Recipe
from ratp.stream import DataOptions, LoadedDomain, StreamSpec


def _load(codes: Sequence[str], size: int, options: DataOptions) -> list[LoadedDomain]:
    del options
    domains = [demo.demo_domain(code) for code in codes]
    if size != SIZE:
        domains = [replace(domain, images=_resized(domain.images, size)) for domain in domains]
    return [LoadedDomain(domain) for domain in domains]


def _resized(images: Tensor, size: int) -> Tensor:
    resized = F.interpolate(images.float(), size=(size, size), mode="bilinear", antialias=True)
    return resized.round().clamp(0, 255).to(torch.uint8)


DEMO = StreamSpec(
    name="demo",
    title="Embedded digits, 32×32: real scans, then photographs, fonts and street numbers",
    domains=demo.DOMAINS,
    orders={"default": tuple(demo.DOMAINS), "reverse": tuple(reversed(demo.DOMAINS))},
    recipe=Recipe(network=NetworkConfig(width=0.25), epochs=12, steps=50, lr=0.05),
    load=_load,
)
