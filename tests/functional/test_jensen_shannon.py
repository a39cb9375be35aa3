"""The Jensen-Shannon divergence of several views, against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from ratp.functional.losses import jensen_shannon


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def views(seed, count, rows=6, classes=4):
    return [torch.tensor(logits) for logits in 3 * np.random.default_rng(seed).normal(size=(count, rows, classes))]


def test_two_views_are_scipys():
    p, q = views(0, 2)
    expected = jensenshannon(softmax(p.numpy()), softmax(q.numpy()), axis=1) ** 2
    assert jensen_shannon([p, q]).item() == pytest.approx(expected.mean(), rel=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_several_views_are_the_mean_divergence_from_their_mean(count):
    given = views(count, count)
    p = np.stack([softmax(view.numpy()) for view in given])
    total = 0.0
    for row in range(p.shape[1]):
        mean = p[:, row].mean(axis=0)
        for view in range(count):
            total += sum(p[view, row, k] * np.log(p[view, row, k] / mean[k]) for k in range(p.shape[2])) / count
    assert jensen_shannon(given).item() == pytest.approx(total / p.shape[1], rel=1e-5, abs=1e-9)


def test_views_that_agree_have_none_and_it_is_at_most_the_logarithm_of_their_number():
    (view,) = views(0, 1)
    assert jensen_shannon([view] * 3).item() == pytest.approx(0, abs=1e-6)
    apart = [100 * torch.eye(3)[k][None] for k in range(3)]
    assert jensen_shannon(apart).item() == pytest.approx(np.log(3))


def test_rows_that_do_not_count_have_no_influence():
    given, valid = views(1, 3), torch.tensor([True, False, True, True, False, True])
    spoilt = [view.clone().requires_grad_() for view in given]
    with torch.no_grad():
        spoilt[0][1] = 50.0
    found = jensen_shannon(spoilt, valid)
    assert found.item() == pytest.approx(jensen_shannon([view[valid] for view in given]).item(), rel=1e-6)
    found.backward()
    assert all((view.grad[~valid] == 0).all() for view in spoilt)
    assert jensen_shannon(given, torch.zeros(6, dtype=torch.bool)).item() == 0


def test_certain_predictions_have_finite_gradients():
    given = [torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True), torch.tensor([[0.0, 1e4, 0.0]], requires_grad=True)]
    jensen_shannon(given).backward()
    assert all(view.grad.isfinite().all() for view in given)


def test_half_precision_is_computed_in_single():
    given = views(2, 3)
    low = jensen_shannon([view.bfloat16() for view in given])
    assert low.dtype == torch.float32
    assert low.item() == pytest.approx(jensen_shannon(given).item(), rel=0.05)
