"""Exemplars of one class, by the definition."""

from __future__ import annotations

import numpy as np


def herding(features, count):
    """Positions of at most ``count`` images; each brings the mean of those taken closest to the mean of all."""
    features = np.asarray(features, dtype=np.float64)
    target = features.mean(axis=0)
    picks: list[int] = []
    total = np.zeros_like(target)
    while len(picks) < min(count, len(features)):
        means = (total + features) / (len(picks) + 1)
        distances = np.linalg.norm(target - means, axis=1)
        distances[picks] = np.inf
        best = int(distances.argmin())
        picks.append(best)
        total += features[best]
    return picks


def nearest(features, count):
    """Positions of the ``count`` images closest to the mean of all."""
    features = np.asarray(features, dtype=np.float64)
    distances = np.linalg.norm(features - features.mean(axis=0), axis=1)
    return distances.argsort(kind="stable")[:count].tolist()
