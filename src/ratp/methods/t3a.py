"""T3A — "Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization", NeurIPS 2021.

* Source stage: cross-entropy. W is the classifier it ends with.
* Target stage: one pass without gradients. The embeddings of a batch join the supports, with the labels and entropies
  that W gives them; each class keeps the M supports of lowest entropy. A class's row of the classifier becomes the
  direction of the sum of its unit-length supports. A batch is predicted after it has joined, as published.
* Supports start with the rows of W and persist across targets (``reset``: start over on each).

The network's classifier holds the adjusted rows, so its weights alone predict; the state keeps W. BatchNorm uses
running statistics. ``exemplars`` adds the memory to the supports, with stored labels and entropy 0: exemplars then come
first, and M of them per class leave no room for others.

A classifier with a bias gives labels and entropies with it, as published, and predicts without: the adjusted rows have
none, so the network's is set to 0 with the first batch.

Deviations from the published code: M = 0 keeps all supports (its filter_K = −1, meant to, drops the worst of each class
on every call); a row of W supports its own class whatever W predicts for it, so every class has a support. Batches
have the recipe's size (32 in the paper). M is 20; the paper selects it by validation on the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.functional.losses import logit_entropy
from ratp.functional.numerics import ranks_within
from ratp.functional.optim import WITH_MOMENTUM, SGDConfig
from ratp.methods.shared.online import OnlineNetwork
from ratp.training.method import Setting, pack, unpack
from ratp.training.recipe import run_in_chunks


@dataclass(frozen=True)
class T3AConfig:
    """Switches of T3A."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser on the source")
    supports: int = switch(20, "M, supports kept per class; 0: all", minimum=0)
    reset: bool = switch(False, "start every target with W; off: keep the supports of earlier targets")
    exemplars: bool = switch(False, "use the memory's images as supports too, with entropy 0")


class Supports(NamedTuple):
    """Embeddings that define the rows of the classifier."""

    vectors: Tensor  # embeddings of unit length, shape (n, dim)
    labels: Tensor  # classes they support, shape (n,)
    entropies: Tensor  # entropies of their predictions, shape (n,)
    remembered: Tensor  # which come from the memory, shape (n,)

    def joined(self, others: Supports) -> Supports:
        """Returns these supports, then the others."""
        return Supports(*(torch.cat(pair) for pair in zip(self, others, strict=True)))

    def only(self, rows: Tensor) -> Supports:
        """Returns the supports at ``rows``, a mask."""
        return Supports(*(tensor[rows] for tensor in self))

    def pruned(self, count: int) -> Supports:
        """Keeps each class's ``count`` supports of lowest entropy, the earlier of equal ones; 0: all."""
        if not count:
            return self
        return self.only(ranks_within(self.labels, self.entropies.argsort(stable=True)) < count)

    def rows(self, classes: int) -> Tensor:
        """Computes the classifier: per class, the direction of the sum of its supports."""
        return F.normalize(F.one_hot(self.labels, classes).to(self.vectors).T @ self.vectors, dim=1)


def supports_of(
    embeddings: Tensor, weight: Tensor, labels: Tensor | None = None, bias: Tensor | float = 0.0
) -> Supports:
    """Turns embeddings into supports, with labels (unless given) and entropies from a classifier."""
    logits = embeddings @ weight.T + bias
    labels = logits.argmax(dim=1) if labels is None else labels
    vectors = F.normalize(embeddings, dim=1)
    return Supports(vectors, labels, logit_entropy(logits), torch.zeros_like(labels, dtype=torch.bool))


class T3A(OnlineNetwork):
    """Replaces the classifier by directions of confident embeddings."""

    name = "t3a"
    title = "T3A: test-time classifier adjustment"
    family = "test-time adaptation"
    paper = "Iwasawa and Matsuo, Test-Time Classifier Adjustment Module, NeurIPS 2021"
    needs = "no gradient on targets, one pass over a target; exemplars if requested"
    config_type = T3AConfig
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = WITH_MOMENTUM

    def __init__(self, setting: Setting, config: T3AConfig) -> None:
        super().__init__(setting, config)
        self.weight: Tensor | None = None  # W, the classifier after the source; None before the first batch of a target
        self.bias: Tensor | None = None  # its bias, if it has one
        # the supports of the current classifier; None before the first batch of a target
        self.supports: Supports | None = None

    @property
    def keeps_exemplars(self) -> bool:
        """Returns whether exemplars become supports."""
        return bool(self.config.exemplars)

    @torch.no_grad()
    def begin_stage(self) -> None:
        """Starts with the supports of W or of earlier targets, and adds the memory if ``exemplars`` is on."""
        if self.weight is None:
            self.weight = self.network.prototypes.detach().clone()
            bias = self.network.classifier.bias
            self.bias = None if bias is None else bias.detach().clone()
        if self.supports is None or self.config.reset:
            classes = torch.arange(len(self.weight), device=self.weight.device)
            self.supports = self._supports_of(self.weight, classes)
        if self.keeps_exemplars and len(self.memory):
            (embeddings,) = run_in_chunks(
                self.network, lambda x: (self.network(x).embedding,), self.memory.images, self.scaling
            )
            new = self._supports_of(embeddings, self.memory.labels)
            new = new._replace(entropies=torch.zeros_like(new.entropies), remembered=torch.ones_like(new.remembered))
            self.supports = self.supports.only(~self.supports.remembered).joined(new)

    @torch.no_grad()
    def learn(self, inputs: Tensor) -> Tensor:
        """Adds a batch to the supports and returns its logits by the resulting classifier."""
        assert self.supports is not None and self.weight is not None
        embeddings = self.network(inputs).embedding
        self.supports = self.supports.joined(self._supports_of(embeddings)).pruned(self.config.supports)
        self.network.set_prototypes(self.supports.rows(len(self.weight)))
        if self.network.classifier.bias is not None:
            self.network.classifier.bias.zero_()
        return embeddings @ self.network.prototypes.T

    def _supports_of(self, embeddings: Tensor, labels: Tensor | None = None) -> Supports:
        assert self.weight is not None
        return supports_of(embeddings, self.weight, labels, 0.0 if self.bias is None else self.bias)

    def state(self) -> dict[str, Tensor]:
        """Returns network, memory, W and supports."""
        if self.weight is None or self.supports is None:
            return super().state()
        bias = {} if self.bias is None else {"bias": self.bias}
        return super().state() | pack({"t3a": {"weight": self.weight, **bias, **self.supports._asdict()}})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state` returned."""
        super().load_state(state)
        own = {name: tensor.to(self.setting.device) for name, tensor in unpack(state).get("t3a", {}).items()}
        self.weight, self.bias = own.pop("weight", None), own.pop("bias", None)
        self.supports = Supports(**own) if own else None
