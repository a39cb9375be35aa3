"""AuCID — LDAuCID, "Lifelong Domain Adaptation via Consolidated Internal Distribution", NeurIPS 2021.

What the classifier has learnt is kept as a Gaussian mixture of embeddings, a component for each class; targets are
drawn to it.

* Source stage: cross-entropy. Then the mixture is fitted to the embeddings of correctly classified images
  (:mod:`ratp.parts.mixture`), and each class's images of largest posterior go to the memory.
* Target stage, with images x, exemplars m and points g drawn from the mixture:
  CE(g) + CE(m) + λ·[SW(x, g) + SW(x, m) + SW(m, g)], SW the sliced Wasserstein distance of embeddings
  (:mod:`ratp.parts.sliced_wasserstein`). Everything learns.
* After a target: the mixture is fitted anew to images the model is confident about, by its predictions; a class with
  fewer than two of them keeps its component. Of these images each class's best go to the memory.

Departures from the published code:

* **It reads target labels**: batches of a target are balanced by true labels, the mixture is fitted to images that are
  predicted right, and true labels go to the memory. Here predictions of confidence above τ take their place; the
  published code has τ but does not use it.
* Embeddings are the network's z, not a layer of K units. Covariances are shrunk (Ledoit–Wolf) and get a ridge, for a
  class may have fewer images than z has dimensions.
* Sets of different size are compared by quantiles, not by bins of sums. The distances share one draw of directions.
* λ is 0.1: there 0.01 times a factor 10 inside the distance. Components give as many points each.
* The source is learnt by the harness's SGD, targets by Adam at the published rate; batches are the recipe's.
* The memory is that of the comparison, of fixed size. Exemplars pass in a batch of their own, and move BatchNorm's
  running statistics as the target does: without that it forgets more on PACS (``docs/benchmarks.md``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.domain import LabelledDomain, UnlabelledDomain
from ratp.method import Setting, pack, unpack
from ratp.parts.adam import Adam
from ratp.parts.mixture import Mixture, fit_mixture, load_mixture
from ratp.parts.ranks import ranks_within
from ratp.parts.scores import scores
from ratp.parts.sgd import SGDConfig
from ratp.parts.sliced_wasserstein import draw_directions, sorted_distance, sorted_projections
from ratp.phase import Phase
from ratp.training import Batches, NetworkMethod, SupervisedPhase, look


@dataclass(frozen=True)
class AuCIDConfig:
    """Switches of AuCID."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser on the source")
    rate: float = switch(1e-4, "learning rate of Adam on targets, constant", minimum=0, below=3.4e38)
    distance_weight: float = switch(0.1, "λ, weight of the distances", minimum=0)
    directions: int = switch(100, "random directions a step", minimum=1)
    samples: int = switch(20, "points drawn from the mixture for each image of a batch", minimum=1)
    confidence: float = switch(0.9, "τ, confidence above which a prediction counts as a label", minimum=0, maximum=1)
    ridge: float = switch(1e-3, "added to the diagonal of every covariance", above=0)
    replay: Literal["separate", "none"] = switch("separate", "a memory batch beside each batch, or no replay")


def best_of_classes(values: Tensor, labels: Tensor, count: int) -> Tensor:
    """Positions of at most ``count`` samples of each class with the largest values, class by class, best first."""
    order = values.argsort(descending=True, stable=True)
    order = order[labels[order].argsort(stable=True)]
    return order[ranks_within(labels[order]) < count]


