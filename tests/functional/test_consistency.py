"""CoTTA's mathematics: cross-entropy with a teacher, slow averages, weights put back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ratp.functional.losses import logit_cross_entropy
from ratp.functional.optim import follow_
from ratp.methods.cotta import restore_, teacher_loss

TEACHER, STUDENT = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]])


class TestConsistency:
    @pytest.mark.parametrize(("symmetric", "value"), [(False, 0.664811), (True, 0.548638)])
    def test_golden(self, symmetric, value):
        assert teacher_loss(STUDENT, TEACHER, symmetric=symmetric).item() == pytest.approx(value, abs=1e-6)

    def test_it_is_torchs_cross_entropy_with_soft_labels(self):
        generator = torch.Generator().manual_seed(0)
        student, teacher = torch.randn(2, 6, 5, generator=generator)
        expected = F.cross_entropy(student, teacher.softmax(dim=1), reduction="none")
        torch.testing.assert_close(logit_cross_entropy(student, teacher), expected)

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_no_gradient_reaches_the_teacher(self, symmetric):
        student, teacher = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_()
        gradients = torch.autograd.grad(
            teacher_loss(student, teacher, symmetric=symmetric), [student, teacher], allow_unused=True
        )
        assert gradients[0].abs().sum() > 0
        assert gradients[1] is None

    @pytest.mark.parametrize("symmetric", [True, False])
    def test_very_sure_ones_give_numbers(self, symmetric):
        student = torch.tensor([[1e4, 0.0], [0.0, 1e4]], requires_grad=True)
        loss = teacher_loss(student, torch.tensor([[0.0, 1e4], [0.0, 1e4]]), symmetric=symmetric)
        assert loss.isfinite()
        assert torch.autograd.grad(loss, student)[0].isfinite().all()


class TestFollow:
    def test_golden(self):
        average = torch.zeros(3)
        follow_([average], [torch.ones(3)], 0.999)
        torch.testing.assert_close(average, torch.full((3,), 0.001))

    @pytest.mark.parametrize(("steps", "left"), [(50, 0.951), (800, 0.449)])
    def test_what_is_left_of_the_start(self, steps, left):
        average = torch.ones(1, dtype=torch.float64)
        for _ in range(steps):
            follow_([average], [torch.zeros(1, dtype=torch.float64)], 0.999)
        assert average.item() == pytest.approx(left, abs=1e-3)

    def test_it_may_never_move_or_at_once(self):
        average = torch.tensor([0.1, -3.7, 1e-30])
        before, value = average.clone(), torch.tensor([5.0, 6.0, 7.0])
        follow_([average], [value], 1.0)
        assert torch.equal(average, before)
        follow_([average], [value], 0.0)
        assert torch.equal(average, value)

    def test_parameters_stay_parameters(self):
        average = torch.nn.Parameter(torch.zeros(2))
        follow_([average], [torch.nn.Parameter(torch.ones(2))], 0.5)
        assert average.requires_grad and average.is_leaf
        assert average.tolist() == [0.5, 0.5]


class TestRestore:
    def restored(self, probability, count=100_000):
        weights = [torch.ones(count // 2), torch.ones(count // 200, 100)]
        restore_(weights, [torch.zeros_like(w) for w in weights], probability, torch.Generator().manual_seed(0))
        return sum(int((w == 0).sum()) for w in weights), weights

    def test_golden(self):
        count, weights = self.restored(0.01)
        assert abs(count - 1000) <= 95
        assert {w for part in weights for w in part.unique().tolist()} == {0.0, 1.0}

    def test_none_and_all(self):
        assert self.restored(0.0)[0] == 0
        assert self.restored(1.0)[0] == 100_000
