"""Modules put into a feature extractor, after its blocks.

The modules become part of the feature extractor: its parameters, its state, its copies and its mode include theirs. All
other tensors keep their names, so weights can be loaded before and after.

A block is a stretch of layers that halves the images: DTN has three, each ending in a ReLU; a ResNet has four, called
``layer1`` to ``layer4``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ratp.errors import ConfigError
from ratp.network import Network

Inserted = TypeVar("Inserted", bound=nn.Module)


def insert_after(
    network: Network, blocks: Sequence[int], name: str, make: Callable[[int], Inserted]
) -> Mapping[int, Inserted]:
    """Puts a module after each of some blocks of a network's feature extractor.

    Args:
        network: Changed in place; new modules go to its device.
        blocks: Which blocks, from 1.
        name: What the modules are called among the layers of the block.
        make: A module for a number of channels; drawing its numbers is up to the caller.

    Returns:
        The modules, by block.

    Raises:
        ConfigError: If the feature extractor has no such block, or none that are known.
    """
    backbone = network.backbone
    ends = _ends(backbone)
    if not ends:
        raise ConfigError(
            f"nothing can be inserted into {network.config.backbone}, whose blocks are not known: "
            "set network.backbone to dtn or a resnet."
        )
    wrong = sorted(set(blocks) - ends.keys())
    if wrong:
        raise ConfigError(
            f"{network.config.backbone} has blocks {', '.join(map(str, ends))}, not {', '.join(map(str, wrong))}."
        )
    first = next(network.parameters())
    channels = _channels(network, {block: ends[block] for block in blocks})
    made = {block: make(channels[block]).to(first.device).train(network.training) for block in sorted(set(blocks))}
    for block, module in made.items():
        path = ends[block]
        end = backbone.get_submodule(path)
        if not isinstance(end, nn.Sequential):  # has no tensors, whose names would change
            end = nn.Sequential().train(network.training)
            end.add_module("end", backbone.get_submodule(path))
            setattr(backbone, path, end)
        end.add_module(name, module)
    return made


def _ends(backbone: nn.Module) -> dict[int, str]:
    """The last layer of each block, or the block where it is a sequence, by number."""
    children = dict(backbone.named_children())
    if isinstance(backbone, nn.Sequential):
        # a sequence is an end that something was put after before
        names = [name for name, child in children.items() if isinstance(child, nn.ReLU | nn.Sequential)]
        return dict(enumerate(names, start=1))
    blocks = {block: f"layer{block}" for block in range(1, 5)}
    return {block: path for block, path in blocks.items() if isinstance(children.get(path), nn.Sequential)}


def _channels(network: Network, ends: Mapping[int, str]) -> dict[int, int]:
    """Channels after each block, measured on an image of nothing."""
    found: dict[int, int] = {}
    handles = []
    for block, path in ends.items():

        def note(_: nn.Module, __: tuple[Tensor, ...], output: Tensor, block: int = block) -> None:
            found[block] = output.shape[1]

        handles.append(network.backbone.get_submodule(path).register_forward_hook(note))
    was = network.training
    device = next(network.parameters()).device
    try:
        with torch.no_grad():
            network.eval().features(torch.zeros(1, 3, *network.image_size, device=device))
    finally:
        network.train(was)
        for handle in handles:
            handle.remove()
    return found
