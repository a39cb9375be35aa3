import pytest
import torch
from sklearn.cluster import KMeans

from ratp.functional.numerics import kmeans


def blobs(seed=0, groups=3, each=15, centres=4):
    generator = torch.Generator().manual_seed(seed)
    middles = 20 * torch.randn(groups, centres, 5, generator=generator)
    points = middles.repeat_interleave(each, dim=1) + 0.1 * torch.randn(groups, centres * each, 5, generator=generator)
    return points, points.reshape(groups, centres, each, 5).mean(dim=2)


def test_separated_groups_are_found():
    points, expected = blobs()
    found = kmeans(points, 4)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine[mine[:, 0].argsort()], theirs[theirs[:, 0].argsort()], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_sklearn_from_the_same_start_agrees(seed):
    points = torch.randn(1, 60, 3, generator=torch.Generator().manual_seed(seed))
    start = kmeans(points, 4, iterations=0)[0].numpy()
    theirs = KMeans(4, init=start, n_init=1, max_iter=100, tol=0).fit(points[0].numpy()).cluster_centers_
    torch.testing.assert_close(kmeans(points, 4)[0], torch.as_tensor(theirs), rtol=1e-4, atol=1e-4)


def test_sets_do_not_see_each_other():
    points, _ = blobs(1)
    together = kmeans(points, 4)
    for i in range(3):
        torch.testing.assert_close(kmeans(points[i : i + 1], 4)[0], together[i])


def test_one_centre_is_the_mean():
    points, _ = blobs(2)
    torch.testing.assert_close(kmeans(points, 1)[:, 0], points.mean(dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_points_than_centres_are_repeated(count):
    points = torch.arange(count * 2.0).reshape(1, count, 2)
    found = kmeans(points, 4)[0]
    assert {tuple(p) for p in found.tolist()} == {tuple(p) for p in points[0].tolist()}


def test_equal_points():
    assert torch.equal(kmeans(torch.ones(2, 9, 3), 4), torch.ones(2, 4, 3))
