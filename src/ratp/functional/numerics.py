"""Numerical helpers: chunked work, exact matrix products, beta-distributed numbers, ranks, k-means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ratp._core.environment import SharedContext

_EXACT = ("ieee", "none")
# Probability that rejection sampling accepts no pair for a number and falls back on a rejected one.
FAILURE = 1e-12
# Kinds of devices that have no float64: Apple's GPUs.
WITHOUT_DOUBLE = ("mps",)
# A draw of indices: population and count.
Draw = tuple[int, int]


def in_chunks(function: Callable[[slice], tuple[Tensor, ...]], count: int, chunk: int) -> tuple[Tensor, ...]:
    """Returns the results of ``function`` over all rows, chunk by chunk.

    The function maps a slice of rows to tensors with one row each; without rows, it is called once, for an empty slice.
    When the GPU runs out of memory, the chunk is halved and the function called again for the rows it failed on.
    """
    results: tuple[Tensor, ...] | None = None
    start = 0
    while results is None or start < count:
        rows = slice(start, min(start + chunk, count))
        try:
            part = function(rows)
        except torch.cuda.OutOfMemoryError:
            if rows.stop - rows.start <= 1:
                raise
            chunk = (rows.stop - rows.start) // 2
            continue
        if rows.stop - rows.start == count:
            return part
        if results is None:
            results = tuple(tensor.new_empty((count, *tensor.shape[1:])) for tensor in part)
        for whole, tensor in zip(results, part, strict=True):
            whole[rows] = tensor
        start = rows.stop
    return results


def sum_type(device: torch.device) -> torch.dtype:
    """Returns the type for sums that stay on a device: float64, or float32 where a device has no other."""
    return torch.float32 if device.type in WITHOUT_DOUBLE else torch.float64


def doubled(values: Tensor) -> Tensor:
    """Returns values in float64: on their device, or on the CPU if that has no float64."""
    return (values if sum_type(values.device) == torch.float64 else values.cpu()).double()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Multiplies float32 matrices in float32 within the block, never in TF32 or bfloat16.

    Autocast is disabled for this thread only. The other settings belong to the process: the first thread to enter
    tightens them, the last one to leave restores them. Until then, other threads compute at least as precisely.
    """
    with _exact_products, torch.autocast(device.type, enabled=False):
        yield


def _forbid_less(back: ExitStack) -> None:
    """Disables reduced precision through both of PyTorch's interfaces."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    for backend in backends:
        if backend.fp32_precision not in _EXACT:
            back.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # cannot describe what was set through the newer interface
        precision = "highest"
    if precision != "highest":
        back.callback(torch.set_float32_matmul_precision, precision)
        torch.set_float32_matmul_precision("highest")
    for backend in backends:
        if backend.fp32_precision not in _EXACT:
            backend.fp32_precision = "ieee"


_exact_products = SharedContext(_forbid_less)


def beta_numbers(a: float, b: float, count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draws numbers from Beta(a, b), shape (count,), float32, without reading anything back from the device.

    Torch's own sampler takes no generator. This is Jöhnk's method: for uniform u and v, x = u^{1/a} and y = v^{1/b} are
    accepted if x + y ≤ 1, and x/(x + y) is then beta-distributed. It draws a fixed number of pairs per number, enough
    that one is practically always accepted: 7 for a = b = 0.1, 40 for 1, 152 for 2. Without a generator, it uses
    torch's own one on ``device``.
    """
    # P(x + y ≤ 1) = Γ(1+a)·Γ(1+b)/Γ(1+a+b)
    accepted = math.exp(math.lgamma(1 + a) + math.lgamma(1 + b) - math.lgamma(1 + a + b))
    pairs = max(1, math.ceil(math.log(FAILURE) / math.log1p(-accepted)))
    uniform = torch.rand(2, pairs, count, generator=generator, device=device)
    # In logarithms, because u^10 soon underflows: log x = log(u)/a, with u in (0, 1]
    log_x, log_y = (1 - uniform[0]).log() / a, (1 - uniform[1]).log() / b
    kept = torch.logaddexp(log_x, log_y) <= 0
    first = kept.to(torch.uint8).argmax(dim=0, keepdim=True)
    # x/(x + y) = σ(log x − log y)
    return (log_x - log_y).gather(0, first).squeeze(0).sigmoid()


def ranks_within(groups: Tensor, order: Tensor | None = None) -> Tensor:
    """Ranks each element within its own group: 0, 1, 2, … in every group; groups (n,) are whole numbers from 0.

    ``order`` are the positions of all elements, best first; None: their present order.
    """
    place = torch.arange(len(groups), device=groups.device)
    order = place if order is None else order
    order = order[groups[order].argsort(stable=True)]
    sizes = groups.bincount()
    ranks = torch.empty_like(place)
    ranks[order] = place - (sizes.cumsum(0) - sizes)[groups[order]]
    return ranks


def kmeans(points: Tensor, centres: int, iterations: int = 100) -> Tensor:
    """Finds the centres of several sets of points at once, shape (g, centres, d); deterministic.

    The first centre is a set's first point, each further one the point farthest from those before. With fewer points
    than centres, points repeat. A centre that is nearest to no point does not move.
    """
    with full_precision(points.device):
        points = points.float()
        found = points[:, :1]
        for _ in range(1, centres):
            farthest = _distances(points, found).amin(dim=2).argmax(dim=1)[:, None, None]
            found = torch.cat([found, points.gather(1, farthest.expand(-1, 1, points.shape[2]))], dim=1)
        last: Tensor | None = None
        for _ in range(iterations):
            nearest = _distances(points, found).argmin(dim=2)
            if last is not None and torch.equal(nearest, last):
                break
            last = nearest
            members = torch.nn.functional.one_hot(nearest, centres).to(points.dtype)
            sizes = members.sum(dim=1)[:, :, None]
            found = torch.where(sizes > 0, members.mT @ points / sizes.clamp_min(1), found)
        return found


def _distances(points: Tensor, centres: Tensor) -> Tensor:
    """Squared distances (g, n, c), clamped at zero against rounding."""
    squares = points.square().sum(dim=2)[:, :, None] + centres.square().sum(dim=2)[:, None, :]
    return (squares - 2 * points @ centres.mT).clamp_min(0)


def drawn(draws: Sequence[Draw], own: int, generator: torch.Generator) -> Tensor:
    """Draws indices; those of a second draw are the memory's, which begin at ``own``."""
    found = [torch.randint(population, (n,), generator=generator, device=generator.device) for population, n in draws]
    return found[0] if len(found) == 1 else torch.cat([found[0], own + found[1]])
