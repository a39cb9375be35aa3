"""AuCID — LDAuCID, "Lifelong Domain Adaptation via Consolidated Internal Distribution", NeurIPS 2021.

A Gaussian mixture of embeddings, one component per class, stores what the classifier has learned; training pulls
targets towards it.

* Source stage: cross-entropy. Then the mixture is fitted to the embeddings of correctly classified images, and each
  class's images of largest posterior enter the memory.
* Target stage, with images x, exemplars m and points g sampled from the mixture:
  CE(g) + CE(m) + λ·[SW(x, g) + SW(x, m) + SW(m, g)], where SW is the sliced Wasserstein distance of embeddings.
  All parameters learn.
* After a target: the mixture is fitted again, to images that the model is confident about, by its predictions; a class
  with fewer than two of them keeps its component. Each class's best of these images enter the memory.

The sliced distance is the mean over random directions of ∫ (F⁻¹(u) − G⁻¹(u))² du, the squared 2-Wasserstein distance of
the projections. For sets of equal size this is the mean squared difference of the sorted points; otherwise the smaller
set's quantiles are interpolated at the levels of the larger set's points, (i + ½)/m.

Deviations from the published code:

* **The original reads target labels**: batches of a target are balanced by true labels, the mixture is fitted to
  correctly predicted images, and true labels enter the memory. Here predictions of confidence above τ replace them; the
  published code has τ but does not use it.
* Embeddings are the network's z, not a layer of K units. A class may have fewer images than z has dimensions, so
  covariances are shrunk (Ledoit and Wolf, 2004) and get a ridge.
* Sets of different size are compared by quantiles, not by bins of sums. The distances share one draw of directions.
* λ is 0.1; the original has 0.01 and a factor of 10 inside the distance. All components give equally many points.
* The source is learned by the recipe's SGD, targets by Adam at the published rate, in batches of the recipe's size.
* The memory is that of the comparison, of fixed size. Exemplars form their own batch and update BatchNorm's running
  statistics like the target: otherwise the method forgets more on PACS (``docs/explanation/benchmarks.md``).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.functional.numerics import doubled, ranks_within, sum_type
from ratp.functional.optim import Adam, SGDConfig
from ratp.training.method import Setting, pack, unpack
from ratp.training.phase import Phase
from ratp.training.phases import NetworkMethod, NetworkPhase, SupervisedPhase, embed_all

# Fewest points that have a covariance.
FEWEST = 2
# Torch loads its GPU linear algebra at the first call, and fails if two threads make that call at once.
_LINEAR_ALGEBRA = threading.Lock()


def ledoit_wolf(points: Tensor) -> Tensor:
    """Estimates the covariance of points (n, d), shrunk towards a multiple of the identity: (1 − δ)·S + δ·μ·I."""
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
    """A Gaussian mixture with at most one component per class."""

    means: Tensor  # μ, shape (classes, d)
    roots: Tensor  # L, lower triangular, with covariances Σ = L·Lᵀ, shape (classes, d, d)
    known: tuple[bool, ...]  # which classes have a component, on the host

    @property
    def components(self) -> list[int]:
        """Returns the classes that have a component."""
        return [index for index, known in enumerate(self.known) if known]

    def log_densities(self, points: Tensor) -> Tensor:
        """Computes log N(z; μ_k, Σ_k) of points (n, d) in double, shape (n, classes); −∞ without a component."""
        points = doubled(points)
        logs = points.new_full((len(points), len(self.known)), -torch.inf)
        for k in self.components:
            root = doubled(self.roots[k])
            # ½‖L⁻¹(z − μ)‖² + Σ log L_ii + d/2·log 2π
            centred = (points - doubled(self.means[k])).T
            with _LINEAR_ALGEBRA:
                white = torch.linalg.solve_triangular(root, centred, upper=False)
            volume = root.diagonal().log().sum() + points.shape[1] / 2 * math.log(2 * math.pi)
            logs[:, k] = -white.square().sum(dim=0) / 2 - volume
        return logs

    def certainty(self, points: Tensor) -> Tensor:
        """Computes the log-odds of each point's likeliest component against all others, shape (n,).

        It orders points as the posterior does, which rounds to 1 in many dimensions. It is 0 without components.
        """
        logs = self.log_densities(points)
        best, place = logs.max(dim=1, keepdim=True)
        rest = logs.scatter(1, place, -torch.inf).logsumexp(dim=1)
        odds = torch.nan_to_num(best.squeeze(1) - rest, nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        return odds.to(points.device, sum_type(points.device))

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws ``count`` points per component, shape (c·count, d), and returns them with their classes."""
        means, roots, classes = self._sampled
        noise = torch.randn(len(classes), count, means.shape[1], generator=generator, device=means.device)
        # z = μ + L·n,  n ~ N(0, I)
        points = means[:, None] + noise @ roots.mT
        return points.flatten(0, 1), classes.repeat_interleave(count, output_size=len(classes) * count)

    @cached_property
    def _sampled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns means, roots and classes of the components; cached, since it copies data from the host."""
        classes = torch.tensor(self.components, dtype=torch.int64, device=self.means.device)
        return self.means[classes], self.roots[classes], classes

    def state(self) -> dict[str, Tensor]:
        """Returns the mixture as tensors."""
        return {"means": self.means, "roots": self.roots, "known": torch.tensor(self.known)}


def load_mixture(state: Mapping[str, Tensor], device: torch.device) -> Mixture:
    """Builds the mixture whose :meth:`Mixture.state` is given."""
    return Mixture(state["means"].to(device), state["roots"].to(device), tuple(state["known"].tolist()))


def fit_mixture(points: Tensor, labels: Tensor, classes: int, ridge: float, previous: Mixture | None = None) -> Mixture:
    """Fits a component per class to points (n, d), ignoring non-finite ones; ``ridge`` is added to every diagonal.

    A class with fewer than two points, or whose covariance has no Cholesky factor, keeps its ``previous`` component.
    """
    dim = points.shape[1]
    if previous is None:
        nothing = points.new_zeros(classes, dim, dtype=torch.float32)
        previous = Mixture(nothing, nothing.new_zeros(classes, dim, dim), (False,) * classes)
    means, roots = previous.means.clone(), previous.roots.clone()
    finite, known = points.isfinite().all(dim=1), list(previous.known)
    for k in range(classes):
        own = doubled(points[finite & (labels == k)])
        if len(own) < FEWEST:
            continue
        covariance = ledoit_wolf(own) + ridge * torch.eye(dim, dtype=own.dtype, device=own.device)
        with _LINEAR_ALGEBRA:
            root, failed = torch.linalg.cholesky_ex(covariance)
        if not bool(failed) and bool(root.float().isfinite().all()):
            means[k], roots[k], known[k] = own.mean(dim=0), root, True
    return Mixture(means, roots, tuple(known))


def draw_directions(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draws unit vectors uniformly on the sphere, shape (count, dim)."""
    return F.normalize(torch.randn(count, dim, generator=generator, device=generator.device), dim=1)


