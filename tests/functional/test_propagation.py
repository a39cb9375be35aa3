"""Labels spread over a graph: the low-rank form, against the graph itself and against rounds of spreading."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ratp.functional.propagation import (
    GraphConfig,
    group_means,
    group_shares,
    propagate,
    propagate_each,
    soft_labels,
)

SPREAD = 0.7


def random_soft(samples=20, groups=4, seed=0):
    return torch.randn(samples, groups, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(1)


def affinities(soft):
    """W, pair by pair."""
    samples, groups = soft.shape
    soft = dict(np.ndenumerate(soft.numpy()))
    sizes = [sum(soft[j, k] for j in range(samples)) for k in range(groups)]
    rows = [
        [sum(soft[i, k] * soft[j, k] / sizes[k] for k in range(groups) if sizes[k] > 0) for j in range(samples)]
        for i in range(samples)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def dense(soft, spread=SPREAD):
    """(1 − λ)·(I − λW)⁻¹·S."""
    return (1 - spread) * torch.linalg.inv(torch.eye(len(soft)).double() - spread * affinities(soft)) @ soft


@pytest.mark.parametrize("groups", [1, 2, 7])
@pytest.mark.parametrize("spread", [0.0, 0.7, 0.95])
def test_the_low_rank_form_is_the_dense_one(groups, spread):
    soft = random_soft(groups=groups)
    torch.testing.assert_close(propagate(soft, spread), dense(soft, spread))
    torch.testing.assert_close(propagate(soft.float(), spread), dense(soft, spread).float(), rtol=1e-4, atol=1e-5)


def test_25_rounds_converge_to_it():
    soft = random_soft()
    graph, labels = affinities(soft), soft
    torch.testing.assert_close(graph.sum(dim=1), torch.ones(len(soft)).double())
    errors = []
    for _ in range(25):
        labels = SPREAD * graph @ labels + (1 - SPREAD) * soft
        errors.append((labels - propagate(soft, SPREAD)).abs().max().item())
    assert errors[-1] < 1e-3 * errors[0]


def test_rows_sum_to_one_and_a_group_of_nobody_has_no_share():
    soft = random_soft()
    soft[:, 2] = 0
    soft /= soft.sum(dim=1, keepdim=True)
    found = propagate(soft, SPREAD)
    torch.testing.assert_close(found, dense(soft))
    torch.testing.assert_close(found.sum(dim=1), torch.ones(len(soft)).double())
    assert (found[:, 2] == 0).all()


def test_each_alone_has_a_graph_with_the_known_ones():
    known, soft = random_soft(9, seed=1), random_soft(6, seed=2)
    found = propagate_each(soft, known, SPREAD)
    for row, own in zip(soft, found, strict=True):
        torch.testing.assert_close(own, dense(torch.cat([row[None], known]))[0])


def test_soft_labels_written_out():
    random = torch.Generator().manual_seed(5)
    features, prototypes = torch.randn(5, 3, generator=random), torch.randn(4, 3, generator=random)
    there = torch.tensor([True, False, True, True])
    found = soft_labels(features, prototypes, there)
    for x, row in zip(features.tolist(), found.tolist(), strict=True):
        powers = [
            math.exp(-sum((a - b) ** 2 for a, b in zip(x, c, strict=True))) if known else 0
            for c, known in zip(prototypes.tolist(), there.tolist(), strict=True)
        ]
        assert row == pytest.approx([power / sum(powers) for power in powers], rel=1e-4)


def test_means_of_groups():
    features = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    means, there = group_means(features, torch.tensor([2, 0, 2]), 3)
    assert means.tolist() == [[3, 4], [0, 0], [3, 4]]
    assert there.tolist() == [True, False, True]


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


def shares_by_hand(features, known, groups, count, config):
    """One graph of all, whose prototypes move; every group has a known sample."""
    nodes = unit(torch.cat([features, known]).double())
    prototypes = torch.stack([unit(known.double())[groups == k].mean(dim=0) for k in range(count)])
    for move in range(config.moves + 1):
        distances = torch.tensor([[((x - c) ** 2).sum() for c in prototypes] for x in nodes])
        labels = dense((-config.scale * distances).softmax(dim=1).double(), config.spread)
        means = torch.stack([sum(y * x for y, x in zip(labels[:, k], nodes, strict=True)) for k in range(count)])
        if move < config.moves:
            means /= labels.sum(dim=0)[:, None]
            prototypes = config.keep * prototypes + (1 - config.keep) * means
    return labels[: len(features)]


@pytest.mark.parametrize(("moves", "scale"), [(0, 1), (1, 1), (3, 1), (1, 5)])
def test_shares_of_a_batch_written_out(moves, scale):
    random = torch.Generator().manual_seed(3)
    features, known = torch.randn(7, 5, generator=random), torch.randn(9, 5, generator=random)
    groups, config = torch.arange(9) % 3, GraphConfig(moves=moves, scale=scale)
    found = group_shares(features, known, groups, 3, config, together=True)
    torch.testing.assert_close(found.double(), shares_by_hand(features, known, groups, 3, config), rtol=1e-3, atol=1e-4)


def test_alone_a_sample_does_not_depend_on_the_others():
    random = torch.Generator().manual_seed(4)
    features, known = torch.randn(7, 5, generator=random), torch.randn(9, 5, generator=random)
    groups, config = torch.arange(9) % 3, GraphConfig(moves=0)
    alone = group_shares(features, known, groups, 3, config, together=False)
    for place in range(7):
        one = group_shares(features[place : place + 1], known, groups, 3, config, together=False)
        torch.testing.assert_close(one[0], alone[place])
        # one graph of a single sample is the same
        torch.testing.assert_close(
            group_shares(features[place : place + 1], known, groups, 3, config, together=True), one
        )
    together = group_shares(features, known, groups, 3, config, together=True)
    assert not torch.allclose(together, alone, atol=1e-4)


@pytest.mark.parametrize("together", [False, True])
def test_a_group_without_known_samples_gets_nothing(together):
    random = torch.Generator().manual_seed(6)
    features, known = torch.randn(4, 5, generator=random), torch.randn(3, 5, generator=random)
    found = group_shares(features, known, torch.tensor([0, 3, 3]), 4, GraphConfig(), together=together)
    assert (found[:, 1:3] == 0).all()
    torch.testing.assert_close(found.sum(dim=1), torch.ones(4))


def test_samples_without_any_feature_give_numbers():
    """Blank images may have features of length 0."""
    zeros = torch.zeros(3, 5)
    for together in (False, True):
        found = group_shares(zeros, zeros, torch.tensor([0, 1, 1]), 2, GraphConfig(), together=together)
        torch.testing.assert_close(found.sum(dim=1), torch.ones(3))
