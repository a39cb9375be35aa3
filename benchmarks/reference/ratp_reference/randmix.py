"""RandMix with given random numbers: branch after branch, AdaIN one image after another."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.functional.randmix import Branch, Draw, RandMixConfig

DROPOUT = 0.2
SMALLEST_SUM = 1e-3


def randmix(images: Tensor, draw: Draw, config: RandMixConfig, mean: Tensor, std: Tensor) -> Tensor:
    """Augments normalised images with the random numbers of ``draw``."""
    inputs = images if draw.input_noise is None else images + draw.input_noise
    terms = []
    if draw.colour is not None:
        coloured = F.conv2d(inputs, draw.colour.weight, draw.colour.bias)
        terms.append(coloured * draw.colour_keep / (1 - DROPOUT))
    terms += [autoencode(inputs, branch, config.adain) for branch in draw.branches]
    if config.tanh:
        terms = [term.tanh() for term in terms]
    terms.append(images)

    total = draw.weights.sum(dim=1)
    if config.safe_division:
        total = torch.where(total.abs() < SMALLEST_SUM, SMALLEST_SUM * total.sign(), total)
    mixed = torch.zeros_like(images)
    for weights, term in zip(draw.weights.T, terms, strict=True):
        mixed = mixed + (weights / total)[:, None, None, None] * term
    squashed = mixed.sigmoid()
    return (squashed - mean[:, None, None]) / std[:, None, None] if config.renormalise else squashed


def autoencode(inputs: Tensor, branch: Branch, kind: str) -> Tensor:
    """R(x) = dec( l₁(n)·IN(enc(x)) + l₂(n) ), every image with its own noise n."""
    hidden = F.conv2d(inputs, branch.encoder.weight, branch.encoder.bias)
    styled = []
    for row, sample in enumerate(hidden):
        noise = branch.noise[row if len(branch.noise) > 1 else 0]
        scale, shift = (branch.adain.weight @ noise + branch.adain.bias).chunk(2)
        if kind == "residual":
            scale = 1 + scale
        styled.append(scale[:, None, None] * instance_norm(sample) + shift[:, None, None])
    return F.conv_transpose2d(torch.stack(styled), branch.decoder.weight, branch.decoder.bias)


def instance_norm(sample: Tensor) -> Tensor:
    """Every channel of one image with mean 0 and variance 1."""
    mean = sample.mean(dim=(1, 2), keepdim=True)
    variance = sample.var(dim=(1, 2), correction=0, keepdim=True)
    return (sample - mean) / (variance + 1e-5).sqrt()
