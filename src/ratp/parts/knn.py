"""Exact k-nearest-neighbour vote, in chunks of queries.

Only the vote counts, so nothing is sorted. The products, 2·n·m·d operations, are most of the work; choosing among them
costs about two readings of what they gave.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ratp.parts.chunks import in_chunks
from ratp.parts.exact import full_precision

# Points looked at beyond the nearest k: where a tie for the last place ends among them, it is seen whole.
SPARE = 16
# Points a group, where the best are first looked for among the best of groups.
GROUP = 8
# Bytes a chunk may take.
CPU_ROOM, GPU_ROOM = 2**28, 2**31
# Rows of a chunk are a multiple of this, if there are as many: products come in tiles.
TILE = 128


def knn_vote(
    queries: Tensor, points: Tensor, point_labels: Tensor, neighbours: int, classes: int, chunk: int = 8192
) -> Tensor:
    """Labels by majority among the nearest points (Euclidean); ties go to the smallest class index.

    Of equally distant points at the last place those of the smallest class vote: the first ones, if the points come in
    the order of their classes, as T2PL's do.

    Args:
        queries: Shape (n, d).
        points: Shape (m, d).
        point_labels: Shape (m,).
        neighbours: How many points vote; at most m do.
        classes: Number of classes.
        chunk: Queries handled at once, at most: fewer, where there are so many points that a chunk's room is used up.
    """
    if not len(points):
        return torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    with full_precision(queries.device):
        search = _Search(points, point_labels, min(neighbours, len(points)), classes)
        labels, settled = in_chunks(lambda rows: search.vote(queries[rows]), len(queries), min(chunk, search.rows))
        doubtful = (~settled).nonzero().squeeze(1)  # here, and nowhere before, the host waits for the device
        if len(doubtful):
            (labels[doubtful],) = in_chunks(
                lambda rows: (search.vote_with_all_ties(queries[doubtful[rows]]),),
                len(doubtful),
                min(chunk, search.rows_with_all_ties),
            )
    return labels


class _Search:
    """Points to find the nearest of.

    Attributes:
        rows: Queries whose vote fits into a chunk's room.
        rows_with_all_ties: The same for the vote that looks at all ties.
    """

    def __init__(self, points: Tensor, point_labels: Tensor, neighbours: int, classes: int) -> None:
        count = len(points)
        self._neighbours, self._classes = neighbours, classes
        self._seen = min(neighbours + SPARE, count)
        self._in_groups = count >= 4 * GROUP * self._seen
        # Distances do not change with the origin; near the points they are resolved best.
        self._origin = points.mean(dim=0)
        points = points - self._origin
        half_norms = points.square().sum(dim=1) / 2
        if self._in_groups and count % GROUP:  # with points infinitely far away
            missing = -count % GROUP
            points, half_norms = F.pad(points, (0, 0, 0, missing)), F.pad(half_norms, (0, missing), value=torch.inf)
            point_labels = F.pad(point_labels, (0, missing))
        self._points, self._half_norms, self._labels = points, half_norms, point_labels

        room, number = GPU_ROOM if points.is_cuda else CPU_ROOM, points.element_size()
        matrix, choice = number * len(points), (number + 8) * self._seen
        self.rows = _whole_tiles(room // (matrix + matrix // GROUP + (4 + GROUP) * choice))
        self.rows_with_all_ties = _whole_tiles(room // (3 * matrix + choice))

    def vote(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Labels, and whether they are settled: not if ties for the last place may go on beyond what was seen."""
        closeness, column = self._closest(self._closeness(queries))
        settled = torch.ones(len(queries), dtype=torch.bool, device=queries.device)
        spare = self._seen - self._neighbours
        last = closeness.topk(spare + 1, dim=1, largest=False, sorted=False).values.amax(dim=1, keepdim=True)
        if self._seen < len(self._points):
            settled = closeness.amin(dim=1) < last.squeeze(1)
        kinds = self._labels[column] + self._classes * (closeness == last)
        counts = _counts(kinds, closeness >= last, 2 * self._classes)
        return self._elect(counts[:, : self._classes], counts[:, self._classes :]), settled

    def vote_with_all_ties(self, queries: Tensor) -> Tensor:
        """Labels, from a look at all points."""
        closeness = self._closeness(queries)
        last = closeness.topk(self._neighbours, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
        # sums of zeros and ones: exact for up to 2²⁴ points
        above = (closeness > last).to(closeness.dtype) @ self._members
        return self._elect(above.long(), ((closeness == last).to(closeness.dtype) @ self._members).long())

    def _closeness(self, queries: Tensor) -> Tensor:
        """Larger for nearer points, shape (queries, points)."""
        # ‖q − p‖² = ‖q‖² − 2 (q·p − ‖p‖²/2): the nearest are those with the largest bracket
        return ((queries - self._origin) @ self._points.T).sub_(self._half_norms)

    def _closest(self, closeness: Tensor) -> tuple[Tensor, Tensor]:
        """Closeness and columns of the points seen, which are the closest ones, in any order."""
        if not self._in_groups:
            closest = closeness.topk(self._seen, dim=1, sorted=False)
            return closest.values, closest.indices
        # Fewer than s groups hold a point closer than the s-th, and theirs are the best points of all groups.
        grouped = closeness.view(len(closeness), GROUP, -1)
        groups = grouped.amax(dim=1).topk(self._seen, dim=1, sorted=False).indices
        candidates = grouped.gather(2, groups[:, None].expand(-1, GROUP, -1)).flatten(1)
        closest = candidates.topk(self._seen, dim=1, sorted=False)
        group = groups.gather(1, closest.indices % self._seen)
        return closest.values, closest.indices.div_(self._seen, rounding_mode="floor") * grouped.shape[2] + group

    def _elect(self, above: Tensor, tied: Tensor) -> Tensor:
        """The class with most votes, from the points above the last place and those tied for it, by class."""
        vacant = self._neighbours - above.sum(dim=1, keepdim=True)
        earlier = tied.cumsum(dim=1) - tied
        votes = above + (vacant - earlier).clamp(min=0).minimum(tied)
        return votes.argmax(dim=1)  # the first of equal ones

    @cached_property
    def _members(self) -> Tensor:
        """Which point belongs to which class, as zeros and ones."""
        members = self._points.new_zeros(len(self._points), self._classes)
        return members.scatter_(1, self._labels[:, None], 1)


def _counts(kinds: Tensor, which: Tensor, number: int) -> Tensor:
    """How many of each row's entries are of which kind, shape (rows, number)."""
    counts = torch.zeros(len(kinds), number, dtype=torch.int32, device=kinds.device)
    return counts.scatter_add_(1, kinds, which.to(torch.int32))


def _whole_tiles(rows: int) -> int:
    return max(rows // TILE * TILE, min(rows, TILE), 1)
