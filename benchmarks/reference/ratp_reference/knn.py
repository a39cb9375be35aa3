"""k nearest neighbours by sorting all distances."""

from __future__ import annotations

import itertools
import math
from collections import Counter


def knn_vote(queries, points, point_labels, neighbours):
    """Labels by majority; of equally distant points the first ones vote."""
    labels = []
    for query in queries:
        by_distance = sorted(range(len(points)), key=lambda p: math.dist(query, points[p]))
        labels.append(_winner(point_labels[point] for point in by_distance[:neighbours]))
    return labels


def possible_votes(queries, points, point_labels, neighbours, tolerance=1e-5):
    """For every query the set of labels that one order or another of equally distant points gives."""
    neighbours = min(neighbours, len(points))
    possible = []
    for query in queries:
        distances = [math.dist(query, point) for point in points]
        farthest = sorted(distances)[neighbours - 1]
        nearer = [label for label, d in zip(point_labels, distances, strict=True) if d < farthest - tolerance]
        tied = [label for label, d in zip(point_labels, distances, strict=True) if abs(d - farthest) <= tolerance]
        fillings = set(itertools.combinations(sorted(tied), neighbours - len(nearer)))
        possible.append({_winner([*nearer, *filling]) for filling in fillings})
    return possible


def _winner(labels):
    votes = Counter(int(label) for label in labels)
    most = max(votes.values())
    return min(label for label, count in votes.items() if count == most)
