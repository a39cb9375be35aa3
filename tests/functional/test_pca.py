import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratp.functional.losses import PCAConfig, prototype_contrastive
from ratp_reference import pca as reference

FEATURES = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.8, -0.6]])
LABELS = torch.tensor([0, 1, 0])
PROTOTYPES = torch.eye(2)
OLD_PROTOTYPES = torch.tensor([[0.8, 0.6], [-0.6, 0.8]])
PAPER = {"similarity": "dot", "negatives": "all"}

FORMS = ("stable", "published")
SWITCHES = [
    {"similarity": similarity, "negatives": negatives, "old_weight": old_weight}
    for similarity, negatives, old_weight in itertools.product(
        ("cosine", "dot"), ("positive", "all"), (0.0, 0.3, 1.0, 2.5)
    )
]


def random_case(seed, samples=9, classes=4, dim=5, norm=1.0):
    rng = np.random.default_rng(seed)
    features = norm * rng.normal(size=(samples, dim))
    labels = rng.integers(classes, size=samples)
    return features, labels, rng.normal(size=(classes, dim)), rng.normal(size=(classes, dim))


def loss(features, labels, prototypes, old_prototypes=None, **switches):
    def tensor(array):
        return None if array is None else torch.as_tensor(array)

    arguments = (tensor(array) for array in (features, labels, prototypes, old_prototypes))
    return prototype_contrastive(*arguments, PCAConfig(**switches))


def plain_losses(*arrays, **switches):
    tensors = (None if array is None else torch.as_tensor(array) for array in arrays)
    return reference.prototype_contrastive(*tensors, **switches).numpy()


