"""Top² pseudo labelling, one sample and one class after another."""

from dataclasses import dataclass

import numpy as np

from reference.knn import possible_votes


@dataclass
class Labelling:
    """What T2PL finds, and where it leaves the choice open.

    ``labels`` holds a set for every sample: one image may stand in the fit set under two classes, and then the
    order of equally distant images is not specified. ``decided`` says whether every choice of a fit set was
    without ties, which a centroid halfway between two unit vectors always brings about.
    """

    labels: list
    soft_centroids: np.ndarray
    centroids: np.ndarray
    assignable: list
    top: list
    fit: list
    fit_labels: list
    neighbours: int
    memberless: list
    decided: bool


def t2pl(features, probabilities, *, r_top=2, r_knn=20, normalise=True, rounds=2, top_set="concatenation", classes):
    """``classes`` is "predicted" or "all"; the other switches default to the published code."""
    features = np.asarray(features, dtype=np.float64)
    probabilities = np.asarray(probabilities, dtype=np.float64)
    samples, class_count = probabilities.shape
    if normalise:
        features = np.stack([f / np.linalg.norm(f) for f in features])
    per_class = max(samples // (class_count * r_top), 1)
    neighbours = max(samples // (class_count * r_knn), 1)

    top = []
    for k in range(class_count):
        by_confidence = sorted(range(samples), key=lambda i: -probabilities[i, k])
        top += by_confidence[:per_class]
    if top_set == "union":
        top = sorted(set(top))

    soft = np.zeros((class_count, features.shape[1]))
    for k in range(class_count):
        weight = 0.0
        for i in top:
            soft[k] += probabilities[i, k] * features[i]
            weight += probabilities[i, k]
        soft[k] /= weight

    predicted = {int(np.argmax(row)) for row in probabilities}
    assignable = sorted(predicted) if classes == "predicted" else list(range(class_count))

    centroids, memberless = soft.copy(), []
    if rounds == 2:
        members = {k: [] for k in assignable}
        for i in top:
            members[max(assignable, key=lambda k: (_cosine(features[i], soft[k]), -k))].append(i)
        for k in assignable:
            if members[k]:
                centroids[k] = sum(features[i] for i in members[k]) / len(members[k])
            else:
                memberless.append(k)

    fit, fit_labels, decided = [], [], True
    for k in assignable:
        by_closeness = sorted(range(samples), key=lambda i: -_cosine(features[i], centroids[k]))
        fit += by_closeness[:per_class]
        if per_class < samples:
            last, next_one = (_cosine(features[i], centroids[k]) for i in by_closeness[per_class - 1 : per_class + 1])
            decided = decided and last - next_one > 1e-6
        fit_labels += [k] * per_class
    labels = possible_votes(features, features[fit], fit_labels, neighbours)
    return Labelling(labels, soft, centroids, assignable, top, fit, fit_labels, neighbours, memberless, decided)


def _cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
