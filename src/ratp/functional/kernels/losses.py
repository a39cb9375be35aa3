"""Scores of classes, and cross-entropy, prototype contrastive alignment (PCA), distillation and consistency of a batch.

One program compares one row with all rows, prototypes and old prototypes. It keeps the row's losses, their gradients
with respect to its logits, and PCA's with respect to its products. The backward pass turns these into the gradients of
embeddings and prototypes, one program per row. All arithmetic is in single precision, and sums have a fixed order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratp.functional.kernels.common import DeviceKernel

# The largest batch, embedding and number of classes: what a program holds at a time.
MOST_ROWS, MOST_DIM, MOST_CLASSES = 1024, 1024, 512
# Values per tile, the fewest of a row in it, and warps per program: forward and backward.
TILE, NARROWEST, WARPS = 4096, 8, 8
GRADIENT_TILE, GRADIENT_WARPS = 8192, 8
# Shortest length that vectors are divided by, as in torch.nn.functional.normalize.
SHORTEST = tl.constexpr(1e-12)


@triton.jit
def _compare(one, vectors, count, DIM: tl.constexpr, R: tl.constexpr, X: tl.constexpr):
    """Computes the products of one vector with several ones, and their squared lengths."""
    r = tl.arange(0, R)
    products = tl.zeros([R, X], tl.float32)
    squares = tl.zeros([R, X], tl.float32)
    for start in range(0, DIM, X):
        x = start + tl.arange(0, X)
        there = (r < count)[:, None] & (x < DIM)[None, :]
        value = tl.load(vectors + r[:, None] * DIM + x[None, :], mask=there, other=0.0).to(tl.float32)
        products += value * tl.load(one + x, mask=x < DIM, other=0.0).to(tl.float32)[None, :]
        squares += value * value
    return tl.sum(products, 1), tl.sum(squares, 1)


@triton.jit
def _inverse_length(squares):
    return 1.0 / tl.maximum(tl.sqrt(squares), SHORTEST)


@triton.jit
def _log_softmax(logits, row, k, c):
    value = tl.load(logits + row * k + c, mask=c < k, other=-1e30).to(tl.float32)
    value -= tl.max(value, 0)
    return value - tl.log(tl.sum(tl.exp(value), 0))


@triton.jit
def _divergence(target, logs):
    """Computes KL(target ‖ prediction) of log-probabilities and its gradient with respect to the logits."""
    probability = tl.exp(target)
    return tl.sum(probability * (target - logs), 0), tl.exp(logs) - probability


@DeviceKernel
@triton.jit
def _loss_kernel(
    z, w, old, logits, teacher, labels, valid, losses, slopes, d_logits,
    n, k, scale, log_old, pca, distill, consistency,
    DIM: tl.constexpr, COSINE: tl.constexpr, ONLY_NEAR: tl.constexpr, THRESHOLD: tl.constexpr, VALID: tl.constexpr,
    OLD: tl.constexpr, TEACHER: tl.constexpr, CONSISTENT: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, NX: tl.constexpr, KX: tl.constexpr,
):  # fmt: skip
    """Computes the weighted losses of one row, divided by the number of rows that count, and their gradients."""
    i = tl.program_id(0)
    j, c = tl.arange(0, N), tl.arange(0, K)
    in_n, in_k = j < n, c < k
    label = tl.load(labels + i)
    repels = in_n & (tl.load(labels + j, mask=in_n, other=0) != label)
    counts, copies = in_n, in_n & (j >= n // 2)
    if VALID:
        counts = tl.load(valid + j, mask=in_n, other=0) != 0
        copies, repels = copies & counts, repels & counts
    is_own = j == i
    share = 1.0 / tl.maximum(tl.sum(counts.to(tl.float32), 0), 1.0)
    share = tl.where(tl.max((counts & is_own).to(tl.int32), 0) > 0, share, 0.0)

    near, squares = _compare(z + i * DIM, z, n, DIM, N, NX)
    to_own, own_squares = _compare(z + i * DIM, w, k, DIM, K, KX)
    factor, own_factor = tl.full([N], 1.0, tl.float32), tl.full([K], 1.0, tl.float32)
    inverse = 1.0
    if COSINE:
        inverse = _inverse_length(tl.sum(tl.where(is_own, squares, 0.0), 0))
        factor, own_factor = inverse * _inverse_length(squares), inverse * _inverse_length(own_squares)
    near *= factor
    if ONLY_NEAR:
        repels = repels & (near >= THRESHOLD)
    near = tl.where(repels, scale * near, float("-inf"))
    to_own = tl.where(in_k, scale * (to_own * own_factor), float("-inf"))
    is_class = c == label
    positive = tl.sum(tl.where(is_class, to_own, 0.0), 0)
    most = tl.maximum(tl.max(near, 0), tl.max(to_own, 0))
    if OLD:
        to_old, old_squares = _compare(z + i * DIM, old, k, DIM, K, KX)
        old_factor = tl.full([K], 1.0, tl.float32)
        if COSINE:
            old_factor = inverse * _inverse_length(old_squares)
        to_old = tl.where(in_k, scale * (to_old * old_factor) + log_old, float("-inf"))
        old_positive = tl.sum(tl.where(is_class, to_old, 0.0), 0)
        larger = tl.maximum(positive, old_positive)
        positive = larger + tl.log(tl.exp(positive - larger) + tl.exp(old_positive - larger))
        most = tl.maximum(most, tl.max(to_old, 0))
    total = tl.sum(tl.exp(near - most), 0) + tl.sum(tl.exp(to_own - most), 0)
    if OLD:
        total += tl.sum(tl.exp(to_old - most), 0)
    total = most + tl.log(total)
    weight = pca * share
    tl.store(losses + n + i, tl.where(share > 0, weight * (total - positive), 0.0))
    # gradients with respect to the products of raw vectors
    weight *= scale
    slopes += i * (n + 2 * k)
    tl.store(slopes + j, tl.where(share > 0, weight * factor * tl.exp(near - total), 0.0), mask=in_n)
    pull = tl.exp(to_own - total) - tl.where(is_class, tl.exp(to_own - positive), 0.0)
    tl.store(slopes + n + c, tl.where(share > 0, weight * own_factor * pull, 0.0), mask=in_k)
    if OLD:
        pull = tl.exp(to_old - total) - tl.where(is_class, tl.exp(to_old - positive), 0.0)
        tl.store(slopes + n + k + c, tl.where(share > 0, weight * old_factor * pull, 0.0), mask=in_k)

    logs = _log_softmax(logits, i, k, c)
    tl.store(losses + i, tl.where(share > 0, -share * tl.sum(tl.where(is_class, logs, 0.0), 0), 0.0))
    d_logits += i * k + c
    slope = tl.exp(logs) - is_class.to(tl.float32)
    tl.store(d_logits, tl.where(share > 0, share * slope, 0.0), mask=in_k)
    if TEACHER:
        loss, slope = _divergence(_log_softmax(teacher, i, k, c), logs)
        weight = distill * share
        tl.store(losses + 2 * n + i, tl.where(share > 0, weight * loss, 0.0))
        tl.store(d_logits + n * k, tl.where(share > 0, weight * slope, 0.0), mask=in_k)
    if CONSISTENT:
        target = tl.maximum(i - n // 2, 0)
        loss, slope = _divergence(_log_softmax(logits, target, k, c), logs)
        weight = consistency / tl.maximum(tl.sum(copies.to(tl.float32), 0), 1.0)
        is_copy = (share > 0) & (i >= n // 2)
        tl.store(losses + 3 * n + i, tl.where(is_copy, weight * loss, 0.0))
        tl.store(d_logits + 2 * n * k, tl.where(is_copy, weight * slope, 0.0), mask=in_k)


@triton.jit
def _weighted(vectors, slopes, r, inside, x, DIM: tl.constexpr):
    there = inside[:, None] & (x < DIM)[None, :]
    value = tl.load(vectors + r[:, None] * DIM + x[None, :], mask=there, other=0.0).to(tl.float32)
    return value * slopes[:, None]


@DeviceKernel
@triton.jit
def _gradient_kernel(
    z, w, old, slopes, parts, of_ce, of_pca, of_distill, of_consistency, dz, dw, d_logits, n, k,
    DIM: tl.constexpr, COSINE: tl.constexpr, OLD: tl.constexpr, TEACHER: tl.constexpr, CONSISTENT: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one embedding and its logits, or of one prototype."""
    row = tl.program_id(0)
    is_sample = row < n
    width = n + 2 * k
    x, c = tl.arange(0, X), tl.arange(0, K)
    in_z, in_w, in_k = x < tl.where(is_sample, DIM, 0), x < tl.where(is_sample, 0, DIM), c < tl.where(is_sample, k, 0)
    total = tl.zeros([R, X], tl.float32)
    for start in range(0, n, R):
        r = start + tl.arange(0, R)
        inside = r < n
        slope = tl.load(slopes + r * width + row, mask=inside, other=0.0)
        slope += tl.load(slopes + row * width + r, mask=r < tl.where(is_sample, n, 0), other=0.0)
        total += _weighted(z, slope, r, inside, x, DIM)
    if is_sample:
        for start in range(0, k, R):
            r = start + tl.arange(0, R)
            inside = r < k
            slope = tl.load(slopes + row * width + n + r, mask=inside, other=0.0)
            total += _weighted(w, slope, r, inside, x, DIM)
            if OLD:
                slope = tl.load(slopes + row * width + n + k + r, mask=inside, other=0.0)
                total += _weighted(old, slope, r, inside, x, DIM)
    gradient = tl.sum(total, 0)
    class_row = row - n
    if COSINE:  # x/‖x‖ changes only across x
        own = tl.load(z + row * DIM + x, mask=in_z, other=0.0).to(tl.float32)
        own += tl.load(w + class_row * DIM + x, mask=in_w, other=0.0).to(tl.float32)
        length = tl.sqrt(tl.sum(own * own, 0))
        own /= tl.maximum(length, SHORTEST)
        gradient -= own * tl.where(length < SHORTEST, 0.0, tl.sum(own * gradient, 0))
    gradient *= tl.load(of_pca)
    tl.store(dz + row * DIM + x, gradient.to(dz.dtype.element_ty), mask=in_z)
    tl.store(dw + class_row * DIM + x, gradient.to(dw.dtype.element_ty), mask=in_w)
    parts += row * k + c
    slope = tl.load(of_ce) * tl.load(parts, mask=in_k, other=0.0)
    if TEACHER:
        slope += tl.load(of_distill) * tl.load(parts + n * k, mask=in_k, other=0.0)
    if CONSISTENT:
        slope += tl.load(of_consistency) * tl.load(parts + 2 * n * k, mask=in_k, other=0.0)
    tl.store(d_logits + row * k + c, slope.to(d_logits.dtype.element_ty), mask=in_k)