class TestGolden:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(
        ("old", "switches", "per_sample", "mean"),
        [
            (None, {}, (0.008202, 0.166731, 0.0), 0.058311),
            (OLD_PROTOTYPES, {}, (0.007523, 2.078037, 0.0), 0.695186),
            (OLD_PROTOTYPES, {"old_weight": 0.5}, None, 0.510461),
            (OLD_PROTOTYPES, PAPER, (0.519893, 1.113399, 0.434600), 0.689297),
        ],
        ids=["source", "target", "target with half the old weight", "paper"],
    )
    def test_worked_example(self, form, old, switches, per_sample, mean):
        losses = loss(FEATURES, LABELS, PROTOTYPES, old, form=form, **switches)
        assert losses.mean().item() == pytest.approx(mean, abs=2e-6)
        if per_sample is not None:
            assert losses.tolist() == pytest.approx(per_sample, abs=2e-6)

    @pytest.mark.parametrize(
        ("old", "switches", "mean"),
        [(None, {}, 0.058311), (OLD_PROTOTYPES, {}, 0.695186), (OLD_PROTOTYPES, PAPER, 0.689297)],
    )
    def test_the_reference_gives_the_worked_example_too(self, old, switches, mean):
        losses = plain_losses(FEATURES, LABELS, PROTOTYPES, old, **switches)
        assert np.mean(losses) == pytest.approx(mean, abs=2e-6)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_pair_of_cosine_zero_repels_only_when_all_negatives_count(self, form):
        """Samples 1 and 2 are orthogonal and of different classes: their pair adds e⁰ = 1 to the denominator."""
        orthogonal = FEATURES[1:].double(), LABELS[1:], PROTOTYPES.double()
        cosines = orthogonal[0] @ orthogonal[2].T
        without_pair = (12 * cosines).exp().sum(dim=1)
        own = (12 * cosines).exp().gather(1, LABELS[1:, None]).squeeze(1)
        excluded = loss(*orthogonal, form=form, negatives="positive")
        included = loss(*orthogonal, form=form, negatives="all")
        torch.testing.assert_close(excluded.double(), -(own / without_pair).log(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(included.double(), -(own / (without_pair + 1)).log(), rtol=1e-4, atol=1e-6)
        assert (included > excluded).all()


class TestAgainstReference:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("with_old", [False, True], ids=["source", "target"])
    @pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "-".join(map(str, s.values())))
    def test_losses_agree_for_every_switch(self, form, with_old, switches):
        for seed in range(5):
            features, labels, prototypes, old = random_case(seed)
            old = old if with_old else None
            expected = plain_losses(features, labels, prototypes, old, **switches)
            actual = loss(features, labels, prototypes, old, form=form, **switches)
            rtol = 1e-9 if form == "published" else 1e-4
            np.testing.assert_allclose(actual.numpy(), expected, rtol=rtol, atol=1e-6)

    @pytest.mark.parametrize("scale", [1.0, 5.0, 30.0])
    def test_scale_acts_on_the_cosine(self, scale):
        case = random_case(11)
        expected = plain_losses(*case, scale=scale)
        np.testing.assert_allclose(loss(*case, scale=scale).numpy(), expected, rtol=1e-4, atol=1e-6)

    @given(
        seed=st.integers(0, 2**32 - 1),
        samples=st.integers(1, 12),
        classes=st.integers(1, 6),
        dim=st.integers(2, 8),
        switches=st.sampled_from(SWITCHES),
    )
    def test_losses_agree_for_any_batch(self, seed, samples, classes, dim, switches):
        features, labels, prototypes, old = random_case(seed, samples, classes, dim)
        expected = plain_losses(features, labels, prototypes, old, **switches)
        published = loss(features, labels, prototypes, old, form="published", **switches)
        np.testing.assert_allclose(published.numpy(), expected, rtol=1e-7, atol=1e-9)
        stable = loss(features, labels, prototypes, old, **switches)
        np.testing.assert_allclose(stable.numpy(), expected, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("switches", [{}, PAPER], ids=["official", "paper"])
    def test_gradients_are_those_of_the_reference_by_finite_differences(self, form, switches):
        features, labels, prototypes, old = random_case(3, samples=6)
        leaves = [torch.tensor(array, requires_grad=True) for array in (features, prototypes)]
        loss(leaves[0], labels, leaves[1], old, form=form, **switches).mean().backward()

        def mean_loss(f, p):
            return np.mean(plain_losses(f, labels, p, old, **switches))

        for position, leaf in enumerate(leaves):
            arrays = [features, prototypes]
            for cell in np.ndindex(*leaf.shape):
                step = np.zeros(leaf.shape)
                step[cell] = 1e-5
                ahead, behind = arrays.copy(), arrays.copy()
                ahead[position], behind[position] = arrays[position] + step, arrays[position] - step
                slope = (mean_loss(*ahead) - mean_loss(*behind)) / 2e-5
                assert leaf.grad[cell].item() == pytest.approx(slope, abs=1e-5, rel=1e-3)


class TestInvariance:
    @given(seed=st.integers(0, 10_000), factor=st.floats(0.01, 100.0))
    def test_cosine_ignores_the_length_of_features_and_prototypes(self, seed, factor):
        features, labels, prototypes, old = random_case(seed)
        one = loss(features, labels, prototypes, old)
        other = loss(factor * features, labels, prototypes / factor, 3 * factor * old)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)

    def test_dot_does_not(self):
        features, labels, prototypes, old = random_case(0)
        assert not torch.allclose(
            loss(features, labels, prototypes, old, **PAPER), loss(2 * features, labels, prototypes, old, **PAPER)
        )

    @given(seed=st.integers(0, 10_000), switches=st.sampled_from(SWITCHES), order=st.permutations(range(9)))
    def test_permuting_the_batch_permutes_the_losses(self, seed, switches, order):
        features, labels, prototypes, old = random_case(seed)
        straight = loss(features, labels, prototypes, old, **switches)
        permuted = loss(features[order], labels[order], prototypes, old, **switches)
        torch.testing.assert_close(straight[list(order)], permuted, rtol=1e-4, atol=1e-6)

    def test_zero_weight_of_the_old_model_is_the_source_loss(self):
        features, labels, prototypes, old = random_case(2)
        torch.testing.assert_close(
            loss(features, labels, prototypes, old, old_weight=0.0), loss(features, labels, prototypes, None)
        )

    def test_a_batch_of_one_class_has_no_negatives(self):
        features, _, prototypes, _ = random_case(4)
        labels = torch.full((9,), 2)
        for negatives in ("positive", "all"):
            losses = loss(features, labels, prototypes, negatives=negatives, similarity="dot")
            expected = torch.nn.functional.cross_entropy(
                torch.tensor(features) @ torch.tensor(prototypes).T, labels, reduction="none"
            )
            torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-6)


