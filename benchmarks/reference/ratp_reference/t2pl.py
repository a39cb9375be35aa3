"""Top² pseudo labelling with NumPy and scikit-learn, class after class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.neighbors import KNeighborsClassifier

from .knn import possible_votes


@dataclass
class Labelling:
    """What T2PL finds, and what it went by."""

    labels: np.ndarray
    features: np.ndarray
    soft_centroids: np.ndarray
    centroids: np.ndarray
    assignable: list[int]
    top: list[int]
    fit: list[int]
    fit_labels: list[int]
    neighbours: int
    memberless: list[int]

    def possible_labels(self):
        """For every sample the set of labels that one order or another of equally distant images gives.

        One image may stand in the fit set under two classes, and then the order is not specified.
        """
        return possible_votes(self.features, self.features[self.fit], self.fit_labels, self.neighbours)

    def decided(self):
        """Whether the fit set was chosen without ties, which a centroid halfway between two samples brings about."""
        per_class = len(self.fit) // len(self.assignable)
        for k in self.assignable:
            closeness = np.sort(_cosine(self.features, self.centroids[k]))[::-1]
            if per_class < len(closeness) and closeness[per_class - 1] - closeness[per_class] <= 1e-6:
                return False
        return True


def t2pl(features, probabilities, *, r_top=2, r_knn=20, normalise=True, rounds=2, top_set="concatenation", classes):
    """Pseudo labels of all samples.

    ``classes`` is "predicted" or "all"; the other switches default to the published code.
    """
    features = np.asarray(features, dtype=np.float64)
    probabilities = np.asarray(probabilities, dtype=np.float64)
    samples, class_count = probabilities.shape
    if normalise:
        features = features / np.linalg.norm(features, axis=1, keepdims=True)
    per_class = max(samples // (class_count * r_top), 1)
    neighbours = max(samples // (class_count * r_knn), 1)

    # First top: the most confident samples of every class give its centroid.
    top: list[int] = []
    for k in range(class_count):
        top += (-probabilities[:, k]).argsort(kind="stable")[:per_class].tolist()
    if top_set == "union":
        top = sorted(set(top))
    soft = np.zeros((class_count, features.shape[1]))
    for k in range(class_count):
        weights = probabilities[top, k]
        if weights.sum() > 0:
            soft[k] = weights @ features[top] / weights.sum()

    predicted = set(probabilities.argmax(axis=1).tolist())
    possible = predicted if classes == "predicted" else range(class_count)
    assignable = [k for k in sorted(possible) if probabilities[:, k].any()]

    centroids, memberless = soft.copy(), []
    if rounds == 2:
        closeness = np.stack([_cosine(features[top], soft[k]) for k in assignable], axis=1)
        nearest = np.asarray(assignable)[closeness.argmax(axis=1)]
        for k in assignable:
            members = features[top][nearest == k]
            if len(members):
                centroids[k] = members.mean(axis=0)
            else:
                memberless.append(k)  # its mean would be empty: it keeps the soft centroid

    # Second top: the samples closest to a centroid carry its label, and their neighbours vote with them.
    fit: list[int] = []
    fit_labels: list[int] = []
    for k in assignable:
        closest = (-_cosine(features, centroids[k])).argsort(kind="stable")[:per_class].tolist()
        fit += closest
        fit_labels += [k] * len(closest)
    vote = KNeighborsClassifier(min(neighbours, len(fit))).fit(features[fit], fit_labels)
    labels = vote.predict(features)
    return Labelling(labels, features, soft, centroids, assignable, top, fit, fit_labels, neighbours, memberless)


def _cosine(features, centroid):
    return features @ centroid / (np.linalg.norm(features, axis=1) * np.linalg.norm(centroid))
