"""Real weights and real photographs, which lie beside the checkout, and a measure of how well features tell classes."""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

SHARED = Path(__file__).resolve().parents[2] / "shared"
RESNET50 = SHARED / "weights" / "resnet50-imagenet1k-v1-backbone-fp16.safetensors"
PHOTOS = SHARED / "data" / "pacs" / "photo.zip"
EACH = 8


def resnet50_file() -> Path:
    if not RESNET50.is_file():
        pytest.skip("no real weights beside the checkout")
    return RESNET50


@cache
def photos(side: int) -> tuple[Tensor, Tensor]:
    """The first few photographs of each class of PACS, with values in [0, 1], and their labels."""
    if not PHOTOS.is_file():
        pytest.skip("no photographs beside the checkout")
    images, labels = [], []
    with zipfile.ZipFile(PHOTOS) as archive:
        names = sorted(name for name in archive.namelist() if not name.endswith("/"))
        for label, kind in enumerate(sorted({name.split("/")[1] for name in names})):
            for name in [n for n in names if n.split("/")[1] == kind][:EACH]:
                image = Image.open(io.BytesIO(archive.read(name))).convert("RGB").resize((side, side))
                images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255)
                labels.append(label)
    return torch.stack(images), torch.tensor(labels)


def separation(backbone: nn.Module, mean: tuple[float, ...], std: tuple[float, ...], side: int = 112) -> float:
    """The share of photographs whose nearest class mean, computed without them, is that of their class."""
    images, labels = photos(side)
    inputs = (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    with torch.no_grad():
        features = functional.normalize(torch.cat([backbone.eval()(part) for part in inputs.split(14)]), dim=1)
    members = functional.one_hot(labels).T.float()
    sums = members @ features
    hits = 0
    for feature, label in zip(features, labels, strict=True):
        others = sums.clone()
        others[label] -= feature
        hits += int((functional.normalize(others, dim=1) @ feature).argmax() == label)
    return hits / len(labels)
