"""Exemplar choice by trying every image at every step."""

import numpy as np


def herding(features, count):
    features = np.asarray(features, dtype=np.float64)
    target = features.sum(axis=0) / len(features)
    picks = []
    while len(picks) < min(count, len(features)):
        best, best_distance = None, np.inf
        for candidate in range(len(features)):
            if candidate in picks:
                continue
            mean = features[[*picks, candidate]].sum(axis=0) / (len(picks) + 1)
            distance = np.linalg.norm(target - mean)
            if distance < best_distance:
                best, best_distance = candidate, distance
        picks.append(best)
    return picks


def nearest(features, count):
    features = np.asarray(features, dtype=np.float64)
    target = features.sum(axis=0) / len(features)
    return sorted(range(len(features)), key=lambda i: np.linalg.norm(features[i] - target))[:count]
