"""Batch normalisation that can restrict its statistics to some rows of a batch.

A batch padded to a fixed size then behaves like the smaller batch without the padding, so the shapes of a training
step never depend on its data:

    with only_rows(network, mask):
        output = network(images)

Rows where the mask is true get exactly what torch's layers compute on these rows alone: outputs, running statistics
and gradients. The other rows are normalised with the same statistics but do not contribute; keep them out of every
loss. Nothing is read back from the device. A layer can also apply the operations that follow it (channel dropout, an
addition, ReLU); on a GPU, kernels fuse all of them (:mod:`ratp.functional.kernels.norm`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ratp.errors import RatpError
from ratp.functional import kernels

_RUNNING = "running_mean", "running_var"
_FUSED_TYPES = torch.float32, torch.bfloat16, torch.float16


class _Rows:
    """The rows that count (``mask``, bool of shape (n,)), and what all layers derive from them, computed once."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self._weights: dict[torch.dtype, tuple[Tensor, Tensor, Tensor]] = {}
        self._totals: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def check(self, x: Tensor) -> None:
        """Refuses a batch of another size."""
        if self.mask.shape != x.shape[:1]:
            raise RatpError(f"a mask of {tuple(self.mask.shape)} rows does not fit a batch of {tuple(x.shape)}.")

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """1 or 0 per row, the same divided by their sum, both (n, 1); 1 if any row counts, else 0."""
        if dtype not in self._weights:
            counts = self.mask.to(dtype)[:, None]
            count = counts.sum()
            self._weights[dtype] = counts, counts / count.clamp_min(1), count.clamp(max=1)
        return self._weights[dtype]

    @cached_property
    def count(self) -> Tensor:
        """How many rows count, as a scalar."""
        return self.mask.sum(dtype=torch.float32)

    def totals(self, space: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """For ``space`` values per row: m (at least 1), m/(m − 1), and 1 if there is a variance (m > 1), else 0."""
        if (space, dtype) not in self._totals:
            total = self.weights(dtype)[0].sum() * space
            less_one = (total - 1).clamp_min(1)
            self._totals[space, dtype] = total.clamp_min(1), total / less_one, (total - 1).clamp(0, 1)
        return self._totals[space, dtype]


class _RowMasked(_BatchNorm):
    """What both layers add to torch's."""

    _rows: _Rows | None = None
    _tickets: Tensor | None = None  # what the kernels count finished programs with, zero between two launches
    _by_batch = 0  # how many batches the input concatenates, each with its own statistics; 0: torch's behaviour

    def forward(
        self,
        x: Tensor,
        *,
        offset: Tensor | None = None,
        keep: Tensor | None = None,
        add: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor:
        """Normalises, by the statistics of the masked rows inside :func:`only_rows`."""
        if self._fuses(x):
            return self._fused(x, offset, keep, add, relu)
        y = self._normalised(x if offset is None else x + _spread(offset, x).to(x.dtype))
        if keep is not None:
            y = y * _spread(keep, x).to(x.dtype)
        if add is not None:
            y = y + add
        return F.relu(y) if relu else y

    def _fuses(self, x: Tensor) -> bool:
        """Whether the kernels cover this: running statistics, and gradients only while training."""
        if not (x.is_cuda and self.affine and self.track_running_stats and self.momentum is not None) or self._by_batch:
            return False
        if not self.training and torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return False
        known = x.ndim in (2, 4) and x.numel() > 0 and x.dtype in _FUSED_TYPES and self.weight.dtype == torch.float32
        return known and kernels.usable(x.device)

    def _fused(self, x: Tensor, offset: Tensor | None, keep: Tensor | None, add: Tensor | None, relu: bool) -> Tensor:
        from ratp.functional.kernels import norm

        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        if not self.training:
            fixed = self.running_mean, self.running_var, self.weight, self.bias
            return norm.infer(x, *fixed, self.eps, offset=offset, keep=keep, add=add, relu=relu)
        mask = count = None
        if self._rows is not None:
            self._rows.check(x)
            mask, count = self._rows.mask, self._rows.count
        elif x.numel() == x.shape[1]:
            raise ValueError(f"expected more than one value per channel while training, got {tuple(x.shape)}.")
        running = self.running_mean, self.running_var, self.num_batches_tracked
        tickets = self._tickets
        if tickets is None or tickets.device != x.device:
            tickets = torch.zeros(self.num_features, dtype=torch.int32, device=x.device)
            if not torch.cuda.is_current_stream_capturing():  # a graph writes its zeros only when it is replayed
                self._tickets = tickets
        options = tickets, self.momentum, self.eps, relu
        return norm.Normalise.apply(  # type: ignore[no-any-return]
            x, self.weight, self.bias, offset, add, keep, mask, count, running, *options
        )

    def _normalised(self, x: Tensor) -> Tensor:
        rows = self._rows
        if self._by_batch:
            self._check_input_dim(x)  # type: ignore[no-untyped-call]
            if self._by_batch > 1:
                return _by_parts(x, self._by_batch, self.weight, self.bias, self.eps)
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        if rows is None or not (self.training or self.running_mean is None):
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        rows.check(x)
        dtype, space = torch.promote_types(x.dtype, torch.float32), math.prod(x.shape[2:])
        with torch.no_grad():
            mean, variance = _statistics(x.to(dtype), rows.weights(dtype)[1])
            usual_mean, usual_variance = self.running_mean, self.running_var
            if usual_mean is None or usual_variance is None:
                usual_mean, usual_variance = torch.zeros_like(mean), torch.ones_like(variance)
            # Where no row counts, the running statistics keep the numbers finite; nothing depends on them.
            some = rows.weights(dtype)[2]
            mean, variance = usual_mean.to(dtype).lerp(mean, some), usual_variance.to(dtype).lerp(variance, some)
            if self.training:
                self._track(mean, variance, rows, space)
            invstd = (variance + self.eps).rsqrt()
        total, counts = rows.totals(space, dtype)[0], rows.weights(dtype)[0]
        return _Normalise.apply(x, self.weight, self.bias, counts, mean, invstd, total)  # type: ignore[no-any-return]

    def _track(self, mean: Tensor, variance: Tensor, rows: _Rows, space: int) -> None:
        """Updates the running statistics; none of them where no row counts, no variance for a single value."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        dtype = self.running_mean.dtype
        some = rows.weights(mean.dtype)[2]
        _, correction, enough = rows.totals(space, mean.dtype)
        self.num_batches_tracked.add_(some.long())
        momentum: float | Tensor | None = self.momentum
        if momentum is None:
            momentum = self.num_batches_tracked.clamp_min(1).to(mean.dtype).reciprocal()
        # r ← r + momentum·(s − r), with the unbiased variance. Like torch's own update it bypasses autograd, which
        # would otherwise see a change to what an earlier, unmasked pass through this layer saved for its gradient.
        self.running_mean.data.lerp_(mean.to(dtype), (some * momentum).to(dtype))
        self.running_var.data.lerp_((variance * correction).to(dtype), (enough * momentum).to(dtype))


class BatchNorm1d(_RowMasked, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` that :func:`only_rows` can restrict."""


class BatchNorm2d(_RowMasked, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` that :func:`only_rows` can restrict."""


def only_rows(module: nn.Module, mask: Tensor | None) -> AbstractContextManager[None]:
    """Restricts batch statistics inside ``module`` to the rows of ``mask`` (bool, (n,)) within the block; None: all."""
    rows = None if mask is None else _Rows(mask)
    return _changed([(layer, "_rows", rows) for layer in module.modules() if isinstance(layer, _RowMasked)])


def by_batch(module: nn.Module, batches: int = 1) -> AbstractContextManager[None]:
    """Normalises with the statistics of the batch, in every BatchNorm layer inside ``module`` within the block.

    This holds in both modes. Running statistics are neither used nor changed. The input concatenates ``batches`` of the
    same size, each with its own statistics; with several, all layers must be of this file.
    """
    changes: list[tuple[nn.Module, str, Any]] = []
    for layer in batch_norms(module).values():
        if isinstance(layer, _RowMasked):
            changes.append((layer, "_by_batch", batches))
        else:  # torch's layers use the statistics of the batch if they have no running ones
            changes += [(layer, name, None) for name in _RUNNING] + [(layer, "track_running_stats", False)]
    return _changed(changes)


@contextmanager
def recounting(module: nn.Module) -> Iterator[None]:
    """Recomputes the running statistics of every BatchNorm layer inside ``module`` within the block.

    They become the plain mean over all batches passed, each of which is normalised by its own; the rest of ``module``
    is in evaluation mode, so no dropout blurs them.
    """
    layers = batch_norms(module).values()
    for layer in layers:
        layer.reset_running_stats()
    modes = [(part, "training", False) for part in module.modules() if not isinstance(part, _BatchNorm)]
    counting = [(layer, name, value) for layer in layers for name, value in (("training", True), ("momentum", None))]
    with _changed([*modes, *counting]):
        yield


@contextmanager
def _changed(changes: list[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Sets attributes of layers, given as layer, name and value, within the block."""
    before = [(layer, name, getattr(layer, name)) for layer, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        yield
    finally:
        for change in before:
            setattr(*change)


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Finds all BatchNorm layers inside ``module``, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


def affine_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Finds γ and β of all BatchNorm, LayerNorm and GroupNorm layers inside ``module``, by name, in their order.

    Frozen ones are left out.
    """
    return {
        f"{name}.{kind}".lstrip("."): parameter
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm | nn.LayerNorm | nn.GroupNorm)
        for kind, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad
    }


def supports_row_masks(module: nn.Module) -> bool:
    """Whether :func:`only_rows` can restrict every layer of ``module`` that mixes rows of a batch while training."""
    return all(
        isinstance(layer, _RowMasked)
        or not (isinstance(layer, _BatchNorm) or any(getattr(layer, name, None) is not None for name in _RUNNING))
        for layer in module.modules()
    )


def _statistics(x: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel over the rows that count; ``shares`` is 1/n for these, else 0."""
    if x.ndim == 2:
        mean = (x * shares).sum(dim=0)
        return mean, ((x - mean).square_() * shares).sum(dim=0)
    variances, means = torch.var_mean(x, dim=tuple(range(2, x.ndim)), correction=0)
    mean = (means * shares).sum(dim=0)
    # σ² = Σ (σ_i² + (μ_i − μ)²) / n
    distance = means.sub_(mean)
    return mean, (variances.addcmul_(distance, distance) * shares).sum(dim=0)


def _by_parts(x: Tensor, parts: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """γ·(x − μ)/σ + β, with μ and σ computed separately for each of ``parts`` equal parts of the rows."""
    split = x.view(parts, -1, *x.shape[1:])
    wide = split.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, dim=(1, *range(3, wide.ndim)), correction=0, keepdim=True)
    shape = 1, 1, -1, *(1,) * (x.ndim - 2)
    scale = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.view(shape)
    shift = -mean * scale if bias is None else bias.view(shape) - mean * scale
    return torch.addcmul(shift, wide, scale).to(x.dtype).view(x.shape)


class _Normalise(torch.autograd.Function):
    """y = γ·(x − μ)/σ + β for all rows, with μ and σ of the rows that count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *statistics: Tensor) -> Tensor:
        """Normalises x (n, c, …); the statistics are 1 or 0 per row (n, 1), μ, 1/σ and the values per channel."""
        ctx.save_for_backward(x, weight, *statistics)
        _, mean, invstd, _ = statistics
        scale = invstd if weight is None else invstd * weight
        shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
        return torch.addcmul(_spread(shift, x), x, _spread(scale, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of x, γ and β."""
        x, weight, counts, mean, invstd, total = ctx.saved_tensors
        # Σ dy and Σ dy·(x − μ); dy is zero where a row does not count
        axes = (0, *range(2, x.ndim))
        sum_dy, sum_dy_x = dy.sum(dim=axes), (dy * (x - _spread(mean, x))).sum(dim=axes)
        d_weight = sum_dy_x * invstd
        dx = None
        if ctx.needs_input_grad[0]:
            # dx = γ/σ·(dy − (Σdy + (x − μ)/σ²·Σdy(x − μ))/m) where a row counts
            scale = invstd if weight is None else invstd * weight
            share = counts / total
            slope = scale * invstd * d_weight
            shift = torch.addcmul(slope * mean, scale, sum_dy, value=-1)
            dx = torch.addcmul(_spread(share * shift, x), x, _spread(share * slope, x), value=-1)
            dx = dx.addcmul_(dy, _spread(scale, x)).to(x.dtype)
        kind = invstd.dtype if weight is None else weight.dtype
        d_weight = d_weight.to(kind) if ctx.needs_input_grad[1] else None
        d_bias = sum_dy.to(kind) if ctx.needs_input_grad[2] else None
        return dx, d_weight, d_bias, None, None, None, None


def _spread(values: Tensor, x: Tensor) -> Tensor:
    """Reshapes values (c,) or (n, c) to broadcast with ``x``."""
    values = values if values.ndim == 2 else values[None]
    return values.reshape(*values.shape, *(1,) * (x.ndim - 2))
