"""Products of many features with a few class vectors, whose gradient GPU libraries choose a bad kernel for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def scores(features: Tensor, vectors: Tensor) -> Tensor:
    """f·Wᵀ, shape (n, k), for features of shape (n, d) and vectors of shape (k, d)."""
    if not features.is_cuda:
        return features @ vectors.T
    product: Tensor = _Scores.apply(features, vectors)
    return product


class _Scores(torch.autograd.Function):
    """The same; the transposed gradient is written out before it is multiplied.

    For 128 samples of 10 classes on an H200, cuBLAS else takes 52 µs for dW, ten times as long.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(features, vectors)
        return features @ vectors.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        features, vectors = ctx.saved_tensors
        needs_features, needs_vectors = ctx.needs_input_grad
        d_features = gradient @ vectors if needs_features else None
        d_vectors = gradient.T.contiguous() @ features if needs_vectors else None
        return d_features, d_vectors
