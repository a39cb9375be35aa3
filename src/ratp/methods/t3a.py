"""T3A — "Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization", NeurIPS 2021.

* Source stage: cross-entropy; W is the classifier it ends with.
* Target stage: one pass, no gradient. The embeddings of a batch join the supports, with the labels and entropies W
  gives them; each class keeps the M supports of lowest entropy. The classifier's row of a class becomes the direction
  of the sum of its supports, each of unit length. A batch is predicted after it has joined, as published.
* Supports begin with the rows of W and are kept from target to target (``reset``: begin again on each).

The network's classifier holds the adjusted rows, so that its weights alone predict; W is kept in the state. BatchNorm
uses running statistics. ``exemplars`` puts the memory among the supports, with stored labels and entropy 0: then
exemplars come first, and M of them a class leave no room for anything else.

Departures from the published code: "all" supports means all (it drops the worst of each class on every call); a row
of W supports its own class whatever W makes of it, so that no class is without a support. Batches are the recipe's (32
in the paper), and M, chosen by validation on the source there, is 20.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.config import switch
from ratp.inference import run_in_chunks
from ratp.method import Setting, pack, unpack
from ratp.online import OnlineNetwork
from ratp.parts.information import logit_entropy
from ratp.parts.ranks import ranks_within
from ratp.parts.sgd import SGDConfig


@dataclass(frozen=True)
class T3AConfig:
    """Switches of T3A."""

    sgd: SGDConfig = switch(SGDConfig(), "optimiser on the source")
    supports: int = switch(20, "supports a class keeps, M; 0: all", minimum=0)
    reset: bool = switch(False, "begin every target with W; off: keep the supports of earlier ones")
    exemplars: bool = switch(False, "the memory's images are supports too, with entropy 0")


class Supports(NamedTuple):
    """What the rows of the classifier are made of.

    Attributes:
        vectors: Embeddings of unit length, shape (n, dim).
        labels: Classes they support, shape (n,).
        entropies: Of their predictions, shape (n,).
        remembered: Which come from the memory, shape (n,).
    """

    vectors: Tensor
    labels: Tensor
    entropies: Tensor
    remembered: Tensor

    def joined(self, others: Supports) -> Supports:
        """These, then the others."""
        return Supports(*(torch.cat(pair) for pair in zip(self, others, strict=True)))

    def only(self, rows: Tensor) -> Supports:
        """Those at ``rows``, a mask."""
        return Supports(*(tensor[rows] for tensor in self))

    def pruned(self, count: int) -> Supports:
        """The ``count`` of lowest entropy in each class, in their order; of equal ones the earlier; 0: all."""
        if not count:
            return self
        return self.only(ranks_within(self.labels, self.entropies.argsort(stable=True)) < count)

    def rows(self, classes: int) -> Tensor:
        """The classifier: for each class the direction of the sum of its supports."""
        return F.normalize(F.one_hot(self.labels, classes).to(self.vectors).T @ self.vectors, dim=1)


def supports_of(embeddings: Tensor, weight: Tensor, labels: Tensor | None = None) -> Supports:
    """Embeddings as supports, with the labels (unless given) and entropies a classifier gives them."""
    logits = embeddings @ weight.T
    labels = logits.argmax(dim=1) if labels is None else labels
    vectors = F.normalize(embeddings, dim=1)
    return Supports(vectors, labels, logit_entropy(logits), torch.zeros_like(labels, dtype=torch.bool))


class T3A(OnlineNetwork):
    """Replaces the classifier by directions of confident embeddings.

    Attributes:
        weight: W, the classifier after the source; None before the first batch of a target.
        supports: What the classifier is made of now; None before the first batch of a target.
    """

    name = "t3a"
    title = "T3A: test-time classifier adjustment"
    family = "test-time adaptation"
    paper = "Iwasawa and Matsuo, Test-Time Classifier Adjustment Module, NeurIPS 2021"
    needs = "no gradient on targets, one pass over a target; exemplars if asked for"
    config_type = T3AConfig

    def __init__(self, setting: Setting, config: T3AConfig) -> None:
        super().__init__(setting, config)
        self.weight: Tensor | None = None
        self.supports: Supports | None = None

    @property
    def keeps_exemplars(self) -> bool:
        """Whether they become supports."""
        return bool(self.config.exemplars)

    @torch.no_grad()
    def begin_stage(self) -> None:
        """Supports as the switches have it: from W, from before, with the memory's."""
        if self.weight is None:
            self.weight = self.network.prototypes.detach().clone()
        if self.supports is None or self.config.reset:
            classes = torch.arange(len(self.weight), device=self.weight.device)
            self.supports = supports_of(self.weight, self.weight, classes)
        if self.keeps_exemplars and len(self.memory):
            (embeddings,) = run_in_chunks(
                self.network, lambda x: (self.network(x).embedding,), self.memory.images, self.scaling
            )
            new = supports_of(embeddings, self.weight, self.memory.labels)
            new = new._replace(entropies=torch.zeros_like(new.entropies), remembered=torch.ones_like(new.remembered))
            self.supports = self.supports.only(~self.supports.remembered).joined(new)

    @torch.no_grad()
    def learn(self, inputs: Tensor) -> Tensor:
        """Logits of a batch by the classifier it has become part of."""
        assert self.supports is not None and self.weight is not None
        embeddings = self.network(inputs).embedding
        self.supports = self.supports.joined(supports_of(embeddings, self.weight)).pruned(self.config.supports)
        self.network.prototypes.copy_(self.supports.rows(len(self.weight)))
        return embeddings @ self.network.prototypes.T

    def state(self) -> dict[str, Tensor]:
        """Network, memory, W and supports."""
        if self.weight is None or self.supports is None:
            return super().state()
        return super().state() | pack({"t3a": {"weight": self.weight, **self.supports._asdict()}})

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        super().load_state(state)
        own = {name: tensor.to(self.setting.device) for name, tensor in unpack(state).get("t3a", {}).items()}
        self.weight = own.pop("weight", None)
        self.supports = Supports(**own) if own else None
