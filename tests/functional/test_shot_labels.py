import numpy as np
import pytest
import torch

from ratp.functional.pseudo_labels import shot_labels


def by_hand(features, probabilities):
    """The two rounds, sample by sample; a class never predicted is left out."""
    v = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    classes = sorted(set(probabilities.argmax(axis=1)))
    centroids = {k: sum(p[k] * x for p, x in zip(probabilities, v, strict=True)) for k in classes}

    def nearest(x):
        return max(classes, key=lambda k: x @ centroids[k] / np.linalg.norm(centroids[k]))

    first = [nearest(x) for x in v]
    centroids |= {k: v[np.array(first) == k].mean(axis=0) for k in set(first)}
    return [nearest(x) for x in v]


def random_case(seed, samples=80, classes=5, dim=4):
    rng = np.random.default_rng(seed)
    truth = rng.integers(classes, size=samples)
    features = rng.normal(size=(classes, dim))[truth] * 1.5 + rng.normal(size=(samples, dim))
    logits = rng.normal(size=(samples, classes))
    logits[np.arange(samples), truth] += 1.5
    exponentials = np.exp(logits)
    return features, exponentials / exponentials.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("seed", range(6))
def test_two_rounds_written_out(seed):
    features, probabilities = random_case(seed)
    found = shot_labels(torch.as_tensor(features), torch.as_tensor(probabilities))
    assert found.tolist() == by_hand(features, probabilities)


def clusters():
    truth = torch.arange(60) % 3
    generator = torch.Generator().manual_seed(0)
    features = 10 * torch.eye(3)[truth] + 0.3 * torch.randn(60, 3, generator=generator)
    logits = 4.0 * torch.eye(3)[truth]
    logits[:6] = torch.tensor([0.0, 1.0, 0.0])  # wrong about two in three of them
    return features, logits.softmax(dim=1), truth


def test_well_separated_clusters_are_found():
    features, probabilities, truth = clusters()
    assert not torch.equal(probabilities.argmax(dim=1), truth)
    assert torch.equal(shot_labels(features, probabilities), truth)


def test_a_class_that_nobody_predicts_is_not_assigned():
    """Where the version for digits assigns it to all."""
    features, probabilities, truth = clusters()
    wider = torch.cat([probabilities, torch.zeros(60, 2)], dim=1)
    assert torch.equal(shot_labels(features, wider), truth)
    wider[:, 3] = 0.01
    assert torch.equal(shot_labels(features, wider), truth)


def test_a_class_that_loses_its_samples_takes_no_others():
    features = torch.cat([torch.tensor([[4.0, 0.0], [0.0, 4.0]]).repeat(10, 1), torch.tensor([[2.0, 2.0]])])
    probabilities = torch.tensor([[0.9, 0.1, 0.0], [0.1, 0.9, 0.0]]).repeat(10, 1)
    probabilities = torch.cat([probabilities, torch.tensor([[0.3, 0.3, 0.4]])])
    labels = shot_labels(features, probabilities)
    assert labels[:20].tolist() == [0, 1] * 10
    assert labels.bincount(minlength=3).max() <= 11


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_few_samples(samples):
    probabilities = torch.eye(4)[:samples]
    assert shot_labels(torch.eye(4)[:samples] * 9, probabilities).tolist() == list(range(samples))


def test_features_of_no_length():
    labels = shot_labels(torch.zeros(5, 3), torch.full((5, 4), 0.25))
    assert labels.tolist() == [0] * 5
