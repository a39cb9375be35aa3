"""Class proportions from predictions, against references written anew and on drawn label shift."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from ratp.functional.class_mix import (
    RIDGE,
    allocate,
    calibrate,
    confusion_proportions,
    em_proportions,
    estimate_proportions,
    shrinkage,
)

KINDS = ["em", "confusion"]


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def images(seed, count, proportions, spread=1.3):
    """Points around a centre per class, and the logits of a classifier that is too sure and biased towards class 0."""
    rng = np.random.default_rng(seed)
    classes = len(proportions)
    labels = rng.choice(classes, size=count, p=proportions)
    points = np.eye(classes)[labels] * 2 + spread * rng.normal(size=(count, classes))
    # the exact posterior for equal proportions is softmax(2·x/σ²); this classifier's logits are three times as large
    logits = 3 * (2 * points / spread**2) + 1.5 * np.eye(classes)[0]
    return torch.tensor(logits).float(), torch.tensor(labels)


class TestCalibration:
    @pytest.mark.parametrize(("seed", "classes", "count"), [(0, 3, 300), (1, 5, 200), (2, 2, 40)])
    def test_it_minimises_the_penalised_cross_entropy(self, seed, classes, count):
        rng = np.random.default_rng(seed)
        labels = rng.integers(classes, size=count)
        logits = 4 * (np.eye(classes)[labels] + rng.normal(size=(count, classes)))
        centred = logits - logits.mean(axis=1, keepdims=True)

        def loss(point):
            p = softmax(point[0] * centred + point[1:])
            away = point - np.eye(classes + 1)[0]
            return -np.log(p[np.arange(count), labels]).mean() + RIDGE / 2 * away @ away

        expected = minimize(loss, np.eye(classes + 1)[0], tol=1e-12)
        found = calibrate(torch.tensor(logits), torch.tensor(labels))
        point = np.concatenate([[found.scale.item()], found.bias.numpy()])
        np.testing.assert_allclose(point, expected.x, atol=1e-4)
        assert loss(point) <= expected.fun + 1e-12

    def test_it_undoes_what_made_the_classifier_too_sure(self):
        logits, labels = images(3, 20000, [0.25] * 4)
        found = calibrate(logits, labels)
        assert found.scale.item() == pytest.approx(1 / 3, abs=0.02)
        p = found(logits)
        assert (p.mean(dim=0) - labels.bincount() / len(labels)).abs().max() < 0.01
        sure = p.amax(dim=1)
        for low in (0.4, 0.6, 0.8):
            rows = (sure > low) & (sure < low + 0.2)
            right = (p.argmax(dim=1) == labels)[rows].double().mean()
            assert abs(right - sure[rows].mean()) < 0.03

    @pytest.mark.parametrize("scale", [1.0, 50.0, 1e4])
    def test_images_that_are_all_right_leave_finite_numbers(self, scale):
        labels = torch.arange(4).repeat(10)
        found = calibrate(scale * torch.eye(4)[labels], labels)
        p = found(scale * torch.eye(4)[labels])
        assert p.isfinite().all()
        assert found.scale > 0
        assert (p.argmax(dim=1) == labels).all()

    def test_one_class(self):
        found = calibrate(torch.randn(5, 1), torch.zeros(5, dtype=torch.int64))
        assert found(torch.randn(3, 1)).tolist() == [[1], [1], [1]]


def em_reference(p, prior, rounds):
    q = np.array(prior, dtype=float)
    for _ in range(rounds):
        total = np.zeros(len(q))
        for row in p:
            corrected = [row[k] * q[k] / prior[k] for k in range(len(q))]
            total += np.array(corrected) / sum(corrected)
        q = total / len(p)
    return q


class TestEM:
    def test_it_agrees_with_the_reference(self):
        rng = np.random.default_rng(0)
        p = softmax(2 * rng.normal(size=(60, 3)))
        prior = np.array([0.5, 0.3, 0.2])
        found = em_proportions(torch.tensor(p), torch.tensor(prior))
        np.testing.assert_allclose(found, em_reference(p, prior, 400), atol=1e-6)

    def test_no_other_proportions_are_likelier(self):
        rng = np.random.default_rng(1)
        p, prior = softmax(2 * rng.normal(size=(200, 4))), np.array([0.4, 0.3, 0.2, 0.1])
        found = em_proportions(torch.tensor(p), torch.tensor(prior)).numpy()

        def likelihood(q):
            return np.log((p * q / prior).sum(axis=1)).mean()

        for other in rng.dirichlet(np.ones(4), size=200):
            assert likelihood(found) >= likelihood(0.9 * found + 0.1 * other) - 1e-9

    def test_without_shift_the_prior_stays(self):
        """Where the mean prediction is the prior, nothing is to be corrected."""
        p = softmax(np.random.default_rng(2).normal(size=(50, 3)))
        prior = p.mean(axis=0)
        np.testing.assert_allclose(em_proportions(torch.tensor(p), torch.tensor(prior)), prior, atol=1e-9)

    def test_a_class_the_prior_lacks_gets_nothing(self):
        p = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.0, 0.0, 1.0]])
        found = em_proportions(p, torch.tensor([0.5, 0.5, 0.0]))
        assert found.isfinite().all()
        assert found[2] == 0
        assert found.sum().item() == pytest.approx(1)

    def test_certain_predictions_are_counted(self):
        p = torch.eye(3)[torch.tensor([0, 0, 0, 1])]
        assert em_proportions(p, torch.full((3,), 1 / 3)).tolist() == pytest.approx([0.75, 0.25, 0])


class TestConfusion:
    def test_it_solves_for_the_proportions(self):
        """Class 0 is taken for 1 in a fifth of the cases, 1 for 2 in two fifths, 2 never for another."""
        labels = torch.arange(3).repeat_interleave(5)
        known = torch.eye(3)[torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2])]
        wanted = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
        shares = (100 * torch.tensor([0.4, 0.1 + 0.18, 0.12 + 0.2])).round().long()
        given = torch.eye(3)[torch.arange(3).repeat_interleave(shares)]
        torch.testing.assert_close(confusion_proportions(given, known, labels), wanted, rtol=0, atol=1e-6)

    def test_what_no_mixture_explains_is_cut_off(self):
        """All are predicted as class 1, which even images of class 1 are only half the time."""
        labels = torch.tensor([0, 0, 1, 1])
        known = torch.eye(2)[torch.tensor([0, 0, 1, 0])]
        given = torch.eye(2)[torch.ones(7, dtype=torch.int64)]
        assert confusion_proportions(given, known, labels).tolist() == [0, 1]

    def test_a_class_without_known_images_gets_nothing(self):
        labels, known = torch.tensor([0, 1]), torch.eye(3)[torch.tensor([0, 1])]
        found = confusion_proportions(torch.eye(3)[torch.tensor([0, 1, 1, 2])], known, labels)
        assert found.isfinite().all()
        assert found.tolist() == pytest.approx([1 / 3, 2 / 3, 0])

    def test_a_classifier_that_knows_nothing_gives_finite_numbers(self):
        known = torch.eye(3)[torch.zeros(6, dtype=torch.int64)]
        found = confusion_proportions(known, known, torch.arange(3).repeat(2))
        assert found.sum().item() == pytest.approx(1)
        assert found.tolist() == pytest.approx([1 / 3] * 3)


SHIFTS = [[0.25] * 4, [0.55, 0.25, 0.15, 0.05], [0.02, 0.08, 0.2, 0.7], [0, 0.5, 0.5, 0]]


class TestLabelShift:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("proportions", SHIFTS, ids=str)
    def test_proportions_are_found_within_a_few_percent(self, proportions, kind):
        """The error is the sum of all differences; 200 labelled images, 4000 others, 70 % of them classified right."""
        errors, counted = [], []
        for seed in range(6):
            logits, labels = images(seed, 4000, proportions)
            known, known_labels = images(100 + seed, 200, [0.25] * 4)
            truth = labels.bincount(minlength=4) / len(labels)
            found = estimate_proportions(kind, logits, known, known_labels, smoothing=0)
            errors.append((found - truth).abs().sum().item())
            counted.append((logits.argmax(dim=1).bincount(minlength=4) / len(logits) - truth).abs().sum().item())
        assert np.mean(errors) < {"em": 0.09, "confusion": 0.16}[kind]
        if kind == "em" or np.mean(counted) > 0.2:
            assert np.mean(errors) < 0.75 * np.mean(counted), "no better than counting predicted classes"

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_known_images_may_have_proportions_of_their_own(self, kind):
        logits, labels = images(0, 4000, SHIFTS[1])
        known, known_labels = images(1, 2000, [0.1, 0.2, 0.3, 0.4])
        found = estimate_proportions(kind, logits, known, known_labels, smoothing=0)
        assert (found - labels.bincount(minlength=4) / len(labels)).abs().sum() < 0.1

    @pytest.mark.parametrize("kind", KINDS)
    def test_smoothing_moves_towards_equal_proportions(self, kind):
        logits, _ = images(0, 500, SHIFTS[1])
        known, labels = images(1, 200, SHIFTS[0])
        sharp, half, flat = (estimate_proportions(kind, logits, known, labels, amount) for amount in (0.0, 0.5, 1.0))
        torch.testing.assert_close(half, (sharp + 0.25) / 2)
        assert flat.tolist() == pytest.approx([0.25] * 4)
        assert sharp.sum().item() == pytest.approx(1)

    def test_by_default_it_moves_the_farther_the_less_sure_the_predictions_are(self):
        truth = torch.tensor([0.6, 0.2, 0.1, 0.1])
        shares = [shrinkage(truth, sure * torch.eye(4) + (1 - sure) / 4) for sure in (1.0, 0.9, 0.7, 0.0)]
        assert shares == sorted(shares)
        assert (shares[0], shares[-1]) == (0, 1)
        assert shares[1] == pytest.approx((1.3 * 0.1 * 3 / 4 / 0.35) ** 2, rel=1e-4)

    @pytest.mark.parametrize("kind", KINDS)
    def test_that_is_what_the_estimate_does(self, kind):
        logits, _ = images(0, 2000, SHIFTS[1])
        known, labels = images(1, 400, SHIFTS[0])
        sharp, found = (estimate_proportions(kind, logits, known, labels, amount) for amount in (0.0, None))
        share = shrinkage(sharp, calibrate(known, labels)(logits))
        torch.testing.assert_close(found, (1 - share) * sharp + share / 4)

    def test_equal_proportions_stay_equal(self):
        assert shrinkage(torch.full((4,), 0.25), torch.eye(4)).isfinite()
        logits, _ = images(0, 400, [0.25] * 4)
        known, labels = images(1, 400, [0.25] * 4)
        found = estimate_proportions("em", logits, known, labels, smoothing=None)
        torch.testing.assert_close(found, torch.full((4,), 0.25).double())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("count", "known", "classes"), [(1, 1, 3), (2, 3, 2), (5, 4, 1), (3, 2, 10)])
    def test_however_few_there_are(self, kind, count, known, classes):
        labels = torch.arange(known) % classes
        found = estimate_proportions(kind, torch.randn(count, classes), torch.randn(known, classes), labels, 0.2)
        assert found.isfinite().all()
        assert (found >= 0.2 / classes - 1e-12).all()
        assert found.sum().item() == pytest.approx(1)


class TestAllocate:
    @pytest.mark.parametrize(
        ("total", "shares", "expected"),
        [
            (40, [0.25] * 4, [10, 10, 10, 10]),
            (10, [0.62, 0.27, 0.11], [5, 3, 2]),
            (10, [1, 0, 0], [8, 1, 1]),
            (2, [0.15, 0.75, 0.1], [0, 2, 0]),
            (0, [0.5, 0.5], [0, 0]),
            (7, [3, 1], [5, 2]),
            (5, [0.5, 0.5], [3, 2]),
        ],
    )
    def test_examples(self, total, shares, expected):
        assert allocate(total, torch.tensor(shares)) == expected

    def test_all_is_given_out_and_nobody_goes_without(self):
        rng = np.random.default_rng(0)
        for _ in range(100):
            classes, total = int(rng.integers(1, 12)), int(rng.integers(0, 60))
            found = allocate(total, torch.tensor(rng.dirichlet(0.3 * np.ones(classes))))
            assert sum(found) == total
            assert min(found) >= min(total // classes, 1)