@DeviceKernel
@triton.jit
def _score_kernel(features, vectors, scores, k, DIM: tl.constexpr, K: tl.constexpr, X: tl.constexpr):
    """Computes the products of one row of features with all vectors."""
    i = tl.program_id(0)
    c = tl.arange(0, K)
    products, _ = _compare(features + i * DIM, vectors, k, DIM, K, X)
    tl.store(scores + i * k + c, products, mask=c < k)


@DeviceKernel
@triton.jit
def _score_gradient_kernel(
    features, vectors, slopes, d_features, d_vectors, n, k, DIM: tl.constexpr, R: tl.constexpr, X: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one row of features, or of one vector."""
    row = tl.program_id(0)
    x = tl.arange(0, X)
    total = tl.zeros([R, X], tl.float32)
    if row < n:
        for start in range(0, k, R):
            r = start + tl.arange(0, R)
            total += _weighted(vectors, tl.load(slopes + row * k + r, mask=r < k, other=0.0), r, r < k, x, DIM)
        tl.store(d_features + row * DIM + x, tl.sum(total, 0), mask=x < DIM)
    else:
        for start in range(0, n, R):
            r = start + tl.arange(0, R)
            total += _weighted(features, tl.load(slopes + r * k + row - n, mask=r < n, other=0.0), r, r < n, x, DIM)
        tl.store(d_vectors + (row - n) * DIM + x, tl.sum(total, 0), mask=x < DIM)


def score(features: Tensor, vectors: Tensor) -> Tensor:
    """Computes f·Wᵀ, shape (n, k), of few float32 features (n, d) and vectors (k, d)."""
    (n, dim), k = features.shape, len(vectors)
    result, classes = features.new_empty(n, k), max(16, triton.next_power_of_2(k))
    tile = {"K": classes, "X": _across(classes, dim)}
    _score_kernel[(n,)](features.contiguous(), vectors.contiguous(), result, k, DIM=dim, **tile)
    return result


def score_gradient(slopes: Tensor, features: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the gradients of features and vectors from that of their scores, shape (n, k)."""
    features, vectors, slopes = features.contiguous(), vectors.contiguous(), slopes.contiguous()
    d_features, d_vectors = torch.empty_like(features), torch.empty_like(vectors)
    (n, dim), k = features.shape, len(vectors)
    across = triton.next_power_of_2(dim)
    _score_gradient_kernel[(n + k,)](
        features, vectors, slopes, d_features, d_vectors, n, k,
        DIM=dim, R=max(1, GRADIENT_TILE // across), X=across, num_warps=GRADIENT_WARPS,
    )  # fmt: skip
    return d_features, d_vectors


def fits(embedding: Tensor, logits: Tensor) -> bool:
    """Whether a program can hold what it needs of a batch."""
    return len(embedding) <= MOST_ROWS and embedding.shape[1] <= MOST_DIM and logits.shape[1] <= MOST_CLASSES


class Terms(torch.autograd.Function):
    """Computes the cross-entropy and weighted PCA, distillation and consistency, averaged over the rows that count."""

    @staticmethod
    def forward(
        ctx: Any,
        embedding: Tensor,  # z, shape (n, d)
        logits: Tensor,  # shape (n, k)
        prototypes: Tensor,  # shape (k, d)
        old: Tensor | None,  # old prototypes, constants, same shape
        teacher: Tensor | None,  # logits to distil from, constants, shape (n, k); None: nothing is distilled
        labels: Tensor,  # shape (n,)
        valid: Tensor | None,  # which rows count, bool of shape (n,); None: all
        scale: float | None,  # factor s on the cosine; None: PCA uses dot products
        threshold: float | None,  # product from which samples of other classes repel; None: all do
        old_weight: float,  # m of PCA, above 0
        weights: tuple[float, float, float],  # of PCA, distillation and consistency between the two halves of a batch
    ) -> tuple[Tensor, ...]:
        """Returns the terms as scalars."""
        z, w, logits, labels = (tensor.contiguous() for tensor in (embedding, prototypes, logits, labels))
        olds, teachers = (w if old is None else old.contiguous()), (logits if teacher is None else teacher.contiguous())
        (n, dim), k = z.shape, len(w)
        asked = [True, True, teacher is not None, weights[2] > 0]
        losses = torch.empty(4, n, device=z.device)
        slopes = torch.empty(n, n + 2 * k, device=z.device)
        d_logits = torch.empty(3, n, k, device=z.device)
        high, classes = max(16, triton.next_power_of_2(n)), max(16, triton.next_power_of_2(k))
        _loss_kernel[(n,)](
            z, w, olds, logits, teachers, labels, labels if valid is None else valid, losses, slopes, d_logits, n, k,
            1.0 if scale is None else float(scale), math.log(old_weight), *map(float, weights),
            DIM=dim, COSINE=scale is not None, ONLY_NEAR=threshold is not None, THRESHOLD=threshold or 0.0,
            VALID=valid is not None, OLD=old is not None, TEACHER=asked[2], CONSISTENT=asked[3],
            N=high, K=classes, NX=_across(high, dim), KX=_across(classes, dim), num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(z, w, olds, logits, slopes, d_logits)
        ctx.switches = {"COSINE": scale is not None, "OLD": old is not None, "TEACHER": asked[2]}
        ctx.switches |= {"CONSISTENT": asked[3], "K": classes}
        return tuple(row for row, is_asked in zip(losses.sum(dim=1).unbind(), asked, strict=True) if is_asked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of embedding, logits and prototypes."""
        z, w, old, logits, slopes, parts = ctx.saved_tensors
        (n, dim), k = z.shape, len(w)
        ce, pca, *others = gradients
        distill, consistency = others[0] if ctx.switches["TEACHER"] else pca, others[-1] if others else pca
        results = torch.empty_like(z), torch.empty_like(logits), torch.empty_like(w)
        across = triton.next_power_of_2(dim)
        _gradient_kernel[(n + k,)](
            z, w, old, slopes, parts, ce, pca, distill, consistency, results[0], results[2], results[1], n, k,
            DIM=dim, **ctx.switches, R=max(1, GRADIENT_TILE // across), X=across, num_warps=GRADIENT_WARPS,
        )  # fmt: skip
        return *results, *(None,) * 8


def _across(rows: int, dim: int) -> int:
    """How many values of each vector a tile holds."""
    return min(max(TILE // rows, NARROWEST), int(triton.next_power_of_2(dim)))
