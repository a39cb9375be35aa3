"""The bank of a domain and the loss that lets neighbours agree."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ratp.methods.gsfda import Bank, disagreement


def bank(samples=12, dim=4, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(samples, dim, generator=generator)
    return embeddings, Bank(embeddings, torch.randn(samples, classes, generator=generator).log_softmax(dim=1))


class TestLoss:
    def test_golden(self):
        p = torch.tensor([[0.7, 0.2, 0.1]])
        near = torch.tensor([[[0.6, 0.3, 0.1], [0.1, 0.8, 0.1]]])
        torch.testing.assert_close(disagreement(p.log(), near.log()), torch.tensor([2.140466]), rtol=0, atol=1e-6)

    def test_without_neighbours_it_is_nothing(self):
        assert disagreement(torch.zeros(2, 3), torch.zeros(2, 0, 3)).tolist() == [0, 0]

    def test_it_is_finite_for_certain_contradictions(self):
        logits = torch.tensor([[400.0, -400.0]], requires_grad=True)
        near = torch.tensor([[[-400.0, 400.0]]]).log_softmax(dim=2)
        loss = disagreement(logits.log_softmax(dim=1), near).sum()
        assert loss.isfinite()
        assert loss > 100
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()

    def test_neighbours_are_constants(self):
        near = torch.zeros(1, 1, 2, requires_grad=True)
        assert not disagreement(torch.zeros(1, 2), near).requires_grad


class TestBank:
    def test_a_sample_is_no_neighbour_of_itself(self):
        """The nearest by hand; its own entry would be the first of k + 1."""
        embeddings, filled_bank = bank()
        places = torch.tensor([3, 0, 7])
        cosines = F.normalize(embeddings[places], dim=1) @ F.normalize(embeddings, dim=1).T
        with_self = cosines.topk(5, dim=1).indices
        assert torch.equal(with_self[:, 0], places)
        assert torch.equal(filled_bank.nearest(embeddings[places], places, 4), with_self[:, 1:])

    def test_unless_its_own_entry_counts(self):
        embeddings, filled_bank = bank(5)
        near = filled_bank.nearest(embeddings, torch.arange(5), 9, own=True)
        assert near.shape == (5, 5)
        assert near[:, 0].tolist() == [0, 1, 2, 3, 4]
        assert filled_bank.nearest(embeddings[:1], torch.tensor([0]), 1, own=True).tolist() == [[0]]

    @pytest.mark.parametrize(("samples", "count", "found"), [(5, 3, 3), (3, 3, 2), (1, 3, 0), (5, 0, 0)])
    def test_there_are_at_most_all_others(self, samples, count, found):
        embeddings, filled_bank = bank(samples)
        near = filled_bank.nearest(embeddings, torch.arange(samples), count)
        assert near.shape == (samples, found)
        assert filled_bank.logs[near].shape == (samples, found, 3)

    def test_writing_changes_the_bank_itself(self):
        _, filled_bank = bank()
        directions, logs = filled_bank.directions, filled_bank.logs
        before = directions.clone(), logs.clone()
        places, new = torch.tensor([2, 5]), torch.tensor([[3.0, 0, 0, 0], [0, 0, 2.0, 0]])
        predicted = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
        filled_bank.write(places, new, predicted, torch.tensor([True, True]))
        assert torch.equal(directions[places], torch.tensor([[1.0, 0, 0, 0], [0, 0, 1.0, 0]]))
        assert torch.equal(logs[places], predicted)
        others = [i for i in range(12) if i not in (2, 5)]
        assert torch.equal(directions[others], before[0][others])
        assert torch.equal(logs[others], before[1][others])

    def test_rows_that_do_not_count_are_written_nowhere(self):
        _, filled_bank = bank()
        before = filled_bank.directions.clone()
        places = torch.tensor([11, 11, 0])
        filled_bank.write(places, torch.ones(3, 4), torch.zeros(3, 3), torch.zeros(3, dtype=torch.bool))
        assert torch.equal(filled_bank.directions, before)
        near = filled_bank.nearest(torch.ones(3, 4), places, 11)
        assert near.max() < 12

    def test_of_a_sample_that_comes_twice_the_later_stays(self):
        _, filled_bank = bank()
        rows = torch.eye(4)
        counts = torch.tensor([True, True, True, False])
        filled_bank.write(torch.tensor([4, 9, 4, 4]), rows, torch.zeros(4, 3), counts)
        assert torch.equal(filled_bank.directions[4], rows[2])
        assert torch.equal(filled_bank.directions[9], rows[1])

    def test_embeddings_have_unit_length(self):
        _, filled_bank = bank()
        torch.testing.assert_close(filled_bank.directions.norm(dim=1), torch.ones(12))
        assert math.isfinite(Bank(torch.zeros(2, 4), torch.zeros(2, 3)).directions.sum().item())
