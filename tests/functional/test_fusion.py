"""Predictions fused by their entropies, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from ratp.functional.fusion import certainty_weights, fuse

HEADS, SAMPLES, CLASSES = 3, 12, 5


def random_logs(scale=2.0):
    logits = scale * torch.randn(HEADS, SAMPLES, CLASSES, generator=torch.Generator().manual_seed(0))
    return logits.log_softmax(dim=2)


def entropy(p):
    return -sum(value * math.log(value) for value in p)


def by_hand(predictions, weights=None):
    """Σ_h ω_h·p_h of one sample."""
    if weights is None:
        powers = [math.exp(-entropy(p)) for p in predictions]
        weights = [power / sum(powers) for power in powers]
    return [sum(w * p[k] for w, p in zip(weights, predictions, strict=True)) for k in range(CLASSES)]


def test_fusion_written_out():
    logs = random_logs()
    found = fuse(logs).exp()
    for sample in range(SAMPLES):
        assert found[sample].tolist() == pytest.approx(by_hand(logs[:, sample].exp().tolist()), rel=1e-4)


def test_given_weights():
    logs = random_logs()
    weights = torch.rand(HEADS, SAMPLES, generator=torch.Generator().manual_seed(1))
    weights /= weights.sum(dim=0)
    found = fuse(logs, weights.log()).exp()
    for sample in range(SAMPLES):
        expected = by_hand(logs[:, sample].exp().tolist(), weights[:, sample].tolist())
        assert found[sample].tolist() == pytest.approx(expected, rel=1e-4)


def test_the_certain_one_weighs_most():
    logs = torch.tensor([[[5.0, 0, 0]], [[0.5, 0, 0]], [[0.0, 0, 0]]]).log_softmax(dim=2)
    first, second, third = certainty_weights(logs).exp()[:, 0].tolist()
    assert first > second > third
    assert first + second + third == pytest.approx(1)


def test_one_prediction_stays():
    logs = random_logs()[:1]
    torch.testing.assert_close(fuse(logs), logs[0])


def test_the_most_certain_predictions_give_finite_gradients():
    logits = torch.tensor([[[1000.0, 0, -1000]], [[-1000.0, 0, 1000]]], requires_grad=True)
    fused = fuse(logits.log_softmax(dim=2))
    fused[0, 1].backward()
    assert fused.isfinite().all()
    assert logits.grad.isfinite().all()
