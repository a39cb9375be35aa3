"""ResNets with addition and ReLU fused into the BatchNorm before them.

Layers, their names and their random weights are those of torchvision, which takes seconds to import.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ratp.functional import kernels
from ratp.functional.norm import BatchNorm2d


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """A residual block."""

    expansion: int
    downsample: nn.Module | None


class _BasicBlock(Block):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn1(self.conv1(x), relu=True)
        return cast(Tensor, self.bn2(self.conv2(out), add=identity, relu=True))


class _Bottleneck(Block):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = _conv(inputs, width, 1), BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), BatchNorm2d(outputs)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn1(self.conv1(x), relu=True)
        out = self.bn2(self.conv2(out), relu=True)
        return cast(Tensor, self.bn3(self.conv3(out), add=identity, relu=True))


class _MaxPool(nn.MaxPool2d):
    """The stem's max pooling; on GPUs by a kernel of this package."""

    def __init__(self) -> None:
        super().__init__(3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the maxima."""
        if not (x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) and kernels.usable(x.device)):
            return cast(Tensor, super().forward(x))
        from ratp.functional.kernels import pool

        return pool.max_pool(x)


class Stem(nn.Conv2d):
    """The first convolution; on tensor cores, of packed images (:mod:`ratp.functional.kernels.stem`)."""

    def __init__(self) -> None:
        super().__init__(3, 64, 7, 2, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the convolution."""
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        if (x.requires_grad and torch.is_grad_enabled()) or not packs(x.device, dtype):
            return super().forward(x)
        from ratp.functional.kernels import stem

        return stem.convolve(x, self.weight, dtype)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing pays: only tensor cores gain from it."""
    rounds = dtype == torch.bfloat16 or (dtype == torch.float32 and torch.backends.cudnn.allow_tf32)
    return rounds and kernels.usable(device)


class ResNet(nn.Module):
    """A ResNet without its classifier."""

    layer1: nn.Module
    layer2: nn.Module
    layer3: nn.Module
    layer4: nn.Module

    def __init__(self, block: type[Block], depths: list[int]) -> None:
        super().__init__()
        self.conv1, self.bn1 = Stem(), BatchNorm2d(64)
        self.maxpool = _MaxPool()
        inputs = 64
        for number, depth in enumerate(depths):
            width, blocks = 64 * 2**number, []
            for place in range(depth):
                stride, outputs = 2 if number and not place else 1, width * block.expansion
                same = stride == 1 and inputs == outputs
                shortcut = None if same else nn.Sequential(_conv(inputs, outputs, 1, stride), BatchNorm2d(outputs))
                blocks.append(block(inputs, width, stride, shortcut))
                inputs = outputs
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        nn.Linear(inputs, 1000)  # torchvision's classifier, which draws random numbers before the weights below
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Computes the features of normalised images."""
        x = self.maxpool(self.bn1(self.conv1(x), relu=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return cast(Tensor, self.avgpool(x)).flatten(1)


_BLOCKS: dict[str, tuple[type[Block], list[int]]] = {
    "resnet18": (_BasicBlock, [2, 2, 2, 2]),
    "resnet50": (_Bottleneck, [3, 4, 6, 3]),
    "resnet101": (_Bottleneck, [3, 4, 23, 3]),
}


def resnet(name: str) -> nn.Module:
    """Builds a ResNet without its classifier, with random weights from torch's generator."""
    return ResNet(*_BLOCKS[name])
