import math

import pytest
import torch

from ratp.functional.losses import entropy, information_maximisation, logit_entropy, mean_prediction_entropy

GOLDEN = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
CERTAIN = torch.tensor([[4000.0, -4000.0, 0.0], [5000.0, 0.0, 0.0]])


def test_golden():
    probabilities = GOLDEN.softmax(dim=1)
    assert entropy(probabilities).mean().item() == pytest.approx(0.365314, abs=1e-6)
    assert entropy(probabilities.mean(dim=0)).item() == pytest.approx(0.693127, abs=1e-6)
    assert information_maximisation(GOLDEN).item() == pytest.approx(-0.327813, abs=1e-6)


def test_without_help_from_an_epsilon():
    assert logit_entropy(GOLDEN).tolist() == pytest.approx([0.365334] * 2, abs=1e-5)
    assert mean_prediction_entropy(GOLDEN).item() == pytest.approx(math.log(2), abs=1e-6)


def test_uniform_predictions_for_every_sample_give_nothing():
    logits = torch.zeros(7, 4)
    assert information_maximisation(logits).item() == pytest.approx(0, abs=1e-6)
    assert (logit_entropy(logits).mean() - mean_prediction_entropy(logits)).item() == pytest.approx(0, abs=1e-6)


def test_certain_and_diverse_is_best():
    best, same = 50 * torch.eye(4), 50 * torch.eye(4)[[0] * 4]
    assert information_maximisation(best).item() == pytest.approx(-math.log(4), abs=1e-4)
    assert information_maximisation(same).item() == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    "function", [information_maximisation, lambda x: logit_entropy(x).sum(), mean_prediction_entropy]
)
@pytest.mark.parametrize("logits", [CERTAIN, CERTAIN[:1], GOLDEN, torch.zeros(2, 3)])
def test_the_gradient_is_a_number(function, logits):
    logits = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(logits), logits)
    assert gradient.isfinite().all()
