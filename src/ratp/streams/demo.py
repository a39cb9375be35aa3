"""The embedded demo stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.data import demo
from ratp.data.demo.drawing import SIZE
from ratp.networks.network import NetworkConfig
from ratp.streams.catalogue import STREAMS
from ratp.streams.stream import DataOptions, LoadedDomain, StreamSpec
from ratp.training.recipe import Recipe


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
    **vars(STREAMS["demo"]), recipe=Recipe(network=NetworkConfig(width=0.25), epochs=12, steps=50, lr=0.05), load=_load
)
