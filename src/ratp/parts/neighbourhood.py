"""Neighbours among all samples of a domain, and the loss that lets them agree: G-SFDA (ICCV 2021), section 3.2.

A bank holds the last seen embedding and prediction of every sample. A sample's prediction p should agree with those q
of its nearest samples, by the cosine of embeddings:

    −Σ_{j ∈ kNN(i)} log(p_i · q_j)

Predictions are kept as logarithms, so that the loss is finite however certain they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def disagreement(logs: Tensor, neighbours: Tensor) -> Tensor:
    """−Σ_j log(p·q_j) of every sample, shape (n,); 0 without neighbours.

    Args:
        logs: log p, shape (n, classes).
        neighbours: log q of the neighbours of each, shape (n, k, classes); constants.
    """
    # log(p·q) = logsumexp over classes of log p + log q
    return -torch.logsumexp(logs[:, None] + neighbours.detach(), dim=2).sum(dim=1)


class Bank:
    """What was last seen of every sample of a domain.

    Args:
        embeddings: Of all samples, of any length, shape (n, d).
        logs: Logarithms of their predictions, shape (n, classes).
    """

    def __init__(self, embeddings: Tensor, logs: Tensor) -> None:
        self.size = len(embeddings)
        # One row more takes what belongs to no sample.
        self._directions = F.pad(F.normalize(embeddings.detach(), dim=1), (0, 0, 0, 1))
        self._logs = F.pad(logs.detach(), (0, 0, 0, 1))

    @property
    def directions(self) -> Tensor:
        """Embeddings of unit length, shape (n, d)."""
        return self._directions[: self.size]

    @property
    def logs(self) -> Tensor:
        """Logarithms of predictions, shape (n, classes)."""
        return self._logs[: self.size]

    @torch.no_grad()
    def nearest(self, embeddings: Tensor, places: Tensor, count: int) -> Tensor:
        """Places of the samples nearest to some embeddings, nearest first, shape (m, count).

        There are at most n − 1, for a sample is no neighbour of itself.

        Args:
            embeddings: Of any length, shape (m, d).
            places: Which samples they are of, shape (m,).
            count: Neighbours each.
        """
        count = min(count, self.size - 1)
        if count < 1:
            return places.new_zeros(len(places), 0)
        cosines = F.normalize(embeddings, dim=1) @ self.directions.T
        return cosines.scatter_(1, places[:, None], -torch.inf).topk(count, dim=1).indices

    @torch.no_grad()
    def write(self, places: Tensor, embeddings: Tensor, logs: Tensor, counts: Tensor) -> None:
        """Replaces what is known of some samples; of a sample that comes twice, the later row stays.

        Args:
            places: Which samples, shape (m,).
            embeddings: Of any length, shape (m, d).
            logs: Shape (m, classes).
            counts: Which rows to write, bool of shape (m,).
        """
        places = places.where(counts, self.size)
        # Rows of one place all write the last one's values: in whatever order, the result is the same.
        order = torch.arange(1, len(places) + 1, device=places.device)
        last = ((places[:, None] == places[None, :]) * order).argmax(dim=1)
        self._directions.index_copy_(0, places, F.normalize(embeddings, dim=1)[last])
        self._logs.index_copy_(0, places, logs[last])
