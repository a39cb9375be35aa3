"""Prototype contrastive alignment, one sample and one exponential after another."""

import math


def prototype_contrastive(
    features,
    labels,
    prototypes,
    old_prototypes=None,
    *,
    similarity="cosine",
    scale=12.0,
    negatives="positive",
    old_weight=1.0,
):
    features, prototypes = _rows(features), _rows(prototypes)
    old_prototypes = None if old_prototypes is None else _rows(old_prototypes)
    if similarity == "cosine":
        features, prototypes = [_unit(f) for f in features], [_unit(p) for p in prototypes]
        old_prototypes = None if old_prototypes is None else [_unit(q) for q in old_prototypes]
    else:
        scale = 1.0

    losses = []
    for i, feature in enumerate(features):
        attraction = math.exp(scale * _dot(feature, prototypes[labels[i]]))
        everything = 0.0
        for prototype in prototypes:
            everything += math.exp(scale * _dot(feature, prototype))
        if old_prototypes is not None:
            attraction += old_weight * math.exp(scale * _dot(feature, old_prototypes[labels[i]]))
            for prototype in old_prototypes:
                everything += old_weight * math.exp(scale * _dot(feature, prototype))
        for j, other in enumerate(features):
            if labels[j] == labels[i]:
                continue
            if negatives == "positive" and _dot(feature, other) < 1e-6:
                continue
            everything += math.exp(scale * _dot(feature, other))
        losses.append(-math.log(attraction / everything))
    return losses


def _rows(matrix):
    return [[float(value) for value in row] for row in matrix]


def _dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _unit(vector):
    length = math.sqrt(_dot(vector, vector))
    return [value / length for value in vector]
