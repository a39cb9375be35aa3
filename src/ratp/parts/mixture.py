"""A Gaussian mixture with a component for each class, all of equal weight.

A component has the mean and the covariance of its class's points. There may be fewer points than dimensions, so the
covariance is shrunk as Ledoit and Wolf (2004) have it, and gets a ridge besides.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Points it takes to have a covariance.
FEWEST = 2
# Torch loads its linear algebra for a GPU at the first call, and fails if two threads call for the first time at once.
_LINEAR_ALGEBRA = threading.Lock()


def ledoit_wolf(points: Tensor) -> Tensor:
    """Covariance of points (n, d), n ≥ 1, shrunk towards a multiple of the identity: (1 − δ)·S + δ·μ·I."""
    count, dim = points.shape
    centred = points - points.mean(dim=0)
    sample = centred.T @ centred / count
    identity = torch.eye(dim, dtype=points.dtype, device=points.device)
    # μ = tr S/d;  D² = ‖S − μI‖²;  B² = Σ_i ‖x_i x_iᵀ − S‖²/n² = (Σ_i ‖x_i‖⁴/n − ‖S‖²)/n;  δ = min(B²/D², 1)
    scale = sample.trace() / dim
    distance = (sample - scale * identity).square().sum()
    spread = (centred.square().sum(dim=1).square().mean() - sample.square().sum()) / count
    share = (spread / distance.clamp_min(torch.finfo(points.dtype).tiny)).clamp(0, 1)
    return (1 - share) * sample + share * scale * identity


@dataclass(frozen=True)
class Mixture:
    """Components of some or all classes.

    Attributes:
        means: μ, shape (classes, d).
        roots: L, lower triangular, with covariances Σ = L·Lᵀ, shape (classes, d, d).
        known: Which classes have a component, on the host.
    """

    means: Tensor
    roots: Tensor
    known: tuple[bool, ...]

    @property
    def components(self) -> list[int]:
        """Classes that have a component."""
        return [index for index, known in enumerate(self.known) if known]

    def log_densities(self, points: Tensor) -> Tensor:
        """Logarithms of N(z; μ_k, Σ_k) for points (n, d), shape (n, classes), in double; −∞ for no component."""
        logs = torch.full((len(points), len(self.known)), -torch.inf, dtype=torch.float64, device=points.device)
        for k in self.components:
            root = self.roots[k].double()
            # ½‖L⁻¹(z − μ)‖² + Σ log L_ii + d/2·log 2π
            centred = (points.double() - self.means[k].double()).T
            with _LINEAR_ALGEBRA:
                white = torch.linalg.solve_triangular(root, centred, upper=False)
            volume = root.diagonal().log().sum() + points.shape[1] / 2 * math.log(2 * math.pi)
            logs[:, k] = -white.square().sum(dim=0) / 2 - volume
        return logs

    def certainty(self, points: Tensor) -> Tensor:
        """Log-odds of each point's likeliest component against all others, shape (n,): in the order of its posterior.

        The posterior itself is 1, as far as numbers go, for most points of many dimensions. Without components it is 0.
        """
        logs = self.log_densities(points)
        best, place = logs.max(dim=1, keepdim=True)
        rest = logs.scatter(1, place, -torch.inf).logsumexp(dim=1)
        return torch.nan_to_num(best.squeeze(1) - rest, nan=0.0, posinf=torch.inf, neginf=-torch.inf)

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Points of every component, ``count`` each, and their classes, shapes (c·count, d) and (c·count,)."""
        means, roots, classes = self._sampled
        noise = torch.randn(len(classes), count, means.shape[1], generator=generator, device=means.device)
        # z = μ + L·n,  n ~ N(0, I)
        points = means[:, None] + noise @ roots.mT
        return points.flatten(0, 1), classes.repeat_interleave(count, output_size=len(classes) * count)

    @cached_property
    def _sampled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means, roots and classes of the components there are; made once, for it takes numbers from the host."""
        classes = torch.tensor(self.components, dtype=torch.int64, device=self.means.device)
        return self.means[classes], self.roots[classes], classes

    def state(self) -> dict[str, Tensor]:
        """Everything, as tensors."""
        return {"means": self.means, "roots": self.roots, "known": torch.tensor(self.known)}


def load_mixture(state: Mapping[str, Tensor], device: torch.device) -> Mixture:
    """The mixture whose :meth:`Mixture.state` is given."""
    return Mixture(state["means"].to(device), state["roots"].to(device), tuple(state["known"].tolist()))


def fit_mixture(points: Tensor, labels: Tensor, classes: int, ridge: float, previous: Mixture | None = None) -> Mixture:
    """A component for every class with two points or more; the other classes keep that of before, if they had one.

    So does a class whose covariance is too extreme to be taken apart.

    Args:
        points: Shape (n, d). Those that are no numbers do not count.
        labels: Their classes, shape (n,).
        classes: Number of classes.
        ridge: Added to the diagonal of every covariance; above 0.
        previous: The mixture before.
    """
    dim = points.shape[1]
    if previous is None:
        nothing = points.new_zeros(classes, dim, dtype=torch.float32)
        previous = Mixture(nothing, nothing.new_zeros(classes, dim, dim), (False,) * classes)
    means, roots = previous.means.clone(), previous.roots.clone()
    ridges = ridge * torch.eye(dim, dtype=torch.float64, device=points.device)
    finite, known = points.isfinite().all(dim=1), list(previous.known)
    for k in range(classes):
        own = points[finite & (labels == k)].double()
        if len(own) < FEWEST:
            continue
        covariance = ledoit_wolf(own) + ridges
        with _LINEAR_ALGEBRA:
            root, failed = torch.linalg.cholesky_ex(covariance)
        if not bool(failed) and bool(root.float().isfinite().all()):
            means[k], roots[k], known[k] = own.mean(dim=0), root, True
    return Mixture(means, roots, tuple(known))