class AuCID(NetworkMethod):
    """Targets drawn to a Gaussian mixture of what was learnt.

    Attributes:
        mixture: What was learnt, in the space of embeddings; None before the source.
    """

    name = "aucid"
    title = "AuCID: lifelong adaptation by a consolidated internal distribution"
    family = "continual domain adaptation"
    paper = "Rostami, Lifelong Domain Adaptation via Consolidated Internal Distribution, NeurIPS 2021"
    needs = "memory, a mixture of embeddings, many passes over a target"
    config_type = AuCIDConfig
    config: AuCIDConfig

    def __init__(self, setting: Setting, config: AuCIDConfig) -> None:
        super().__init__(setting, config)
        self.mixture: Mixture | None = None

    def source_phases(self, domain: LabelledDomain) -> Sequence[Phase]:
        """One phase of cross-entropy."""
        return [SupervisedPhase(self.setting, self.network, domain, self.config.sgd, finish=self._finish_source)]

    def target_phases(self, domain: UnlabelledDomain) -> Sequence[Phase]:
        """One phase with exemplars and points of the mixture beside every batch."""
        return [AuCIDPhase(self, domain.images)]

    def _finish_source(self, domain: LabelledDomain) -> dict[str, float]:
        embedding, probabilities = look(self.network, self.setting, domain.images)
        right = probabilities.argmax(dim=1) == domain.labels
        self._fit(embedding[right], domain.labels[right])
        # Images that are classified wrong come last: where a class has too few others.
        values = self._certainty(embedding).masked_fill(~right, -torch.inf)
        self._store(domain.images, domain.labels, values)
        return self._record()

    def finish_target(self, images: Tensor) -> dict[str, float]:
        """Fits the mixture to what the model is sure about, and stores the best of it."""
        embedding, probabilities = look(self.network, self.setting, images)
        confidence, predicted = probabilities.max(dim=1)
        sure = confidence > self.config.confidence
        self._fit(embedding[sure], predicted[sure])
        if bool(sure.any()):
            self._store(images[sure], predicted[sure], self._certainty(embedding[sure]))
        else:
            self.memory.seen += 1  # a domain nothing is kept of
        return {"confident": sure.float().mean().item()} | self._record()

    def _fit(self, embedding: Tensor, labels: Tensor) -> None:
        self.mixture = fit_mixture(embedding, labels, self.network.classes, self.config.ridge, self.mixture)

    def _certainty(self, embedding: Tensor) -> Tensor:
        assert self.mixture is not None
        return self.mixture.certainty(embedding)

    def _store(self, images: Tensor, labels: Tensor, values: Tensor) -> None:
        """Puts the images of largest values into the memory."""
        quota = self.memory.quota(self.memory.seen + 1)
        best = best_of_classes(values, labels, max(quota, 1))
        # All equally near to their mean, the images stay in their order.
        self.memory.add(images[best], labels[best], torch.zeros(len(best), 1, device=images.device), "nearest")

    def _record(self) -> dict[str, float]:
        assert self.mixture is not None
        return {"exemplars": float(len(self.memory)), "components": float(len(self.mixture.components))}

    def state(self) -> dict[str, Tensor]:
        """Network, memory and mixture."""
        return super().state() | ({} if self.mixture is None else pack({"mixture": self.mixture.state()}))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        parts = unpack(state)
        self.mixture = load_mixture(parts["mixture"], self.setting.device) if "mixture" in parts else None


class AuCIDPhase(Phase):
    """A target drawn to the mixture.

    Args:
        method: Whose network, mixture and memory.
        images: All training images of the domain, uint8.
    """

    name = "target"
    captures = True

    def __init__(self, method: AuCID, images: Tensor) -> None:
        setting, recipe, config, stage = method.setting, method.setting.recipe, method.config, method.stage
        self.epochs, self.steps = recipe.epochs, recipe.steps
        self._method, self._config, self._network, self._memory = method, config, method.network, method.memory
        self._count = recipe.batch
        unknown = torch.zeros(len(images), dtype=torch.int64)
        self._batches = Batches(setting, "target", stage, images, unknown)
        self._dropout, self._points, self._slices = (
            setting.generator(name, stage) for name in ("dropout", "mixture", "directions")
        )
        mixture = method.mixture
        self._mixture = mixture if mixture is not None and mixture.components else None
        self._replays = config.replay == "separate" and len(self._memory) > 1  # one image has no batch statistics
        self.generators = *self._batches.generators, self._dropout, self._slices
        if self._mixture is not None:
            self.generators = *self.generators, self._points
        self._optimiser = Adam(self._network.parameters(), config.rate)

    def begin_epoch(self, epoch: int) -> dict[str, float]:
        """Nothing changes from epoch to epoch."""
        if epoch == 0:
            self._network.use_generator(self._dropout)
        return {"lr": self._config.rate}

    def step(self) -> dict[str, Tensor]:
        """One update on a batch, with exemplars and points of the mixture."""
        config, network = self._config, self._network.train()
        directions = draw_directions(config.directions, network.config.dim, self._slices)
        batch = self._batches.draw(self._count)
        sets, terms = [network(batch.images).embedding], {}
        if self._mixture is not None:
            each = -(-config.samples * self._count // len(self._mixture.components))
            points, classes = self._mixture.sample(each, self._points)
            terms["mixture"] = F.cross_entropy(scores(points, network.prototypes), classes)
            sets.append(points)
        if self._replays:
            stored = self._batches.draw_memory(self._memory, self._count)
            output = network(stored.images)
            terms["replay"] = F.cross_entropy(output.logits, stored.labels)
            sets.append(output.embedding)
        ordered = [sorted_projections(points, directions) for points in sets]
        # λ·[SW(x, g) + SW(x, m) + SW(m, g)], of those there are
        distances = [sorted_distance(one, other) for i, one in enumerate(ordered) for other in ordered[:i]]
        if not distances:  # neither mixture nor memory: nothing to be drawn to
            return {"total": directions.new_zeros(())}
        terms["distance"] = config.distance_weight * torch.stack(distances).sum()
        total = torch.stack(list(terms.values())).sum()
        self._optimiser.minimise(total)
        return {"total": total, **terms}

    def finish(self) -> dict[str, float]:
        """Fits the mixture anew and chooses exemplars."""
        return self._method.finish_target(self._batches.images)
