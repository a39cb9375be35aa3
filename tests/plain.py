"""Labelling and herding in the plainest tensors: everything at once, everything sorted.

What the package does in chunks and without sorting has to give the same labels and picks.
"""

import torch
import torch.nn.functional as F


def knn_vote(queries, points, point_labels, neighbours, classes):
    """Of equally distant points the first vote, after the points were put in the order of their classes."""
    order = point_labels.argsort(stable=True)
    points, point_labels = points[order], point_labels[order]
    nearest = closeness(queries, points).sort(dim=1, descending=True, stable=True).indices[:, :neighbours]
    return F.one_hot(point_labels[nearest], classes).sum(dim=1).argmax(dim=1)


def closeness(queries, points):
    origin = points.mean(dim=0)
    queries, points = queries - origin, points - origin
    return queries @ points.T - points.square().sum(dim=1) / 2


def t2pl(features, probabilities, *, r_top=2, r_knn=20):
    """With the switches of the published code."""
    count, classes = probabilities.shape
    features = F.normalize(features.float(), dim=1)
    per_class = max(count // (classes * r_top), 1)
    top = probabilities.topk(per_class, dim=0).indices.T.reshape(-1)
    soft = centroids(features[top], probabilities[top])
    assignable = F.one_hot(probabilities.argmax(dim=1), classes).any(dim=0)
    nearest = cosine(features[top], soft).masked_fill(~assignable, -torch.inf).argmax(dim=1)
    members = F.one_hot(nearest, classes).float()
    hard = torch.where(members.any(dim=0)[:, None], centroids(features[top], members), soft)
    kept = assignable.nonzero().squeeze(1)
    fit = cosine(features, hard)[:, kept].topk(per_class, dim=0).indices.T.reshape(-1)
    neighbours = max(count // (classes * r_knn), 1)
    return knn_vote(features, features[fit], kept.repeat_interleave(per_class), neighbours, classes)


def centroids(features, weights):
    return (weights.T @ features) / weights.sum(dim=0).clamp_min(torch.finfo(torch.float32).tiny)[:, None]


def cosine(features, directions):
    return F.normalize(features, dim=1) @ F.normalize(directions, dim=1).T


def herding(features, count):
    features = features.float()
    mean, total, picks = features.mean(dim=0), torch.zeros(features.shape[1]), []
    for step in range(1, min(count, len(features)) + 1):
        distance = (mean - (total + features) / step).square().sum(dim=1)
        distance[picks] = torch.inf
        picks.append(int(distance.argmin()))
        total = total + features[picks[-1]]
    return picks


def nearest(features, count):
    features = features.float()
    return (features - features.mean(dim=0)).square().sum(dim=1).argsort(stable=True)[:count].tolist()