def sorted_projections(points: Tensor, directions: Tensor) -> Tensor:
    """Projects points (n, d) on directions (p, d) and sorts along each, shape (n, p)."""
    return (points @ directions.T).sort(dim=0).values


def sorted_distance(some: Tensor, others: Tensor) -> Tensor:
    """Computes the squared 2-Wasserstein distance of sorted columns, (n, p) and (m, p), averaged over columns."""
    size = max(len(some), len(others))
    return (_quantiles(some, size) - _quantiles(others, size)).square().mean()


def _quantiles(ordered: Tensor, count: int) -> Tensor:
    """Interpolates sorted columns (n, p) at ``count`` levels, shape (count, p).

    A matrix product does it, because the gradient of a gather is summed in no fixed order.
    """
    own = len(ordered)
    if own == count:
        return ordered
    kind, device = sum_type(ordered.device), ordered.device
    levels = (torch.arange(count, dtype=kind, device=device) + 0.5) / count
    places = (levels * own - 0.5).clamp(0, own - 1)
    points = torch.arange(own, dtype=kind, device=device)
    # weight of point j at position x: max(1 − |x − j|, 0)
    weights = (1 - (places[:, None] - points[None, :]).abs()).clamp_min(0)
    return weights.to(ordered.dtype) @ ordered


@dataclass(frozen=True)
class AuCIDConfig:
    """Switches of AuCID."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser on the source")
    rate: float = switch(1e-4, "learning rate of Adam on targets, constant", minimum=0, below=3.4e38)
    distance_weight: float = switch(0.1, "λ, weight of the distances", minimum=0)
    directions: int = switch(100, "random directions per step", minimum=1)
    samples: int = switch(20, "points sampled from the mixture per image of a batch", minimum=1)
    confidence: float = switch(0.9, "τ, confidence above which a prediction counts as a label", minimum=0, maximum=1)
    ridge: float = switch(1e-3, "added to the diagonal of every covariance", above=0)
    replay: Literal["separate", "none"] = switch("separate", "a memory batch with each batch, or no replay")


def best_of_classes(values: Tensor, labels: Tensor, count: int) -> Tensor:
    """Returns the positions of each class's ``count`` largest values, class by class, best first."""
    order = values.argsort(descending=True, stable=True)
    order = order[labels[order].argsort(stable=True)]
    return order[ranks_within(labels[order]) < count]


