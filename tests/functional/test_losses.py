import pytest
import torch
import torch.nn.functional as F

from ratp.functional.losses import cross_entropy, mean_over

VALID = torch.tensor([True, False, True, True, False])
NONE = torch.zeros(5, dtype=torch.bool)


def case():
    source = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, generator=source, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])


def test_all_rows_give_torchs_loss():
    logits, labels = case()
    assert torch.equal(cross_entropy(logits, labels), F.cross_entropy(logits, labels))
    torch.testing.assert_close(
        cross_entropy(logits, labels, torch.ones(5, dtype=torch.bool)), F.cross_entropy(logits, labels)
    )


def test_rows_that_do_not_count_are_as_if_they_were_not_there():
    logits, labels = case()
    masked, alone = logits.clone().requires_grad_(), logits[VALID].requires_grad_()
    loss, expected = cross_entropy(masked, labels, VALID), F.cross_entropy(alone, labels[VALID])
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(masked.grad[VALID], alone.grad)
    assert not masked.grad[~VALID].any()


def test_no_row_is_no_loss():
    logits, labels = case()
    logits.requires_grad_()
    loss = cross_entropy(logits, labels, NONE)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


@pytest.mark.parametrize(("valid", "mean"), [(None, 3.0), (VALID, 8 / 3), (NONE, 0.0)])
def test_mean(valid, mean):
    assert mean_over(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), valid).item() == pytest.approx(mean)


def test_mean_of_nothing():
    assert mean_over(torch.zeros(0)).item() == 0


def test_masked_rows_can_be_non_finite():
    assert mean_over(torch.tensor([1.0, torch.nan, 3.0, 5.0, torch.inf]), VALID).item() == 3
