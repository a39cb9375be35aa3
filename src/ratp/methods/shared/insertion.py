"""Inserts modules into a feature extractor, after its blocks.

They become part of it: its parameters, state, copies and mode include theirs. All other tensors keep their names, so
weights can be loaded before and after. A block is a group of layers that halves images: DTN has three, each ending
in a ReLU; a ResNet has four, ``layer1`` to ``layer4``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from ratp.errors import ConfigError
from ratp.networks.network import Network

Inserted = TypeVar("Inserted", bound=nn.Module)


def insert_after(
    network: Network, blocks: Sequence[int], name: str, make: Callable[[int], Inserted]
) -> Mapping[int, Inserted]:
    """Inserts ``make(channels)`` after each of the given blocks of a network's feature extractor, from 1.

    The network is changed in place. The modules are called ``name`` within their block, and are returned by block.
    """
    backbone = network.backbone
    ends = _known_ends(network)
    wrong = sorted(set(blocks) - ends.keys())
    if wrong:
        raise ConfigError(
            f"{network.config.backbone} has blocks {', '.join(map(str, ends))}, not {', '.join(map(str, wrong))}."
        )
    first = next(network.parameters())
    channels = _channels(network, blocks)
    made = {block: make(channels[block]).to(first.device).train(network.training) for block in sorted(set(blocks))}
    for block, module in made.items():
        path = ends[block]
        end = backbone.get_submodule(path)
        if not isinstance(end, nn.Sequential):  # a layer without tensors, so that no tensor is renamed
            end = nn.Sequential().train(network.training)
            end.add_module("end", backbone.get_submodule(path))
            setattr(backbone, path, end)
        end.add_module(name, module)
    return made


@contextmanager
def block_outputs(network: Network, blocks: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collects the feature maps after some blocks of a network, by block; each pass within the block replaces them.

    Blocks are counted from 1, or from −1 for the last one.
    """
    ends, found = _known_ends(network), dict[int, Tensor]()
    paths = list(ends.values())
    handles = []
    for block in blocks:

        def note(_: nn.Module, __: tuple[Tensor, ...], output: Tensor, block: int = block) -> None:
            found[block] = output

        path = paths[block - 1 if block > 0 else block]
        handles.append(network.backbone.get_submodule(path).register_forward_hook(note))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _known_ends(network: Network) -> dict[int, str]:
    """Returns what :func:`_ends` does; raises a ConfigError if there are none."""
    ends = _ends(network.backbone)
    if not ends:
        raise ConfigError(
            f"the blocks of {network.config.backbone} are not known, so nothing can be inserted or read there: "
            "set network.backbone to dtn or a resnet."
        )
    return ends


def _ends(backbone: nn.Module) -> dict[int, str]:
    """Returns the path of each block's last layer, or of the block if it is a sequence, by number."""
    children = dict(backbone.named_children())
    if isinstance(backbone, nn.Sequential):
        # a sequence ends a block that something was inserted after before
        names = [name for name, child in children.items() if isinstance(child, nn.ReLU | nn.Sequential)]
        return dict(enumerate(names, start=1))
    blocks = {block: f"layer{block}" for block in range(1, 5)}
    return {block: path for block, path in blocks.items() if isinstance(children.get(path), nn.Sequential)}


def _channels(network: Network, blocks: Sequence[int]) -> dict[int, int]:
    """Measures the channels after each block on a blank image."""
    was = network.training
    device = next(network.parameters()).device
    try:
        with torch.no_grad(), block_outputs(network, blocks) as found:
            network.eval().features(torch.zeros(1, 3, *network.image_size, device=device))
    finally:
        network.train(was)
    return {block: maps.shape[1] for block, maps in found.items()}
