"""Supervised contrastive loss."""

from __future__ import annotations

import pytest
import torch

from ratp.functional.losses import supervised_contrastive

Z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.6, 0.8]])
Y = torch.tensor([0, 0, 1, 1])


def test_golden_values():
    losses = supervised_contrastive(Z, Y)
    torch.testing.assert_close(losses, torch.tensor([0.055854, 2.387857, 0.055854, 2.387857]), rtol=0, atol=2e-6)
    assert losses.mean().item() == pytest.approx(1.221856, abs=2e-6)
    assert supervised_contrastive(Z, Y, 1 / 12).mean().item() == pytest.approx(1.077619, abs=2e-6)


def test_the_length_of_features_does_not_matter():
    torch.testing.assert_close(
        supervised_contrastive(Z * torch.tensor([[3.0], [0.1], [5.0], [1.0]]), Y), supervised_contrastive(Z, Y)
    )


def test_who_is_alone_in_a_class_has_no_loss_but_repels():
    losses = supervised_contrastive(Z, torch.tensor([0, 0, 1, 2]))
    assert losses[2] == losses[3] == 0
    assert losses[0] == pytest.approx(0.055854, abs=2e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_no_others_at_all_give_no_loss_and_finite_gradients(count):
    features = Z[:count].clone().requires_grad_()
    losses = supervised_contrastive(features, torch.arange(count))
    (slope,) = torch.autograd.grad(losses.sum(), features)
    assert not losses.any() and slope.isfinite().all()


def test_samples_that_do_not_count_are_as_if_they_were_not_there():
    valid = torch.tensor([True, True, False, True, True])
    features = torch.cat([Z[:2], torch.tensor([[9.0, -9.0]]), Z[2:]]).requires_grad_()
    labels = torch.tensor([0, 0, 0, 1, 1])
    losses = supervised_contrastive(features, labels, valid=valid)
    torch.testing.assert_close(losses[valid], supervised_contrastive(Z, Y))
    assert losses[2] == 0
    (slope,) = torch.autograd.grad(losses.sum(), features)
    assert not slope[2].any() and slope.isfinite().all()
