"""Scores of a domain that streams past once, and the orders in which its images arrive."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import toy_domain, toy_domains
from ratp.errors import RatpError
from ratp.evaluation.accuracy import Evaluator
from ratp.evaluation.online import Counts, Score, with_scores
from ratp.streams.stream import make_stream

CPU = torch.device("cpu")


def counts_of(hits, frozen):
    blocks = [[int(sum(one[k : k + 64])) for k in range(0, len(one), 64)] for one in (hits, frozen)]
    return Counts(len(hits), *map(tuple, blocks))


def slow_score(hits, frozen, tda):
    """The same numbers image by image."""
    n = len(hits)
    parts = {}
    for name, first, last in (("1-64", 0, 64), ("65-256", 64, 256), ("257-1024", 256, 1024)):
        if n > first:
            parts[name] = 100 * np.mean(hits[first:last])
    lost, worse, windows = 0.0, 0, 0
    for start in range(0, n, 256):
        window, other = hits[start : start + 256], frozen[start : start + 256]
        gap = tda / 100 - np.mean(window)
        lost += max(0.0, gap) * len(window)
        worse += np.sum(window) < np.sum(other)
        windows += 1
    t95 = None
    for seen in range(256, n + 1, 64):
        if np.mean(hits[seen - 256 : seen]) >= 0.95 * tda / 100 - 1e-12:
            t95 = seen
            break
    return parts, 100 * np.mean(hits), 100 * np.mean(frozen), lost, t95, 100 * worse / windows


@given(st.integers(1, 1500), st.integers(0, 100), st.integers(0, 2**31))
def test_score_is_what_image_by_image_gives(images, percent, seed):
    rng = np.random.default_rng(seed)
    rising = np.linspace(0.2, 0.9, images)
    hits, frozen = rng.random(images) < rising, rng.random(images) < 0.5
    score = Score.of(counts_of(hits, frozen), percent)
    parts, accuracy, before, lost, t95, harm = slow_score(hits, frozen, percent)
    assert score.parts == pytest.approx(parts)
    assert (score.accuracy, score.frozen) == pytest.approx((accuracy, before))
    assert score.lost == pytest.approx(lost)
    assert (score.t95, score.images) == (t95, images)
    assert score.harm == pytest.approx(harm)
    assert Score.from_json(json.loads(json.dumps(score.to_json()))) == score


def test_a_model_that_adapts_after_256_images():
    hits = [0] * 256 + [1] * 512
    score = Score.of(counts_of(hits, [1, 0] * 384), 100.0)
    assert score.parts == {"1-64": 0, "65-256": 0, "257-1024": 100}
    assert (score.lost, score.t95) == (256, 512)
    assert score.harm == pytest.approx(100 / 3)


@pytest.mark.parametrize(
    "broken",
    [
        {"accuracy": 101},
        {"lost": -1},
        {"t95": 10**9},
        {"parts": {"1-64": "x"}},
        {"parts": {"1-65": 5}},
        {"parts": 3},
        {"more": 1},
        {"harm": None},
    ],
)
def test_impossible_scores_are_refused(broken):
    score = Score.of(counts_of([1] * 300, [0] * 300), 50.0).to_json()
    with pytest.raises(RatpError, match="score of a pass"):
        Score.from_json({**score, **broken})


@pytest.mark.parametrize("correct", [(65, 0), (1,), (1, 2, 3), (-1, 0)])
def test_impossible_counts_are_refused(correct):
    with pytest.raises(RatpError, match="numbers of right predictions on 100 images"):
        Counts(100, correct, (0, 0))


def test_without_a_pass_nothing_is_added_to_the_matrix():
    assert with_scores([{"event": "stage_finished", "domain": "mud"}]) == {}


class Known:
    """Predicts what a rule says and remembers the images of every call."""

    def __init__(self, rule):
        self.rule, self.seen = rule, []

    def predict(self, images):
        self.seen.append(images)
        return self.rule(images)


def passes(rule, domains=None, batch=16):
    built = []

    def build():
        built.append(Known(rule))
        return built[-1]

    stream = make_stream("toy", domains or toy_domains(ink=40, mud=193), 7)
    return Evaluator(stream, 7).passes(build, 1, batch, CPU), built, stream.tests[1]


def first_class(images):
    return torch.eye(4)[torch.zeros(len(images), dtype=torch.long)]


class TestPasses:
    def test_every_image_comes_once_in_batches(self):
        _, built, test = passes(first_class)
        everything = sorted(image.numpy().tobytes() for image in test.images)
        assert len(built) == 3  # one for the model from before, one per order
        for one in built[1:]:
            assert [len(images) for images in one.seen] == [16] * 11 + [17]  # one image alone has no statistics
            assert sorted(image.numpy().tobytes() for images in one.seen for image in images) == everything

    def test_what_does_not_learn_is_the_model_from_before(self):
        found, _, test = passes(first_class)
        assert set(found) == {"shuffled", "clustered"}
        for counts in found.values():
            assert counts.correct == counts.frozen
            assert sum(counts.correct) == int((test.labels == 0).sum())
            assert counts.images == 193 and len(counts.correct) == 4

    def test_predictions_that_are_not_finite_are_wrong(self):
        found, _, _ = passes(lambda images: torch.full((len(images), 4), math.nan))
        assert sum(found["shuffled"].correct) == 0

    def test_without_labels_nothing_is_measured(self):
        ink, mud = toy_domains(ink=40, mud=32)
        found, built, _ = passes(first_class, [ink, mud.unlabelled()])
        assert (found, built) == ({}, [])


class TestOrders:
    @pytest.fixture(scope="class")
    @staticmethod
    def evaluator():
        return Evaluator(make_stream("toy", toy_domains(ink=40, mud=800), 7), 7)

    @pytest.mark.parametrize("name", ["shuffled", "clustered"])
    def test_a_permutation_that_seed_and_domain_decide(self, name, evaluator):
        test = toy_domain("mud", 800)
        order = evaluator._order(name, test)
        assert torch.equal(order.sort().values, torch.arange(800))
        assert torch.equal(order, evaluator._order(name, test))
        assert not torch.equal(order, evaluator._order(name, replace(test, name="fog")))
        assert not torch.equal(order, Evaluator(make_stream("toy", toy_domains(), 8), 8)._order(name, test))

    def test_clustered_images_come_mostly_class_by_class(self, evaluator):
        test = toy_domain("mud", 800)
        changes = {
            name: int((test.labels[evaluator._order(name, test)].diff() != 0).sum())
            for name in ("shuffled", "clustered")
        }
        assert changes["clustered"] < 16  # at most all classes in every one of four slots
        assert changes["shuffled"] > 500

    def test_a_single_class_and_a_single_image(self, evaluator):
        for domain in (toy_domain("mud", 20, classes=(2,)), toy_domain("mud", 1)):
            assert torch.equal(evaluator._order("clustered", domain).sort().values, torch.arange(len(domain)))
