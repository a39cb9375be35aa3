import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ratp.functional.losses import distillation
from ratp_reference import distill as reference

LOGITS = arrays(np.float64, st.tuples(st.integers(1, 6), st.just(5)), elements=st.floats(-20, 20))


def test_it_is_the_divergence_of_the_student_from_the_teacher():
    """Teacher (½, ½), student (¾, ¼): KL(teacher ‖ student) = ½·log(4/3), the other way it is log 2 − H(¼)."""
    student, teacher = torch.tensor([[math.log(3.0), 0.0]]), torch.zeros(1, 2)
    assert distillation(student, teacher).item() == pytest.approx(0.5 * math.log(4 / 3))
    assert distillation(teacher, student).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


@given(student=LOGITS, seed=st.integers(0, 1000))
def test_it_agrees_with_the_reference(student, seed):
    teacher = np.random.default_rng(seed).normal(scale=3, size=student.shape)
    student, teacher = torch.tensor(student), torch.tensor(teacher)
    expected = reference.distillation(student, teacher).item()
    assert distillation(student, teacher).item() == pytest.approx(expected, rel=1e-3, abs=1e-5)


@given(logits=LOGITS, shift=st.floats(-10, 10))
def test_equal_distributions_have_no_divergence(logits, shift):
    student = torch.tensor(logits)
    assert distillation(student, student).item() == pytest.approx(0, abs=1e-6)
    assert distillation(student + shift, student).item() == pytest.approx(0, abs=1e-5)


@given(logits=LOGITS, position=st.integers(0, 4), by=st.floats(0.5, 5))
def test_different_distributions_have_some(logits, position, by):
    logits = np.clip(logits, -2, 2)
    changed = logits.copy()
    changed[0, position] += by
    assert distillation(torch.tensor(changed), torch.tensor(logits)).item() > 1e-4 / len(logits)


def test_it_is_a_mean_over_the_batch():
    student, teacher = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    rows = torch.stack([distillation(student[i : i + 1], teacher[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(distillation(student, teacher), rows.mean())
    torch.testing.assert_close(distillation(student.repeat(3, 1), teacher.repeat(3, 1)), rows.mean())


def test_only_the_student_learns():
    student, teacher = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    distillation(student, teacher).backward()
    assert teacher.grad is None
    # d KL(q ‖ softmax(s)) / ds = (softmax(s) − q) / n
    torch.testing.assert_close(student.grad, (student.softmax(1) - teacher.softmax(1)).detach() / 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_logits_far_apart_give_a_finite_loss(dtype):
    student = torch.tensor([[0.0, 40.0, -40.0]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[40.0, 0.0, -40.0]], dtype=dtype)
    loss = distillation(student, teacher)
    assert loss.item() == pytest.approx(40.0, rel=1e-3)
    loss.backward()
    assert student.grad.isfinite().all()


def test_no_images_to_distil_on_is_no_loss():
    """A batch may consist of memory images alone when only target images are distilled."""
    student = torch.zeros(0, 3, requires_grad=True)
    loss = distillation(student, torch.zeros(0, 3))
    assert loss.item() == 0


class TestSomeRows:
    VALID = torch.tensor([True, False, True, True, False])

    def test_the_others_are_as_if_they_were_not_there(self):
        student, teacher = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
        masked, alone = student.clone().requires_grad_(), student[self.VALID].requires_grad_()
        loss, expected = distillation(masked, teacher, self.VALID), distillation(alone, teacher[self.VALID])
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(masked.grad[self.VALID], alone.grad)
        assert not masked.grad[~self.VALID].any()

    def test_none_is_no_loss(self):
        student = torch.randn(5, 3, requires_grad=True)
        loss = distillation(student, torch.randn(5, 3), torch.zeros(5, dtype=torch.bool))
        loss.backward()
        assert loss.item() == 0
        assert not student.grad.any()
