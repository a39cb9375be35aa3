import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

import plain
from ratp.functional import pseudo_labels as knn
from ratp.functional.pseudo_labels import knn_vote
from ratp_reference import knn as reference


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


def lattice(seed, points, queries=60, dim=3, classes=4):
    """Points on a small lattice around the origin, so that distances are exact, and very often the same."""
    rng = np.random.default_rng(seed)
    half = rng.integers(-2, 3, size=(points // 2, dim))
    grid = np.concatenate([half, -half]).astype(np.float32)
    query_points = rng.integers(-2, 3, size=(queries, dim)).astype(np.float32)
    return torch.tensor(query_points), torch.tensor(grid), torch.tensor(rng.integers(classes, size=len(grid)))


class TestTies:
    """Of some points all are seen; of more, groups are searched first, and a tie may go on beyond what is seen."""

    @given(
        seed=st.integers(0, 2**32 - 1),
        points=st.integers(1, 40),
        classes=st.integers(1, 4),
        neighbours=st.integers(1, 90),
        dim=st.integers(1, 3),
    )
    def test_some_points(self, seed, points, classes, neighbours, dim):
        case = lattice(seed, 2 * points, queries=12, dim=dim, classes=classes)
        expected = plain.knn_vote(*case, neighbours, classes)
        assert knn_vote(*case, neighbours, classes).tolist() == expected.tolist()

    @pytest.mark.parametrize("dim", [1, 3, 12])
    @pytest.mark.parametrize("points", [544, 1000, 1502, 3000])
    @pytest.mark.parametrize("neighbours", [1, 2, 15, 30, 77, 500])
    def test_more_points(self, points, neighbours, dim):
        for seed in range(3):
            case = lattice(seed, points, dim=dim)
            assert torch.equal(knn_vote(*case, neighbours, 4), plain.knn_vote(*case, neighbours, 4))

    def test_the_smallest_class_fills_the_last_places(self):
        """Four points are equally far away, and two of them vote beside the nearest one."""
        points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
        for labels, winner in (([3, 2, 3, 2, 3], 2), ([1, 1, 3, 3, 2], 1), ([3, 3, 1, 3, 1], 1), ([0, 3, 3, 0, 3], 0)):
            assert knn_vote(torch.zeros(1, 2), points, torch.tensor(labels), 3, 4).tolist() == [winner]

    @pytest.mark.parametrize("points", [6, 700, 3000])
    def test_the_order_of_points_does_not_matter(self, points):
        queries, grid, labels = lattice(5, points)
        order = torch.randperm(points, generator=torch.Generator().manual_seed(0))
        for neighbours in (1, 5, 20):
            one = knn_vote(queries, grid, labels, neighbours, 4)
            assert torch.equal(one, knn_vote(queries, grid[order], labels[order], neighbours, 4))

    @pytest.mark.parametrize("count", [5, 2000])
    def test_if_all_points_are_the_same_the_smallest_class_wins(self, count):
        labels = torch.arange(count) % 3 + 1
        assert knn_vote(torch.ones(4, 2), torch.ones(count, 2), labels, 5, 4).tolist() == [1] * 4

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_point_may_stand_under_several_classes(self, dtype):
        generator = torch.Generator().manual_seed(0)
        some = torch.randn(900, 8, generator=generator, dtype=dtype)
        points, labels = some.repeat(3, 1), torch.arange(3).repeat_interleave(900)
        for neighbours in (1, 2, 7, 50):
            expected = plain.knn_vote(some, points, labels, neighbours, 3)
            assert torch.equal(knn_vote(some, points, labels, neighbours, 3), expected)


class TestScale:
    @pytest.mark.parametrize("chunk", [1, 100, 8192])
    @pytest.mark.parametrize(("points", "neighbours"), [(4000, 40), (4001, 40), (4007, 5), (4000, 400), (3999, 3999)])
    def test_labels_are_those_of_sorting_all_points(self, points, neighbours, chunk):
        generator = torch.Generator().manual_seed(points)
        queries = torch.randn(300, 16, generator=generator, dtype=torch.float64)
        case = queries, torch.randn(points, 16, generator=generator, dtype=torch.float64)
        labels = torch.randint(10, (points,), generator=generator)
        expected = plain.knn_vote(*case, labels, neighbours, 12)
        assert torch.equal(knn_vote(*case, labels, neighbours, 12, chunk), expected)

    @pytest.mark.parametrize("points", [60, 3000])
    @pytest.mark.parametrize("rows", [1, 7, 150])
    def test_a_gpu_out_of_memory_changes_nothing(self, rows, points):
        queries, grid, labels = lattice(3, points, queries=200)
        expected = knn_vote(queries, grid, labels, 9, 4)
        scarce = ScarceMemory.holding(queries, rows)
        assert torch.equal(knn_vote(scarce, grid, labels, 9, 4).as_subclass(torch.Tensor), expected)
        assert scarce.failures

    def test_non_finite_values_are_tolerated(self):
        labels = knn_vote(torch.full((3, 2), torch.nan), torch.randn(5, 2), torch.arange(5), 2, 5)
        assert labels.shape == (3,)

    def test_no_queries_get_no_labels(self):
        labels = knn_vote(torch.zeros(0, 2), torch.randn(5, 2), torch.arange(5), 2, 5)
        assert (labels.shape, labels.dtype) == ((0,), torch.int64)


@pytest.mark.slow
def test_memory_is_that_of_a_chunk():
    """All distances at once would take 570 MiB, and what is done with them more."""
    script = """
import resource, torch
from ratp.functional.pseudo_labels import knn_vote
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
generator = torch.Generator().manual_seed(0)
points, labels = torch.randn(100_000, 4, generator=generator), torch.arange(10).repeat_interleave(10_000)
knn_vote(points[:10], points, labels, 200, 10)
before = peak()
knn_vote(points[:1500], points, labels, 200, 10)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 1.5 * knn.CPU_ROOM


class ScarceMemory(torch.Tensor):
    """Runs out of memory when more than some of its rows are multiplied with a matrix."""

    @classmethod
    def holding(cls, tensor, rows):
        cls.rows, cls.failures = rows, 0
        return tensor.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.matmul, torch.Tensor.__matmul__) and len(args[0]) > cls.rows:
            cls.failures += 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return super().__torch_function__(function, types, args, kwargs or {})
