"""AdaContrast's mathematics: labels by neighbours, contrast between labels, diversity, the rate of a pass."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ratp.functional.losses import mean_prediction_entropy
from ratp.functional.optim import SGDConfig, StageSGD, cosine_multiplier
from ratp.methods.adacontrast import contrast_logits, contrast_loss, neighbour_mean


def directions(count, seed=0, dim=6):
    return F.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


class TestNeighbours:
    def test_they_are_the_nearest_by_cosine(self):
        queries, points = directions(7, 1), directions(40, 2)
        probabilities = torch.rand(40, 3, generator=torch.Generator().manual_seed(3))
        found = neighbour_mean(queries, points, probabilities, 10)
        for row, query in enumerate(queries):
            nearest = sorted(range(40), key=lambda j: -float(F.cosine_similarity(query, points[j], dim=0)))[:10]
            torch.testing.assert_close(found[row], probabilities[nearest].mean(dim=0))

    def test_a_bank_of_one_class_gives_that_class(self):
        probabilities = torch.tensor([[0.1, 0.2, 0.7]]).expand(20, 3)
        found = neighbour_mean(directions(5), directions(20, 1), probabilities, 10)
        torch.testing.assert_close(found, probabilities[:5])
        assert found.argmax(dim=1).tolist() == [2] * 5

    def test_fewer_than_asked_for_all_count(self):
        probabilities = torch.eye(3)
        torch.testing.assert_close(
            neighbour_mean(directions(2), directions(3, 1), probabilities, 10), torch.full((2, 3), 1 / 3)
        )


class TestContrast:
    LABELS, OTHERS = torch.tensor([0, 1, 2, 5]), torch.tensor([0, 1, 0, 3, 1, 1, 0, 2])

    def logits(self, labels=LABELS, others=OTHERS):
        return contrast_logits(directions(4), directions(4, 1), labels, directions(len(others), 2), others, 0.07)

    def test_minus_infinity_exactly_where_labels_match(self):
        logits = self.logits()
        assert logits.shape == (4, 9)
        assert logits[:, 0].isfinite().all()
        assert torch.equal(logits[:, 1:] == -torch.inf, self.LABELS[:, None] == self.OTHERS[None])
        assert not logits.isnan().any()

    def test_similarities_over_the_temperature(self):
        logits = self.logits()
        queries, keys, others = directions(4), directions(4, 1), directions(8, 2)
        torch.testing.assert_close(logits[:, 0], (queries * keys).sum(dim=1) / 0.07)
        different = self.LABELS[:, None] != self.OTHERS[None]
        torch.testing.assert_close(logits[:, 1:][different], (queries @ others.T / 0.07)[different])

    def test_the_loss_by_hand(self):
        logits = torch.tensor([[1.0, 2.0, -torch.inf], [0.5, -torch.inf, 0.0]])
        first = -math.log(math.exp(1) / (math.exp(1) + math.exp(2)))
        second = -math.log(math.exp(0.5) / (math.exp(0.5) + 1))
        assert contrast_loss(logits).item() == pytest.approx((first + second) / 2, abs=1e-6)

    def test_with_no_negative_left_it_is_zero_and_its_gradient_too(self):
        queries = directions(4).requires_grad_()
        others = torch.zeros(8, dtype=torch.int64)
        logits = contrast_logits(queries, directions(4, 1), torch.zeros(4, dtype=torch.int64), directions(8, 2), others, 0.07)  # fmt: skip  # noqa: E501
        loss = contrast_loss(logits)
        assert loss.item() == 0
        (gradient,) = torch.autograd.grad(loss, queries)
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 1e-5

    def test_masked_keys_have_no_part_in_the_gradient(self):
        gradients = []
        for seed in (2, 9):
            queries, others = directions(4).requires_grad_(), directions(8, 2).clone()
            others[self.OTHERS == 0] = directions(3, seed)
            logits = contrast_logits(queries[:1], directions(4, 1)[:1], self.LABELS[:1], others, self.OTHERS, 0.07)
            gradients.append(torch.autograd.grad(contrast_loss(logits), queries)[0])
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("classes", [2, 7, 10])
def test_diversity_is_best_where_the_mean_prediction_is_uniform(classes):
    sure = 30 * torch.eye(classes)  # each of another class
    assert -mean_prediction_entropy(sure).item() == pytest.approx(-math.log(classes), abs=1e-5)
    assert -mean_prediction_entropy(torch.zeros(3, classes)).item() == pytest.approx(-math.log(classes), abs=1e-6)
    assert -mean_prediction_entropy(torch.randn(50, classes, generator=torch.Generator().manual_seed(0))) > -math.log(
        classes
    )


class TestRate:
    def test_it_falls_from_one_to_zero(self):
        found = [cosine_multiplier(done, 4) for done in range(5)]
        assert found == pytest.approx([1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0])
        assert cosine_multiplier(9, 4) == 0

    def test_steps_follow_it_as_torchs_do(self):
        ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
        optimiser = StageSGD([([ours], 0.1)], 0.2, 1, SGDConfig(0.9, 1e-4, "constant", nesterov=True))
        reference = torch.optim.SGD([theirs], 0.02, momentum=0.9, weight_decay=1e-4, nesterov=True)
        for done in range(5):
            optimiser.set_rate(0.2 * cosine_multiplier(done, 5))
            optimiser.minimise((ours**3).sum())
            reference.param_groups[0]["lr"] = 0.02 * cosine_multiplier(done, 5)
            reference.zero_grad()
            (theirs**3).sum().backward()
            reference.step()
        torch.testing.assert_close(ours, theirs)

    def test_rate_is_constant_by_default(self):
        weight = nn.Parameter(torch.zeros(1))
        optimiser = StageSGD([([weight], 1.0)], 0.5, 1, SGDConfig(weight_decay=0.0, schedule="constant"))
        for _ in range(3):
            optimiser.minimise(-weight.sum())
        assert weight.item() == pytest.approx(1.5)
