import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import plain
import ratp.functional.pseudo_labels as module
from ratp.functional.pseudo_labels import T2PLConfig, t2pl
from ratp_reference import t2pl as reference

OFFICIAL = {"normalise": True, "rounds": 2, "top_set": "concatenation", "classes": "predicted"}
PAPER = {"normalise": False, "rounds": 1, "top_set": "union", "classes": "all"}
VARIANTS = pytest.mark.parametrize("variant", [OFFICIAL, PAPER], ids=["official", "paper"])
ALL_SWITCHES = [
    dict(zip(OFFICIAL, values, strict=True))
    for values in itertools.product((True, False), (1, 2), ("concatenation", "union"), ("predicted", "all"))
]


def unit(*degrees):
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def two_classes(*second):
    second = torch.tensor(second, dtype=torch.float64)
    return torch.stack([1 - second, second], dim=1)


def random_case(seed, samples=120, classes=4, dim=6, sharpness=2.0):
    """Noisy clusters and a classifier that is right about most of them."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(classes, size=samples)
    features = 1.5 * rng.normal(size=(classes, dim))[truth] + rng.normal(size=(samples, dim))
    logits = rng.normal(size=(samples, classes))
    logits[np.arange(samples), truth] += sharpness
    exponentials = np.exp(logits)
    return features, exponentials / exponentials.sum(axis=1, keepdims=True)


def label(features, probabilities, chunk=8192, **switches):
    def floats(array):
        return torch.as_tensor(array).float()

    return t2pl(floats(features), floats(probabilities), T2PLConfig(**switches), chunk)


class TestGolden:
    FEATURES = unit(0, 5, 10, 15, 20, 40, 50, 70, 75, 80, 85, 90)
    PROBABILITIES = two_classes(0.02, 0.05, 0.10, 0.6, 0.2, 0.45, 0.40, 0.8, 0.3, 0.9, 0.95, 0.98)
    SOFT = torch.tensor([[0.9448, 0.1358], [0.1358, 0.9448]])
    HARD = torch.tensor([[0.9937, 0.0869], [0.0869, 0.9937]])

    @VARIANTS
    def test_worked_example(self, variant):
        found = label(self.FEATURES, self.PROBABILITIES, r_top=2, r_knn=3, **variant)
        assert self.PROBABILITIES.argmax(dim=1).tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 1]
        assert found.labels.tolist() == [0] * 6 + [1] * 6
        torch.testing.assert_close(found.soft_centroids, self.SOFT, rtol=0, atol=5e-5)
        final = self.HARD if variant is OFFICIAL else self.SOFT
        torch.testing.assert_close(found.centroids, final, rtol=0, atol=5e-5)
        assert found.assignable.tolist() == [True, True]

    @VARIANTS
    def test_the_reference_gives_the_worked_example_too(self, variant):
        found = reference.t2pl(self.FEATURES, self.PROBABILITIES, r_top=2, r_knn=3, **variant)
        assert found.possible_labels() == [{0}] * 6 + [{1}] * 6
        assert found.labels.tolist() == [0] * 6 + [1] * 6
        np.testing.assert_allclose(found.soft_centroids, self.SOFT, rtol=0, atol=5e-5)


class TestAgainstReference:
    @pytest.mark.parametrize("switches", ALL_SWITCHES, ids=lambda s: "-".join(map(str, s.values())))
    def test_labels_and_centroids_agree_for_every_switch(self, switches):
        decided = [self.compare(random_case(seed), r_top=2, r_knn=5, **switches) for seed in range(3)]
        assert min(decided) > 0.8

    @VARIANTS
    @pytest.mark.parametrize(("r_top", "r_knn"), [(1, 1), (1, 10), (2, 20), (3, 7), (50, 50)])
    def test_labels_agree_for_every_share(self, variant, r_top, r_knn):
        self.compare(random_case(20), r_top=r_top, r_knn=r_knn, **variant)

    @VARIANTS
    @pytest.mark.parametrize("samples", [1, 2, 3, 7, 8, 9, 41])
    def test_labels_agree_for_few_samples(self, variant, samples):
        cases = (random_case(seed, samples=samples, classes=8) for seed in range(10))
        assert sum(self.compare(case, r_top=2, r_knn=20, **variant) is not None for case in cases) >= 3

    @VARIANTS
    def test_labels_agree_with_scikit_learn(self, variant):
        for seed in range(5):
            features, probabilities = random_case(seed, samples=300)
            expected = reference.t2pl(features, probabilities, r_top=2, r_knn=5, **variant)
            found = label(features, probabilities, r_top=2, r_knn=5, **variant)
            decided = [len(possible) == 1 for possible in expected.possible_labels()]
            assert np.mean(decided) > 0.9
            assert found.labels.numpy()[decided].tolist() == expected.labels[decided].tolist()

    @staticmethod
    def compare(case, **switches):
        """Returns the share of samples whose label does not hang on ties; None if the fit set does already."""
        expected = reference.t2pl(*case, **switches)
        found = label(*case, **switches)
        np.testing.assert_allclose(found.soft_centroids.numpy(), expected.soft_centroids, rtol=1e-4, atol=1e-5)
        kept = expected.assignable
        np.testing.assert_allclose(found.centroids.numpy()[kept], expected.centroids[kept], rtol=1e-4, atol=1e-5)
        assert found.assignable.nonzero().squeeze(1).tolist() == kept
        if not expected.decided():
            return None
        choices = expected.possible_labels()
        assert all(label in possible for label, possible in zip(found.labels.tolist(), choices, strict=True))
        return sum(len(possible) == 1 for possible in choices) / len(choices)


class TestBehaviour:
    @VARIANTS
    @pytest.mark.parametrize("chunk", [1, 7, 119, 120, 121])
    def test_the_chunk_size_changes_nothing(self, variant, chunk):
        case = random_case(30)
        assert label(*case, chunk=chunk, **variant).labels.tolist() == label(*case, **variant).labels.tolist()

    def test_labels_beat_the_predictions_they_start_from(self):
        rng = np.random.default_rng(0)
        truth = rng.integers(4, size=400)
        features = 3 * np.eye(4)[truth] + rng.normal(size=(400, 4)) * 0.5
        wrong = rng.random(400) < 0.3
        predicted = np.where(wrong, rng.integers(4, size=400), truth)
        probabilities = np.full((400, 4), 0.1) + 0.6 * np.eye(4)[predicted]
        probabilities += rng.random((400, 4)) * 0.01
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        found = label(features, probabilities).labels.numpy()
        assert (found == truth).mean() > 0.95 > (predicted == truth).mean()

    def test_length_of_features_matters_only_without_normalisation(self):
        features, probabilities = random_case(31)
        factors = np.random.default_rng(0).uniform(0.1, 10, size=(len(features), 1))
        one = label(features, probabilities, normalise=True).labels
        other = label(factors * features, probabilities, normalise=True).labels
        assert one.tolist() == other.tolist()
        one = label(features, probabilities, normalise=False).labels
        other = label(factors * features, probabilities, normalise=False).labels
        assert one.tolist() != other.tolist()

    def test_a_class_never_predicted_is_never_assigned(self):
        for seed in range(5):
            features, probabilities = random_case(seed)
            probabilities[:, 2] *= 0.01
            found = label(features, probabilities, r_knn=4, classes="predicted")
            assert found.assignable.tolist() == [True, True, False, True]
            assert 2 not in found.labels.tolist()
            assert 2 in label(features, probabilities, r_knn=4, classes="all").labels.tolist()

    @VARIANTS
    def test_with_one_class_all_samples_belong_to_it(self, variant):
        features, _ = random_case(0, samples=10)
        assert label(features, np.ones((10, 1)), **variant).labels.tolist() == [0] * 10

    def test_if_one_class_is_predicted_all_samples_get_it(self):
        features, probabilities = random_case(0)
        probabilities[:, 1] += 5
        assert set(label(features, probabilities).labels.tolist()) == {1}

    def test_a_sample_on_top_of_two_classes_counts_twice_or_once(self):
        """With two top samples a class, the second sample is on top for both."""
        features, probabilities = unit(0, 45, 60, 90), two_classes(0.1, 0.5, 0.3, 0.9)
        probabilities[2] = torch.tensor([0.2, 0.2])
        twice = label(features, probabilities, r_top=1, top_set="concatenation").soft_centroids
        once = label(features, probabilities, r_top=1, top_set="union").soft_centroids
        start, middle, end = features[0], features[1], features[3]
        expected = torch.stack([0.9 * start + 0.1 * end, 0.1 * start + 0.9 * end])
        torch.testing.assert_close(twice.double(), (expected + 2 * 0.5 * middle) / 2.0)
        torch.testing.assert_close(once.double(), (expected + 0.5 * middle) / 1.5)

    def test_counting_twice_can_change_a_label(self):
        def labels(seed, top_set):
            case = random_case(seed, samples=24, sharpness=0.5)
            return label(*case, r_top=1, r_knn=3, top_set=top_set).labels.tolist()

        assert any(labels(seed, "concatenation") != labels(seed, "union") for seed in range(30))


class TestClassWithoutTopSamples:
    """Class 2 is predicted for one sample, yet no top sample is nearest to its soft centroid, at about 50°."""

    FEATURES = unit(0.0, 2.3, 4.1, 6.6, 3.1, 86.1, 88.9, 90.0, 49.0, 52.0, 56.0)
    PROBABILITIES = torch.tensor(
        [
            [0.980, 0.012, 0.008],
            [0.975, 0.014, 0.011],
            [0.970, 0.017, 0.013],
            [0.960, 0.031, 0.009],
            [0.320, 0.310, 0.370],
            [0.030, 0.870, 0.100],
            [0.020, 0.875, 0.105],
            [0.018, 0.887, 0.095],
            [0.500, 0.460, 0.040],
            [0.510, 0.455, 0.035],
            [0.490, 0.480, 0.030],
        ]
    )

    @pytest.mark.parametrize("r_knn", [1, 20])
    def test_it_keeps_its_soft_centroid_and_does_not_poison_the_labels_of_others(self, r_knn):
        expected = reference.t2pl(self.FEATURES, self.PROBABILITIES, r_top=1, r_knn=r_knn, **OFFICIAL)
        assert (expected.memberless, expected.decided()) == ([2], True)
        found = label(self.FEATURES, self.PROBABILITIES, r_top=1, r_knn=r_knn)
        torch.testing.assert_close(found.centroids[2], found.soft_centroids[2])
        np.testing.assert_allclose(found.centroids.numpy(), expected.centroids, rtol=1e-4, atol=1e-5)
        assert found.labels.tolist() == [0] * 5 + [1] * 3 + [2] * 3
        assert expected.possible_labels() == [{label} for label in found.labels.tolist()]


class TestClassWithoutSamples:
    """Class 2 is predicted for one sample, yet its soft centroid is nearest to no sample at all."""

    def test_it_takes_part_in_the_second_round_all_the_same(self):
        """The published code then drops it."""
        features, probabilities = TestClassWithoutTopSamples.FEATURES[:8], TestClassWithoutTopSamples.PROBABILITIES[:8]
        found = label(features, probabilities, r_top=1, r_knn=20)
        cosines = features.float() @ F.normalize(found.soft_centroids.float(), dim=1).T
        assert cosines.argmax(dim=1).tolist() == [0] * 5 + [1] * 3
        assert found.assignable.all()
        torch.testing.assert_close(found.centroids[2], found.soft_centroids[2])
        assert 2 in found.labels


class TestClassWithoutProbability:
    """Softmax in single precision gives exactly 0 to a class far behind in every sample."""

    def test_it_is_not_assigned(self):
        features, probabilities = random_case(3)
        probabilities[:, 2] = 0
        found = label(features, probabilities, **{**PAPER, "r_knn": 5})
        assert found.centroids.isfinite().all()
        assert 2 not in found.labels.tolist()

    def test_a_vanishing_probability_is_still_a_weight(self):
        features, probabilities = random_case(3)
        probabilities[:, 2] *= 1e-20
        expected = reference.t2pl(features, probabilities, **PAPER)
        found = label(features, probabilities, **PAPER)
        np.testing.assert_allclose(found.soft_centroids.numpy(), expected.soft_centroids, rtol=1e-3, atol=1e-4)
        choices = expected.possible_labels()
        assert all(label in possible for label, possible in zip(found.labels.tolist(), choices, strict=True))


class TestScale:
    @pytest.mark.parametrize(("samples", "r_top", "r_knn"), [(4000, 1, 25), (3001, 2, 100), (2500, 1, 2)])
    def test_labels_are_those_of_the_plain_way(self, samples, r_top, r_knn):
        features, probabilities = (torch.tensor(array).float() for array in random_case(1, samples, dim=12))
        found = label(features, probabilities, r_top=r_top, r_knn=r_knn)
        assert torch.equal(found.labels, plain.t2pl(features, probabilities, r_top=r_top, r_knn=r_knn))

    def test_labels_of_many_copies_are_those_of_the_plain_way(self):
        features, probabilities = (torch.tensor(array).float().repeat(100, 1) for array in random_case(2, samples=40))
        found = label(features, probabilities, r_top=1, r_knn=25)
        assert torch.equal(found.labels, plain.t2pl(features, probabilities, r_top=1, r_knn=25))

    def test_what_is_allowed_elsewhere_changes_no_label(self):
        """Neither autocast nor fast matrix products around it."""
        case = random_case(4)
        expected = label(*case).labels
        try:
            torch.set_float32_matmul_precision("medium")
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(label(*case).labels, expected)
        finally:
            torch.set_float32_matmul_precision("highest")


class TestClassMix:
    """Selections in proportion to how frequent classes are."""

    def test_equal_proportions_change_nothing(self):
        features, probabilities = (torch.as_tensor(array).float() for array in random_case(0))
        usual = t2pl(features, probabilities, T2PLConfig(r_top=2, r_knn=5))
        equal = t2pl(features, probabilities, T2PLConfig(r_top=2, r_knn=5), mix=torch.full((4,), 0.25))
        for name in ("labels", "soft_centroids", "centroids", "assignable"):
            assert torch.equal(getattr(usual, name), getattr(equal, name))

    @pytest.mark.parametrize(
        ("mix", "sizes"), [([0.5, 0.3, 0.2, 0.0], [30, 18, 12, 1]), ([0.0, 0.0, 0.0, 1.0], [1, 1, 1, 60])]
    )
    def test_each_class_votes_with_its_share(self, mix, sizes, monkeypatch):
        """Of 120 samples and r_top 2, half are selected; no class is without any."""
        fits = []

        def vote(features, points, labels, neighbours, classes, chunk):
            fits.append((len(points), labels.bincount(minlength=classes).tolist()))
            return torch.zeros(len(features), dtype=torch.int64)

        monkeypatch.setattr(module, "knn_vote", vote)
        features, probabilities = (torch.as_tensor(array).float() for array in random_case(0))
        t2pl(features, probabilities, T2PLConfig(r_top=2, classes="all"), mix=torch.tensor(mix))
        assert fits == [(sum(sizes), sizes)]

    def test_the_top_set_is_weighed_by_it_too(self):
        """Centroids by hand: the mean of the samples on top, weighted by their softmax."""
        features, probabilities = random_case(1)
        mix = [0.4, 0.3, 0.2, 0.1]
        found = t2pl(
            torch.tensor(features), torch.tensor(probabilities), T2PLConfig(r_top=2, rounds=1), mix=torch.tensor(mix)
        )
        units = features / np.linalg.norm(features, axis=1, keepdims=True)
        top = [i for k in range(4) for i in np.argsort(-probabilities[:, k])[: int(120 * mix[k] / 2 + 1e-6)]]
        for k in range(4):
            weights = probabilities[top, k]
            expected = sum(w * units[i] for w, i in zip(weights, top, strict=True)) / weights.sum()
            np.testing.assert_allclose(found.soft_centroids[k], expected, rtol=1e-4, atol=1e-5)

    def test_it_labels_rare_classes_better_than_equal_shares_do(self):
        """Twenty-five images of one class, hundreds of another: equal shares give the rare one strangers."""
        rng = np.random.default_rng(0)
        counts = [25, 75, 200, 500]
        truth = np.repeat(np.arange(4), counts)
        features = 2 * np.eye(6)[truth] + 0.8 * rng.normal(size=(800, 6))
        logits = 1.5 * features[:, :4] + rng.normal(size=(800, 4))
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        given = torch.tensor(features).float(), torch.tensor(probabilities).float(), T2PLConfig(r_top=2, r_knn=20)
        right = [
            (t2pl(*given, mix=mix).labels.numpy() == truth).mean() for mix in (None, torch.tensor(counts) / sum(counts))
        ]
        assert right[1] > right[0] + 0.05

    def test_proportions_in_double_precision_and_of_one_class(self):
        found = t2pl(torch.randn(5, 3), torch.ones(5, 1), T2PLConfig(), mix=torch.ones(1, dtype=torch.float64))
        assert found.labels.tolist() == [0] * 5
