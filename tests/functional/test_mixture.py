"""The mixture of Gaussians, a component a class: against scikit-learn, scipy-free formulas and its own edges."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from sklearn.covariance import ledoit_wolf as reference_ledoit_wolf
from torch.distributions import MultivariateNormal

from ratp.methods.aucid import Mixture, fit_mixture, ledoit_wolf, load_mixture

RIDGE = 1e-3


def points(count, dim=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64) @ mixing + 3


def clusters(each=50, classes=3, dim=4):
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(each * classes) % classes
    centres = 6 * torch.eye(classes, dim)
    return centres[labels] + torch.randn(len(labels), dim, generator=generator), labels, centres


@pytest.mark.parametrize(("count", "dim"), [(200, 4), (10, 4), (5, 30), (2, 6), (40, 1)])
def test_ledoit_wolf_is_scikit_learns(count, dim):
    given = points(count, dim)
    expected = torch.from_numpy(reference_ledoit_wolf(given.numpy())[0])
    torch.testing.assert_close(ledoit_wolf(given), expected, rtol=1e-8, atol=1e-10)


def test_points_all_the_same_have_no_covariance():
    assert torch.equal(ledoit_wolf(torch.ones(5, 3)), torch.zeros(3, 3))


def test_components_are_means_and_covariances_of_classes():
    given, labels, _ = clusters()
    mixture = fit_mixture(given, labels, 3, RIDGE)
    assert mixture.known == (True, True, True)
    for k in range(3):
        own = given[labels == k].double()
        torch.testing.assert_close(mixture.means[k].double(), own.mean(dim=0), rtol=1e-6, atol=1e-6)
        expected = ledoit_wolf(own) + RIDGE * torch.eye(4, dtype=torch.float64)
        root = mixture.roots[k].double()
        torch.testing.assert_close(root @ root.T, expected, rtol=1e-5, atol=1e-5)


def test_densities_are_torchs():
    given, labels, _ = clusters()
    mixture = fit_mixture(given, labels, 3, RIDGE)
    for k in range(3):
        normal = MultivariateNormal(mixture.means[k].double(), scale_tril=mixture.roots[k].double())
        torch.testing.assert_close(mixture.log_densities(given)[:, k], normal.log_prob(given.double()))


def test_a_class_mean_is_likeliest_in_that_class():
    given, labels, _ = clusters()
    mixture = fit_mixture(given, labels, 3, RIDGE)
    assert torch.equal(mixture.log_densities(mixture.means).argmax(dim=1), torch.arange(3))


def test_certainty_is_in_the_order_of_the_posterior_and_goes_on_where_that_is_one():
    given, labels, centres = clusters()
    mixture = fit_mixture(given, labels, 3, RIDGE)
    between = torch.stack([centres[0] + share * (centres[1] - centres[0]) for share in torch.linspace(0, 0.5, 9)])
    certainty, posterior = mixture.certainty(between), mixture.log_densities(between).softmax(dim=1).amax(dim=1)
    torch.testing.assert_close((certainty.exp() / (1 + certainty.exp())), posterior)
    assert (certainty.diff() < 0).all()
    assert (mixture.certainty(torch.stack([20 * centres[0], 40 * centres[0]])).diff() > 0).all()


def test_samples_have_the_moments_of_their_component():
    given, labels, _ = clusters()
    mixture = fit_mixture(given, labels, 3, RIDGE)
    samples, classes = mixture.sample(20_000, torch.Generator().manual_seed(0))
    assert samples.shape == (60_000, 4)
    assert classes.bincount().tolist() == [20_000] * 3
    for k in range(3):
        own = samples[classes == k]
        torch.testing.assert_close(own.mean(dim=0), mixture.means[k], rtol=0, atol=0.05)
        torch.testing.assert_close(own.T.cov(), mixture.roots[k] @ mixture.roots[k].T, rtol=0, atol=0.08)
    assert torch.equal(
        mixture.sample(5, torch.Generator().manual_seed(1))[0], mixture.sample(5, torch.Generator().manual_seed(1))[0]
    )


def test_classes_with_fewer_than_two_points_keep_what_they_had():
    given, labels, _ = clusters()
    before = fit_mixture(given, labels, 3, RIDGE)
    new = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    after = fit_mixture(new, torch.tensor([0, 0, 0, 0, 0, 1]), 3, RIDGE, before)
    assert after.known == (True, True, True)
    for k in (1, 2):
        assert torch.equal(after.means[k], before.means[k])
        assert torch.equal(after.roots[k], before.roots[k])
    assert not torch.equal(after.means[0], before.means[0])
    assert before.means.data_ptr() != after.means.data_ptr()


def test_classes_that_never_had_two_points_have_no_component():
    given, labels, _ = clusters()
    mixture = fit_mixture(given[labels != 1], labels[labels != 1], 3, RIDGE)
    assert mixture.components == [0, 2]
    assert mixture.sample(3, torch.Generator())[1].tolist() == [0] * 3 + [2] * 3
    assert (mixture.log_densities(given)[:, 1] == -torch.inf).all()
    assert mixture.certainty(given).isfinite().all()


def test_one_component_and_none():
    one = fit_mixture(torch.randn(4, 3), torch.ones(4, dtype=torch.int64), 2, RIDGE)
    assert not one.certainty(torch.zeros(2, 3)).isnan().any()
    none = fit_mixture(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 2, RIDGE)
    assert none.components == []
    assert none.certainty(torch.zeros(2, 3)).tolist() == [0, 0]


def test_two_points_equal_points_and_few_of_many_dimensions_can_be_sampled():
    given = torch.cat([torch.ones(3, 50), points(2, 50).float(), points(7, 50, seed=2).float()])
    mixture = fit_mixture(given, torch.tensor([0] * 3 + [1] * 2 + [2] * 7), 3, RIDGE)
    assert mixture.sample(10, torch.Generator())[0].isfinite().all()
    assert mixture.log_densities(given).isfinite().all()


def test_non_finite_points_are_ignored():
    given, labels, _ = clusters()
    before = fit_mixture(given, labels, 3, RIDGE)
    spoilt = given.clone()
    spoilt[labels == 1, 2] = torch.nan
    spoilt[0, 0] = torch.inf
    after = fit_mixture(spoilt, labels, 3, RIDGE, before)
    assert torch.equal(after.means[1], before.means[1])
    assert torch.equal(after.means[2], before.means[2])
    torch.testing.assert_close(after.means[0], given[labels == 0][1:].mean(dim=0))
    assert fit_mixture(torch.full((4, 3), torch.nan), torch.zeros(4, dtype=torch.int64), 2, RIDGE).components == []
    assert after.certainty(spoilt).isnan().sum() == 0
    extreme = fit_mixture(1e30 * given[:6], torch.zeros(6, dtype=torch.int64), 1, RIDGE)
    assert extreme.roots.isfinite().all()


def test_state_round_trip():
    given, labels, _ = clusters()
    mixture = fit_mixture(given[labels != 1], labels[labels != 1], 3, RIDGE)
    again = load_mixture(mixture.state(), torch.device("cpu"))
    assert isinstance(again, Mixture)
    assert again.known == mixture.known
    assert torch.equal(again.certainty(given), mixture.certainty(given))


@pytest.mark.parametrize("name", ["cholesky_ex", "solve_triangular"])
def test_threads_take_turns_with_linear_algebra(name, monkeypatch):
    """Torch loads it at the first call for a GPU, and two first calls at once end in an error."""
    inside, most, real = [], [], getattr(torch.linalg, name)

    def watched(*args, **kwargs):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, name, watched)
    given, labels, _ = clusters()

    def work():
        fit_mixture(given, labels, 3, RIDGE).certainty(given)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 4 * 3
    assert max(most) == 1
