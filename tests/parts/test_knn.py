import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from ratp.parts.knn import knn_vote
from reference import knn as reference


def random_case(seed, queries=40, points=30, dim=4, classes=5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(queries, dim)), rng.normal(size=(points, dim)), rng.integers(classes, size=points)


def vote(queries, points, labels, neighbours, classes=5, dtype=torch.float32, **options):
    def floats(array):
        return torch.as_tensor(np.asarray(array)).to(dtype)

    return knn_vote(floats(queries), floats(points), torch.as_tensor(labels), neighbours, classes, **options).tolist()


@given(
    seed=st.integers(0, 2**32 - 1),
    queries=st.integers(1, 20),
    points=st.integers(1, 20),
    dim=st.integers(1, 6),
    classes=st.integers(1, 5),
    neighbours=st.integers(1, 25),
)
def test_labels_agree_with_the_reference(seed, queries, points, dim, classes, neighbours):
    case = random_case(seed, queries, points, dim, classes)
    assert vote(*case, neighbours, classes, dtype=torch.float64) == reference.knn_vote(*case, neighbours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("neighbours", [1, 2, 4, 7, 30])
def test_labels_agree_with_scikit_learn(neighbours, dtype):
    for seed in range(10):
        queries, points, labels = random_case(seed)
        oracle = KNeighborsClassifier(neighbours, algorithm="brute").fit(points, labels)
        assert vote(queries, points, labels, neighbours, dtype=dtype) == oracle.predict(queries).tolist()


def test_distance_is_euclidean_and_not_the_angle():
    """The first point lies in the query's direction, the second nearer to it."""
    assert vote([[1.0, 0.0]], [[5.0, 0.0], [1.0, 1.0]], [0, 1], 1) == [1]


def test_distance_is_not_the_dot_product_either():
    assert vote([[1.0, 1.0]], [[9.0, 9.0], [0.9, 0.9]], [0, 1], 1) == [1]


@pytest.mark.parametrize(("labels", "winner"), [([3, 1, 4, 2], 1), ([4, 3, 3, 4], 3), ([0, 4, 4, 0], 0)])
def test_tied_votes_go_to_the_smallest_class(labels, winner):
    assert vote([[0.0, 0.0]], [[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [0.0, -4.0]], labels, 4) == [winner]


def test_one_more_vote_beats_a_smaller_class():
    assert vote([[0.0]], [[1.0], [2.0], [3.0], [4.0], [5.0]], [4, 0, 4, 0, 4], 5) == [4]


def test_more_neighbours_than_points_means_all_points():
    queries, points, labels = random_case(0, points=7)
    assert vote(queries, points, labels, 1000) == vote(queries, points, labels, 7)
    assert len(set(vote(queries, points, labels, 1000))) == 1


@pytest.mark.parametrize("chunk", [1, 3, 39, 40, 41])
def test_the_chunk_size_changes_nothing(chunk):
    case = random_case(1)
    assert vote(*case, 5, chunk=chunk) == vote(*case, 5)


@pytest.mark.parametrize("offset", [10.0, 100.0, 1000.0])
def test_neighbours_are_found_far_from_the_origin_too(offset):
    """Differences between points are of order one, so single precision resolves them at any of these offsets."""
    queries, points, labels = random_case(2)
    queries, points = ((array + offset).astype(np.float32).astype(np.float64) for array in (queries, points))
    assert vote(queries, points, labels, 3) == reference.knn_vote(queries, points, labels, 3)
