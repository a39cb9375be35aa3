"""The kernels of the losses against the plain functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ratp.functional import kernels, losses
from ratp.functional.losses import (
    PCAConfig,
    cross_entropy,
    distillation,
    fused_terms,
    mean_over,
    prototype_contrastive,
)

WEIGHTS = {"distill": 0.5, "consistency": 0.3}
CLOSE = {torch.float32: {"rtol": 2e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-3}}


def batch(rows, dim, classes, device, masked=False, dtype=torch.float32):
    source = torch.Generator().manual_seed(rows + dim + classes)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=source).to(device, dtype)

    valid = torch.arange(rows) % 3 != 1
    valid[: rows // 2] = True
    return SimpleNamespace(
        embedding=draw(rows, dim, dtype=dtype).requires_grad_(),
        logits=(3 * draw(rows, classes)).to(dtype).requires_grad_(),
        prototypes=draw(classes, dim).requires_grad_(),
        old=draw(classes, dim),
        teacher=draw(rows, classes),
        labels=torch.randint(classes, (rows,), generator=source).to(device),
        valid=valid.to(device) if masked else None,
    )


def plain(b, names, config):
    embedding, logits, valid, half = b.embedding.float(), b.logits.float(), b.valid, len(b.logits) // 2
    old = b.old if "old" in names else None
    losses = prototype_contrastive(embedding, b.labels, b.prototypes, old, config, valid)
    terms = {"ce": cross_entropy(logits, b.labels, valid), "pca": config.weight * mean_over(losses, valid)}
    if "distill" in names:
        terms["distill"] = WEIGHTS["distill"] * distillation(logits, b.teacher, valid)
    if "consistency" in names:
        chosen = None if valid is None else valid[half:]
        terms["consistency"] = WEIGHTS["consistency"] * distillation(logits[half:], logits[:half], chosen)
    return terms


def fused(b, names, config):
    weights = WEIGHTS["distill"], WEIGHTS["consistency"] if "consistency" in names else 0.0
    old, teacher = b.old if "old" in names else None, b.teacher if "distill" in names else None
    output = b.embedding, b.logits
    return fused_terms(output, b.labels, b.valid, b.prototypes, old, teacher, config, weights)


@pytest.fixture(autouse=True)
def _usable(monkeypatch):
    monkeypatch.setattr(kernels, "usable", lambda device: True)


def assert_same(b, names, **switches):
    config = PCAConfig(weight=0.7, **switches)
    found, expected = fused(b, names, config), plain(b, names, config)
    assert list(found) == list(expected)
    learning = [b.embedding, b.logits, b.prototypes]
    results = []
    for terms in (found, expected):
        # different factors, so that no term's gradient stands for another's
        total = sum(factor * term for factor, term in enumerate(terms.values(), start=1))
        results.append([*terms.values(), *torch.autograd.grad(total, learning)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **CLOSE[one.dtype])


@pytest.mark.parametrize("masked", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("names", ["", "old", "old distill", "consistency", "old distill consistency"])
def test_losses_and_gradients_are_those_of_the_plain_functions(names, masked, device):
    assert_same(batch(8, 12, 5, device, masked), names)


@pytest.mark.parametrize(
    "switches",
    [
        {"similarity": "dot"},
        {"negatives": "all"},
        {"similarity": "dot", "negatives": "all", "old_weight": 2.5},
        {"old_weight": 0.0},
        {"old_weight": 0.5, "scale": 30.0},
    ],
)
def test_switches(switches, device):
    assert_same(batch(6, 7, 3, device, masked=True), "old distill", **switches)


@pytest.mark.parametrize(("rows", "dim", "classes"), [(1, 3, 2), (18, 40, 17), (5, 300, 1)])
def test_sizes(rows, dim, classes, device):
    assert_same(batch(rows, dim, classes, device), "old distill")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("rows", "dim", "classes"), [(128, 256, 10), (128, 128, 10), (128, 256, 345), (600, 1000, 65)])
def test_real_sizes(rows, dim, classes, device):
    # all negatives: among so many pairs, rounding may bring one to the other side of the threshold
    assert_same(batch(rows, dim, classes, device, masked=True), "old distill consistency", negatives="all")


def test_other_types(device):
    assert_same(batch(8, 12, 5, device, masked=True, dtype=torch.bfloat16), "old distill consistency")


def test_tensors_need_not_be_contiguous(device):
    b = batch(8, 6, 4, device)
    b.embedding, b.prototypes = b.embedding.detach()[:, ::2].requires_grad_(), b.prototypes.detach()[:, ::2]
    b.old, b.teacher = b.old[:, ::2], b.teacher.T.contiguous().T
    b.prototypes.requires_grad_()
    assert_same(b, "old distill")


def test_a_vector_without_length_stays_finite(device):
    b = batch(6, 7, 3, device)
    with torch.no_grad():
        b.embedding[2], b.prototypes[1] = 0, 0
    b.embedding.requires_grad_()
    assert_same(b, "old")


def test_without_rows_that_count_all_is_zero(device):
    b = batch(4, 5, 3, device)
    b.valid = torch.zeros(4, dtype=torch.bool, device=device)
    terms = fused(b, "old distill consistency", PCAConfig())
    gradients = torch.autograd.grad(sum(terms.values()), [b.embedding, b.logits, b.prototypes])
    assert not any(tensor.any() for tensor in (*terms.values(), *gradients))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_stays_nan_in_a_row_that_counts_and_is_ignored_in_others(device):
    b = batch(6, 5, 3, device, masked=True)
    left_out = int((~b.valid).nonzero()[0])
    with torch.no_grad():
        b.embedding[left_out], b.logits[left_out], b.teacher[left_out] = (float("nan"),) * 3
    names = "old distill"
    assert all(term.isfinite() for term in fused(b, names, PCAConfig()).values())
    with torch.no_grad():
        b.embedding[0, 0] = b.logits[0, 0] = float("nan")
    assert all(term.isnan() for term in fused(b, names, PCAConfig()).values())


@pytest.mark.parametrize(("rows", "dim", "classes"), [(9, 6, 4), (1, 1, 1), (5, 130, 19)])
def test_scores(rows, dim, classes, device):
    b = batch(rows, dim, classes, device)
    expected = (b.embedding.double() @ b.prototypes.double().T).float()
    wanted = torch.autograd.grad(expected, (b.embedding, b.prototypes), b.teacher)
    product = losses._Scores.apply(b.embedding, b.prototypes)
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(product, (b.embedding, b.prototypes), b.teacher)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("switches", [{"form": "published"}, {"weight": 0.0}])
def test_other_switches_are_left_to_the_plain_functions(switches, device):
    assert fused(batch(4, 5, 3, device), "old", PCAConfig(**switches)) == {}


def test_a_batch_that_does_not_fit_is_left_to_the_plain_functions(device):
    assert fused(batch(4, 1025, 3, device), "old", PCAConfig()) == {}
