"""1×1 convolutions that only infer, with BatchNorm, addition and ReLU: y = relu(γ·(x·Wᵀ − μ)/σ + β + add).

Maps are matrices with a row per pixel and a column per channel, which is the memory layout ``channels_last``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ratp.functional.kernels.common import DeviceKernel
from ratp.functional.kernels.norm import dense

# Rows, most columns and inputs of a tile; warps, stages and registers, so few that two programs share a multiprocessor.
ROWS, COLUMNS, INPUTS, WARPS, STAGES, REGISTERS = 128, 128, 64, 8, 3, 128


@DeviceKernel
@triton.jit
def _pointwise_kernel(
    x, weight, mean, variance, gamma, beta, add, y, rows, inputs, outputs, eps,
    ADD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    across = outputs // BC  # programs of the same rows are neighbours and find x in the cache
    r = tl.program_id(0) // across * BR + tl.arange(0, BR)
    c = tl.program_id(0) % across * BC + tl.arange(0, BC)
    k = tl.arange(0, BK)
    inside = (r < rows)[:, None]
    left = x + r[:, None].to(tl.int64) * inputs + k[None, :]
    right = weight + c[None, :] * inputs + k[:, None]
    total = tl.zeros([BR, BC], tl.float32)
    for start in range(0, inputs, BK):
        total = tl.dot(tl.load(left + start, mask=inside, other=0.0), tl.load(right + start), total)
    scale = tl.load(gamma + c) / tl.sqrt(tl.load(variance + c) + eps)
    shift = tl.load(beta + c) - tl.load(mean + c) * scale
    total = total * scale[None, :] + shift[None, :]
    at = r[:, None].to(tl.int64) * outputs + c[None, :]
    if ADD:
        total += tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.where(total > 0, total, tl.where(total <= 0, 0.0, total))  # NaN stays NaN
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


def fits(x: Tensor, weight: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether the kernel covers this: whole tiles of a 1×1 kernel in bfloat16."""
    outputs, inputs, *window = weight.shape
    plain = window == [1, 1] and stride == (1, 1) and x.dtype == torch.bfloat16
    return plain and inputs % INPUTS == 0 and outputs % min(COLUMNS, 64) == 0


def infer(
    x: Tensor,  # shape (n, inputs, height, width)
    weight: Tensor,  # shape (outputs, inputs, 1, 1)
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    add: Tensor | None = None,  # shape (n, outputs, height, width)
) -> Tensor:
    """Computes all of this with given statistics; records no gradient."""
    x, weight = dense(x), weight.to(x.dtype)
    outputs, inputs = weight.shape[:2]
    rows = x.numel() // inputs
    y = torch.empty(
        x.shape[0], outputs, *x.shape[2:], dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    )
    wide = COLUMNS if outputs % COLUMNS == 0 else 64
    _pointwise_kernel[(triton.cdiv(rows, ROWS) * (outputs // wide),)](
        x, weight, mean, variance, gamma, beta, x if add is None else dense(add), y, rows, inputs, outputs, eps,
        ADD=add is not None, BR=ROWS, BC=wide, BK=INPUTS,
        num_warps=WARPS, num_stages=STAGES, maxnreg=REGISTERS,
    )  # fmt: skip
    return y
