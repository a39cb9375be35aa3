import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import plain
from ratp.training.memory import MANY, _herd_by_shortlist, choose_exemplars
from ratp_reference import herding as reference

EXAMPLE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5**0.5, 0.5**0.5], [0.6, 0.8]])
SELECTIONS = pytest.mark.parametrize("selection", ["herding", "nearest"])


def random_features(seed, count=25, dim=6):
    features = np.random.default_rng(seed).normal(size=(count, dim))
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def test_worked_example():
    assert EXAMPLE.mean(dim=0).tolist() == pytest.approx([0.5768, 0.6268], abs=5e-5)
    assert choose_exemplars(EXAMPLE, 3, "herding").tolist() == [2, 3, 0]
    assert reference.herding(EXAMPLE, 3) == [2, 3, 0]


def test_nearest_goes_by_the_distance_to_the_class_mean():
    features = torch.tensor([[0.0], [1.0], [2.0], [3.0], [14.0]])
    assert choose_exemplars(features, 5, "nearest").tolist() == [3, 2, 1, 0, 4]


def test_herding_covers_what_nearest_does_not():
    """Two groups: the images nearest to the mean lie in the larger one, herding takes from both."""
    features = torch.tensor([[0.0], [0.01], [0.02], [0.03], [0.04], [1.0], [1.01]])
    assert set(choose_exemplars(features, 4, "nearest").tolist()) == {1, 2, 3, 4}
    assert {5, 6} & set(choose_exemplars(features, 4, "herding").tolist())


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 30), wanted=st.integers(0, 35))
def test_picks_agree_with_the_reference(seed, count, wanted):
    features = random_features(seed, count)
    # in double precision, as rounding decides between images that are equally good
    tensor = torch.tensor(features)
    herded = choose_exemplars(tensor, wanted, "herding").tolist()
    assert herded[:3] == reference.herding(features, wanted)[:3]
    assert choose_exemplars(tensor, wanted, "nearest").tolist() == reference.nearest(features, wanted)


@pytest.mark.parametrize("seed", range(10))
def test_all_picks_agree_with_the_reference(seed):
    features = random_features(seed)
    assert choose_exemplars(torch.tensor(features), 15, "herding").tolist() == reference.herding(features, 15)


@SELECTIONS
@given(
    features=arrays(np.float32, st.tuples(st.integers(1, 12), st.just(3)), elements=st.floats(-1e3, 1e3, width=32)),
    wanted=st.integers(0, 15),
)
def test_no_image_is_picked_twice_and_none_is_missing(selection, features, wanted):
    picks = choose_exemplars(torch.tensor(features), wanted, selection).tolist()
    assert len(picks) == len(set(picks)) == min(wanted, len(features))
    assert set(picks) <= set(range(len(features)))


@SELECTIONS
def test_identical_images_are_still_picked_once_each(selection):
    assert sorted(choose_exemplars(torch.ones(4, 2), 3, selection).tolist()) == sorted(
        set(choose_exemplars(torch.ones(4, 2), 3, selection).tolist())
    )


@SELECTIONS
@given(seed=st.integers(0, 1000), wanted=st.integers(1, 25))
def test_fewer_picks_are_the_first_of_more(selection, seed, wanted):
    features = torch.tensor(random_features(seed))
    everything = choose_exemplars(features, 25, selection).tolist()
    assert choose_exemplars(features, wanted, selection).tolist() == everything[:wanted]


@SELECTIONS
def test_positions_can_index_images_even_when_there_are_none(selection):
    picks = choose_exemplars(torch.randn(4, 2), 0, selection)
    assert picks.dtype == torch.int64
    assert torch.arange(4)[picks].tolist() == []


class TestManyImages:
    """From ``MANY`` images on, a pick is made by a shortlist."""

    @pytest.mark.parametrize("dim", [1, 2, 16, 300])
    @pytest.mark.parametrize("count", [MANY - 1, MANY, 5000])
    def test_picks_are_those_of_looking_at_all_images(self, count, dim):
        for seed in range(3):
            features = torch.tensor(random_features(seed, count, dim)).float()
            assert choose_exemplars(features, 28, "herding").tolist() == plain.herding(features, 28)
            assert choose_exemplars(features, 28, "nearest").tolist() == plain.nearest(features, 28)

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
    def test_lengths_need_not_be_one(self, scale):
        features = scale * torch.randn(3000, 20, generator=torch.Generator().manual_seed(0)) + 5
        assert choose_exemplars(features, 40, "herding").tolist() == plain.herding(features, 40)

    @pytest.mark.parametrize("different", [1, 3, 40])
    def test_copies_are_picked_in_their_order(self, different):
        some = torch.tensor(random_features(0, different, 8)).float()
        features = some.repeat(2000 // different, 1)
        assert choose_exemplars(features, 60, "herding").tolist() == plain.herding(features, 60)

    def test_images_that_rounding_cannot_tell_apart(self):
        generator = torch.Generator().manual_seed(0)
        features = torch.ones(2000, 64) + 1e-6 * torch.randn(2000, 64, generator=generator)
        assert choose_exemplars(features, 10, "herding").tolist() == plain.herding(features, 10)

    def test_all_of_many_images_can_be_asked_for(self):
        features = torch.tensor(random_features(0, MANY, 8)).float()
        assert choose_exemplars(features, MANY + 1, "herding").tolist() == plain.herding(features, MANY)

    @pytest.mark.parametrize("dim", [16, 256, 2048])
    def test_the_shortlist_is_sure_of_usual_features(self, dim):
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(dim, generator=generator) + torch.randn(3000, dim, generator=generator)
        features = torch.nn.functional.normalize(features.relu(), dim=1)
        picks, sure = _herd_by_shortlist(features, features.mean(dim=0), 20)
        assert sure
        assert picks.tolist() == plain.herding(features, 20)

    def test_non_finite_values_are_tolerated(self):
        picks = choose_exemplars(torch.full((MANY, 3), torch.nan), 4, "herding")
        assert picks.shape == (4,)
