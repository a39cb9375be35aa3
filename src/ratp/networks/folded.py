"""Networks that only infer, on a GPU: each BatchNorm becomes part of the convolution before it.

γ/σ goes into the weights, the rest into a bias; both are in bfloat16 where the network computes in it. One kernel then
computes a convolution, bias, addition and ReLU.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from ratp.functional.norm import BatchNorm1d, BatchNorm2d
from ratp.networks.backbones import DTN
from ratp.networks.resnet import Block, ResNet, Stem, packs

if TYPE_CHECKING:
    from ratp.networks.network import Network

# Whether cuDNN adds and applies ReLU as well; otherwise the kernel of BatchNorm does this in a pass of its own.
FUSE = True
_Window = tuple[tuple[int, ...], tuple[int, ...]]  # stride and padding


class FoldedConvolution(nn.Module):
    """A convolution or linear layer with the BatchNorm behind it; called like that BatchNorm, without a gradient."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, norm: BatchNorm1d | BatchNorm2d, dtype: torch.dtype) -> None:
        super().__init__()
        mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
        parts = fuse_conv_bn_weights(layer.weight, layer.bias, mean, variance, norm.eps, norm.weight, norm.bias)
        weight, bias = (part.detach().to(dtype) for part in parts)
        self.bias: Tensor | None = bias
        self._window: _Window = (1, 1), (0, 0)
        if isinstance(layer, nn.Conv2d):
            self._window = cast(_Window, (layer.stride, layer.padding))
        self._packs = isinstance(layer, Stem) and packs(weight.device, dtype)
        if self._packs:
            from ratp.functional.kernels import stem

            weight, self._window = stem.pack_weight(weight, dtype), ((1, 1), (0, 0))
        weight = weight if weight.ndim == 4 else weight[:, :, None, None]
        self._weight = weight.contiguous(memory_format=torch.channels_last)
        self._zero, self._one = torch.zeros_like(mean), torch.ones_like(mean)
        self._fuses = FUSE

    def forward(self, x: Tensor, *, add: Tensor | None = None, relu: bool = False, **_: None) -> Tensor:
        """Computes the layer, an addition and ReLU."""
        if self._packs:
            from ratp.functional.kernels import stem

            x = stem.pack_images(x, self._weight.dtype)
        x = x.to(self._weight.dtype)
        return self._compute(x, add, relu) if x.ndim == 4 else self._compute(x[:, :, None, None], add, relu).flatten(1)

    def _compute(self, x: Tensor, add: Tensor | None, relu: bool) -> Tensor:
        if self.bias is None or not (relu and x.is_cuda):
            y = F.conv2d(x, self._weight, self.bias, *self._window)
            y = y if add is None else y + add
            return F.relu(y) if relu else y
        from ratp.functional.kernels import norm

        if self._fuses and len(x):
            where = *self._window, (1, 1), 1
            try:
                if add is None:
                    return torch.cudnn_convolution_relu(x, self._weight, self.bias, *where)
                return torch.cudnn_convolution_add_relu(x, self._weight, add, 1.0, self.bias, *where)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # cuDNN has no such kernel
                self._fuses = False
        y = F.conv2d(x, self._weight, None, *self._window)
        return norm.infer(y, self._zero, self._one, self._one, self.bias, 0.0, add=add, relu=True)


def fold(network: Network) -> Network:
    """Copies a network in evaluation mode, folded where this package has built it: DTN, ResNets and bottlenecks."""
    copy = network.frozen_copy()
    if type(copy.backbone) in (DTN, ResNet):
        _fold(copy.backbone, torch.bfloat16 if copy.precision == "bf16" else torch.float32)
    _fold(copy.bottleneck, torch.float32)
    return copy


def _fold(module: nn.Module, dtype: torch.dtype) -> None:
    """Folds all pairs of layers inside a module, in place."""
    for (first, layer), (second, norm) in pairwise(list(module.named_children())):
        if isinstance(layer, nn.Conv2d | nn.Linear) and isinstance(norm, BatchNorm1d | BatchNorm2d):
            setattr(module, first, nn.Identity())
            setattr(module, second, FoldedConvolution(layer, norm, dtype))
    for child in module.children():
        _fold(child, dtype)
    if isinstance(module, Block) and module.downsample is not None:  # both biases are added before the same ReLU
        _, shortcut = module.downsample.children()
        *_, last = (child for child in module.children() if isinstance(child, FoldedConvolution))
        assert isinstance(shortcut, FoldedConvolution) and last.bias is not None and shortcut.bias is not None
        last.bias, shortcut.bias = last.bias + shortcut.bias, None
