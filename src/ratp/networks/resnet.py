"""Torchvision's ResNets with addition and ReLU fused into the BatchNorm before them; imported lazily."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torchvision.models import resnet as library

from ratp.functional.norm import BatchNorm2d


class _BasicBlock(library.BasicBlock):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn1(self.conv1(x), relu=True)
        return cast(Tensor, self.bn2(self.conv2(out), add=identity, relu=True))


class _Bottleneck(library.Bottleneck):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn1(self.conv1(x), relu=True)
        out = self.bn2(self.conv2(out), relu=True)
        return cast(Tensor, self.bn3(self.conv3(out), add=identity, relu=True))


class _ResNet(library.ResNet):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x), relu=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return cast(Tensor, self.avgpool(x)).flatten(1)


_BLOCKS = {
    "resnet18": (_BasicBlock, [2, 2, 2, 2]),
    "resnet50": (_Bottleneck, [3, 4, 6, 3]),
    "resnet101": (_Bottleneck, [3, 4, 23, 3]),
}


def resnet(name: str) -> nn.Module:
    """Builds a ResNet without its classifier, with random weights from torch's generator."""
    block, layers = _BLOCKS[name]
    model: nn.Module = _ResNet(block, layers, norm_layer=BatchNorm2d)
    model.fc = nn.Identity()
    return model
