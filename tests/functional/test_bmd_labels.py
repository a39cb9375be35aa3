import pytest
import torch
import torch.nn.functional as F

from ratp.functional.pseudo_labels import bmd_labels, centre_scores, centre_similarities, moved_centres, seed_count

CENTRES = torch.tensor([[[1.0, 0.0], [0.8, 0.6]], [[0.0, 1.0], [-1.0, 0.0]]])
SAMPLE = torch.tensor([[0.6, 0.8]])


def random_case(samples=90, classes=5, dim=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, dim, generator=generator)
    return features, (2 * torch.randn(samples, classes, generator=generator)).softmax(dim=1)


def test_golden_dynamic_score():
    torch.testing.assert_close(centre_similarities(SAMPLE, CENTRES), torch.tensor([[0.96, 0.80]]))
    expected = torch.tensor([[0.539915, 0.460085]])
    torch.testing.assert_close(centre_scores(SAMPLE, CENTRES), expected, rtol=0, atol=1e-6)


def test_well_separated_clusters_are_found():
    truth = torch.arange(60) % 3
    features = 10 * torch.eye(3)[truth] + 0.3 * torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    logits = 4.0 * torch.eye(3)[truth]
    logits[:6] = torch.tensor([0.0, 1.0, 0.0])
    assert torch.equal(bmd_labels(features, logits.softmax(dim=1)).labels, truth)


def test_one_centre_and_all_samples_as_seeds_are_plain_means():
    features, probabilities = random_case(samples=20, classes=1)
    found = bmd_labels(features, probabilities, centres=1, share=1, rounds=1)
    torch.testing.assert_close(found.centres[0, 0], F.normalize(features, dim=1).mean(dim=0), rtol=1e-5, atol=1e-6)


def test_every_class_has_as_many_seeds(monkeypatch):
    import ratp.functional.pseudo_labels as module

    seen = []
    real = module.kmeans

    def noted(points, *options):
        seen.append(points)
        return real(points, *options)

    monkeypatch.setattr(module, "kmeans", noted)
    features, probabilities = random_case()
    probabilities[:, 0] = 1e-9  # a class that is never predicted
    found = bmd_labels(features, probabilities)
    assert [tuple(points.shape) for points in seen] == [(5, 6, 4)] * 2
    directions = F.normalize(features, dim=1)
    best = directions[probabilities[:, 2].argsort(descending=True)[:6]]
    assert torch.equal(seen[0][2], best)
    assert found.centres.shape == (5, 4, 4)


@pytest.mark.parametrize(("samples", "classes", "seeds"), [(90, 5, 6), (25_000, 10, 833), (8, 10, 1), (1, 10, 1)])
def test_number_of_seeds(samples, classes, seeds):
    assert seed_count(samples, classes) == seeds


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 40])
def test_few_samples_give_numbers(samples):
    found = bmd_labels(*random_case(samples=samples))
    assert found.labels.shape == (samples,)
    assert found.centres.isfinite().all()


def test_features_of_no_length_give_numbers():
    assert bmd_labels(torch.zeros(9, 3), torch.full((9, 4), 0.25)).centres.isfinite().all()


class TestMoving:
    def test_a_decay_of_one_leaves_centres(self):
        directions = F.normalize(torch.randn(7, 2, generator=torch.Generator().manual_seed(0)), dim=1)
        torch.testing.assert_close(moved_centres(CENTRES, directions, 1.0), CENTRES)

    def test_written_out(self):
        directions = F.normalize(torch.randn(7, 2, generator=torch.Generator().manual_seed(0)), dim=1)
        weights = (directions @ CENTRES.reshape(4, 2).T).exp()
        weights = weights / weights.sum(dim=1, keepdim=True)
        means = torch.stack([(weights[:, [j]] * directions).sum(dim=0) / weights[:, j].sum() for j in range(4)])
        expected = 0.9 * CENTRES + 0.1 * means.reshape(2, 2, 2)
        torch.testing.assert_close(moved_centres(CENTRES, directions, 0.9), expected)

    def test_samples_that_do_not_count_have_no_part(self):
        directions = F.normalize(torch.randn(7, 2, generator=torch.Generator().manual_seed(0)), dim=1)
        counts = torch.arange(7) < 3
        moved = moved_centres(CENTRES, directions, 0.9, counts)
        torch.testing.assert_close(moved, moved_centres(CENTRES, directions[:3], 0.9))
        assert torch.equal(moved_centres(CENTRES, directions, 0.9, torch.zeros(7, dtype=torch.bool)), CENTRES)
