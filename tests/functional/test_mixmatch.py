import pytest
import torch
import torch.nn.functional as F

from ratp.methods.shot_plus_plus import (
    confident_split,
    draw_ratio,
    interleave,
    mix,
    sharpen,
    soft_cross_entropy,
    squared_error,
)


class TestSplit:
    def test_written_out(self):
        """Six of nine are below the mean: two thirds of each class, rounded down."""
        entropies = torch.tensor([0.1, 0.2, 0.3, 0.9, 0.1, 0.8, 0.2, 0.9, 0.1])
        predictions = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 0])
        assert (entropies < entropies.mean()).sum() == 6
        sure = confident_split(entropies, predictions, 4)
        assert sure.nonzero().squeeze(1).tolist() == [0, 1, 4, 6, 8]

    @pytest.mark.parametrize("seed", range(4))
    def test_sizes_add_up_and_the_surest_of_a_class_are_taken(self, seed):
        generator = torch.Generator().manual_seed(seed)
        entropies = torch.rand(101, generator=generator)
        predictions = torch.randint(5, (101,), generator=generator)
        sure = confident_split(entropies, predictions, 5)
        below = int((entropies.double() < entropies.double().mean()).sum())
        assert sure.sum() + (~sure).sum() == 101
        for k in range(5):
            own = predictions == k
            assert (sure & own).sum() == below * int(own.sum()) // 101
            assert entropies[sure & own].max() <= entropies[~sure & own].min()

    def test_a_tiny_class_may_give_none(self):
        sure = confident_split(torch.tensor([0.0, 0.1, 0.9, 1.0, 0.0]), torch.tensor([0, 0, 0, 0, 1]), 2)
        assert not sure[4]

    @pytest.mark.parametrize("count", [0, 1, 7])
    def test_equally_sure_about_all_is_sure_about_none(self, count):
        assert not confident_split(torch.full((count,), 0.3), torch.zeros(count, dtype=torch.int64), 3).any()


class TestSharpen:
    def test_golden(self):
        sharp = sharpen(torch.tensor([[0.6, 0.3, 0.1]]), 0.5)
        torch.testing.assert_close(sharp, torch.tensor([[0.782609, 0.195652, 0.021739]]), rtol=0, atol=1e-6)

    def test_a_temperature_of_one_changes_nothing(self):
        probabilities = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).softmax(dim=1)
        torch.testing.assert_close(sharpen(probabilities, 1.0), probabilities)

    def test_certain_stays_certain(self):
        assert torch.equal(sharpen(torch.eye(3), 0.01), torch.eye(3))


class TestMixing:
    def test_a_ratio_of_one_mixes_nothing(self):
        values, order = torch.randn(6, 2), torch.tensor([3, 4, 5, 0, 1, 2])
        assert torch.equal(mix(values, torch.tensor(1.0), order), values)
        torch.testing.assert_close(mix(values, torch.tensor(0.75), order), 0.75 * values + 0.25 * values[order])

    @pytest.mark.parametrize("alpha", [0.1, 0.75, 2.0])
    def test_ratios_are_at_least_a_half_and_as_the_beta_distribution_has_it(self, alpha):
        generator = torch.Generator().manual_seed(0)
        ratios = torch.stack([draw_ratio(alpha, generator) for _ in range(1500)])
        expected = torch.distributions.Beta(alpha, alpha).sample((20_000,))
        assert ratios.min() >= 0.5
        assert ratios.max() <= 1
        assert ratios.mean().item() == pytest.approx(torch.maximum(expected, 1 - expected).mean().item(), abs=0.02)


@pytest.mark.parametrize("count", [3, 6, 7, 8])
@pytest.mark.parametrize("parts", [1, 2, 3])
class TestInterleave:
    def test_twice_is_nothing(self, count, parts):
        before = list(torch.arange(float(count * parts)).reshape(parts, count, 1))
        after = interleave(interleave(before))
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))

    def test_each_has_some_of_the_first_and_nothing_is_lost(self, count, parts):
        before = list(torch.arange(float(count * parts)).reshape(parts, count, 1))
        after = interleave(before)
        assert torch.equal(torch.cat(after).flatten().sort().values, torch.cat(before).flatten())
        for i, part in enumerate(after):
            assert (part < count).any()  # of the first
            assert i == 0 or (after[0] // count == i).any()


def test_losses_written_out():
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, 0.0, 3.0]])
    hard = torch.tensor([1, 2])
    one_hot = F.one_hot(hard, 3).float()
    torch.testing.assert_close(soft_cross_entropy(logits, one_hot), F.cross_entropy(logits, hard))
    torch.testing.assert_close(squared_error(logits, one_hot), F.mse_loss(logits.softmax(dim=1), one_hot))