class AuCID(NetworkMethod):
    """Pulls targets towards a Gaussian mixture of what the classifier has learned."""

    name = "aucid"
    title = "AuCID: lifelong adaptation by a consolidated internal distribution"
    family = "continual domain adaptation"
    paper = "Rostami, Lifelong Domain Adaptation via Consolidated Internal Distribution, NeurIPS 2021"
    needs = "exemplars, a mixture of embeddings, many passes over a target"
    config_type = AuCIDConfig
    config: AuCIDConfig

    def __init__(self, setting: Setting, config: AuCIDConfig) -> None:
        super().__init__(setting, config)
        self.mixture: Mixture | None = None  # the mixture, in the space of embeddings; None before the source stage

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """Returns one phase of cross-entropy."""
        return [SupervisedPhase(self.setting, self.network, domain, self.config.sgd, finish=self._finish_source)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """Returns one phase with exemplars and sampled points with every batch."""
        return [AuCIDPhase(self, domain.images)]

    def _finish_source(self, domain: LabelledDomain) -> dict[str, float]:
        embedding, probabilities = embed_all(self.network, self.setting, domain.images)
        right = probabilities.argmax(dim=1) == domain.labels
        mixture = self._fit(embedding[right], domain.labels[right])
        # Misclassified images come last, for classes with too few others.
        values = mixture.certainty(embedding).masked_fill(~right, -torch.inf)
        self._store(domain.images, domain.labels, values)
        return self._record(mixture)

    def finish_target(self, images: Tensor) -> dict[str, float]:
        """Fits the mixture to confident images and stores the best of them."""
        embedding, probabilities = embed_all(self.network, self.setting, images)
        confidence, predicted = probabilities.max(dim=1)
        sure = confidence > self.config.confidence
        mixture = self._fit(embedding[sure], predicted[sure])
        if bool(sure.any()):
            self._store(images[sure], predicted[sure], mixture.certainty(embedding[sure]))
        else:
            self.memory.seen += 1  # the domain leaves no exemplars
        return {"confident": sure.float().mean().item()} | self._record(mixture)

    def _fit(self, embedding: Tensor, labels: Tensor) -> Mixture:
        self.mixture = fit_mixture(embedding, labels, self.network.classes, self.config.ridge, self.mixture)
        return self.mixture

    def _store(self, images: Tensor, labels: Tensor, values: Tensor) -> None:
        """Puts the images with the largest values into the memory."""
        quota = self.memory.quota(self.memory.seen + 1)
        best = best_of_classes(values, labels, max(quota, 1))
        # With equal features, all images are equally near to their mean and keep their order.
        self.memory.add(images[best], labels[best], torch.zeros(len(best), 1, device=images.device), "nearest")

    def _record(self, mixture: Mixture) -> dict[str, float]:
        return {"exemplars": float(len(self.memory)), "components": float(len(mixture.components))}

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory and mixture."""
        return super().state() | ({} if self.mixture is None else pack({"mixture": self.mixture.state()}))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        parts = unpack(state)
        self.mixture = load_mixture(parts["mixture"], self.setting.device) if "mixture" in parts else None


class AuCIDPhase(NetworkPhase):
    """Pulls a target towards the mixture."""

    captures = True

    def __init__(self, method: AuCID, images: Tensor) -> None:
        config, mixture = method.config, method.mixture
        super().__init__(method, images, None, Adam(method.network.parameters(), config.rate), replay=False)
        self._finish, self._config = method.finish_target, config
        self._points, self._slices = (method.setting.generator(n, method.stage) for n in ("mixture", "directions"))
        self._mixture = mixture if mixture is not None and mixture.components else None
        self._replays = config.replay == "separate" and len(self.memory) > 1  # one image has no batch statistics
        self.generators = *self.generators, self._slices, *([self._points] if self._mixture else [])

    def step(self) -> dict[str, Tensor]:
        """Updates the network once on a batch, exemplars and points sampled from the mixture."""
        config, network = self._config, self.network.train()
        directions = draw_directions(config.directions, network.config.dim, self._slices)
        batch = self.batches.draw(self.batch)
        sets, terms = [network(batch.images).embedding], {}
        if self._mixture is not None:
            each = -(-config.samples * self.batch // len(self._mixture.components))
            points, classes = self._mixture.sample(each, self._points)
            terms["mixture"] = F.cross_entropy(network.classify(points), classes)
            sets.append(points)
        if self._replays:
            stored = self.batches.draw_memory(self.memory, self.batch)
            output = network(stored.images)
            terms["replay"] = F.cross_entropy(output.logits, stored.labels)
            sets.append(output.embedding)
        ordered = [sorted_projections(points, directions) for points in sets]
        # λ·[SW(x, g) + SW(x, m) + SW(m, g)], as far as m and g exist
        distances = [sorted_distance(one, other) for i, one in enumerate(ordered) for other in ordered[:i]]
        if not distances:  # neither mixture nor memory
            return {"total": directions.new_zeros(())}
        terms["distance"] = config.distance_weight * torch.stack(distances).sum()
        return self.minimise(terms)

    def finish(self) -> dict[str, float]:
        """Fits the mixture again and chooses exemplars."""
        return self._finish(self.batches.images)