class TestPrecision:
    @given(seed=st.integers(0, 10_000), switches=st.sampled_from(SWITCHES))
    def test_stable_and_published_form_agree_where_both_are_finite(self, seed, switches):
        for dtype in (torch.float32, torch.float64):
            features, labels, prototypes, old = (torch.as_tensor(a) for a in random_case(seed))
            case = features.to(dtype), labels, prototypes.to(dtype), old.to(dtype)
            stable, published = loss(*case, **switches), loss(*case, form="published", **switches)
            assert published.isfinite().all()
            torch.testing.assert_close(stable.to(dtype), published, rtol=1e-3, atol=1e-5)

    def test_half_precision_overflows_only_as_published(self):
        """e¹² is beyond half precision."""
        features, labels, prototypes, old = (torch.as_tensor(a) for a in random_case(0))
        features[0] = prototypes[labels[0]]
        case = features.half(), labels, prototypes.half(), old.half()
        assert not loss(*case, form="published").isfinite().all()
        expected = loss(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in case))
        torch.testing.assert_close(loss(*case), expected, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_long_features_with_dot_products_overflow_only_as_published(self, dtype):
        features, labels, prototypes, old = (torch.as_tensor(a) for a in random_case(1))
        features = features / features.norm(dim=1, keepdim=True) * 1000**0.5
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (features, prototypes)]
        assert not loss(leaves[0], labels, leaves[1], old.to(dtype), form="published", **PAPER).isfinite().all()
        losses = loss(leaves[0], labels, leaves[1], old.to(dtype), **PAPER)
        assert losses.isfinite().all()
        losses.mean().backward()
        assert all(leaf.grad.isfinite().all() and leaf.grad.abs().sum() > 0 for leaf in leaves)

    def test_long_features_give_the_loss_of_exact_arithmetic(self):
        """Shifting every exponent by the same amount leaves the quotient alone and keeps double precision finite."""
        features, labels, prototypes, old = random_case(1)
        features *= np.sqrt(1000) / np.linalg.norm(features, axis=1, keepdims=True)
        expected = []
        for i, feature in enumerate(features):
            near = [feature @ prototypes[labels[i]], feature @ old[labels[i]]]
            far = [feature @ other for j, other in enumerate(features) if labels[j] != labels[i]]
            everything = np.array([*(prototypes @ feature), *(old @ feature), *far])
            top = everything.max()
            expected.append(top + np.log(np.exp(everything - top).sum()) - np.logaddexp(*near))
        actual = loss(features, labels, prototypes, old, **PAPER)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-3)

    def test_under_autocast_the_loss_stays_finite_and_near(self):
        features, labels, prototypes, old = (torch.as_tensor(a, dtype=None) for a in random_case(0))
        case = features.float(), labels, prototypes.float(), old.float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = loss(*case, negatives="all")
        torch.testing.assert_close(mixed.float(), loss(*case, negatives="all"), rtol=0.1, atol=0.2)


class TestGradientFlow:
    def test_old_prototypes_are_constants(self):
        features, labels, prototypes, old = (torch.as_tensor(a) for a in random_case(5))
        for tensor in (features, prototypes, old):
            tensor.requires_grad_()
        for form in FORMS:
            loss(features, labels, prototypes, old, form=form).mean().backward()
        assert old.grad is None
        assert features.grad.abs().sum() > 0
        assert prototypes.grad.abs().sum() > 0

    def test_the_loss_of_one_sample_moves_the_samples_that_repel_it(self):
        features = torch.tensor([[1.0, 0.2], [0.9, 0.5], [0.8, 0.1]], requires_grad=True)
        loss(features, torch.tensor([0, 1, 0]), PROTOTYPES)[0].backward()
        moved = features.grad.abs().sum(dim=1) > 0
        assert moved.tolist() == [True, True, False]


class TestSomeRows:
    VALID = torch.tensor([True, False, True, True, False, True, True, False, True])

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("switches", SWITCHES, ids=lambda s: "-".join(map(str, s.values())))
    def test_the_others_have_no_loss_and_repel_none(self, form, switches):
        features, labels, prototypes, old = (torch.as_tensor(a) for a in random_case(6))
        config = PCAConfig(form=form, **switches)
        masked, alone = features.clone().requires_grad_(), features[self.VALID].requires_grad_()
        losses = prototype_contrastive(masked, labels, prototypes, old, config, self.VALID)
        expected = prototype_contrastive(alone, labels[self.VALID], prototypes, old, config)
        torch.testing.assert_close(losses[self.VALID], expected)
        assert not losses[~self.VALID].any()
        losses.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(masked.grad[self.VALID], alone.grad, rtol=1e-4, atol=1e-5)
        assert not masked.grad[~self.VALID].any()
