"""The exemplar memory: a few images of every domain seen, kept within a fixed number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ratp.parts.herding import Selection, choose_exemplars
from ratp.parts.ranks import ranks_within


class Memory:
    """At most ``capacity`` images over all domains, shared equally among domains and classes.

    After ``t`` domains each keeps ⌊capacity / (classes · t)⌋ images a class; domains seen earlier are cut
    back to their first, most representative ones.

    Attributes:
        images: uint8, shape (m, 3, height, width).
        labels: Class of each image as known when it was stored, shape (m,).
        domains: Index of the domain each image came from, shape (m,).
        seen: Number of domains added so far.
    """

    def __init__(self, capacity: int, classes: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.classes = classes
        self.images = torch.zeros(0, 3, 1, 1, dtype=torch.uint8, device=device)
        self.labels = torch.zeros(0, dtype=torch.int64, device=device)
        self.domains = torch.zeros(0, dtype=torch.int64, device=device)
        self.seen = 0

    def __len__(self) -> int:
        return len(self.images)

    def quota(self, domains: int) -> int:
        """Images a class and domain when ``domains`` domains share the memory."""
        return self.capacity // (self.classes * domains)

    def add(self, images: Tensor, labels: Tensor, features: Tensor, selection: Selection) -> None:
        """Takes the exemplars of one more domain.

        Args:
            images: All images of the domain, uint8.
            labels: Their labels or pseudo labels.
            features: What the choice goes by, shape (n, d).
            selection: How exemplars are chosen.
        """
        quota = self.quota(self.seen + 1)
        by_class = labels.argsort(stable=True).split_with_sizes(labels.bincount(minlength=self.classes).tolist())
        chosen = [
            members[choose_exemplars(features[members], quota, selection)] for members in by_class if len(members)
        ]
        picks = torch.cat(chosen)
        kept = self._first(quota)
        new = images[picks]
        self.images = torch.cat([self.images[kept], new]) if len(kept) else new
        self.labels = torch.cat([self.labels[kept], labels[picks]])
        self.domains = torch.cat([self.domains[kept], torch.full_like(picks, self.seen)])
        self.seen += 1

    def _first(self, quota: int) -> Tensor:
        """Positions of the first ``quota`` images of every stored domain and class, in order."""
        return (ranks_within(self.domains * self.classes + self.labels) < quota).nonzero().squeeze(1)

    def state(self) -> dict[str, Tensor]:
        """Everything stored, as tensors."""
        seen = torch.tensor(self.seen)
        return {"images": self.images, "labels": self.labels, "domains": self.domains, "seen": seen}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state` gave."""
        device = self.labels.device
        self.images = state["images"].to(device)
        self.labels = state["labels"].to(device)
        self.domains = state["domains"].to(device)
        self.seen = int(state["seen"])
