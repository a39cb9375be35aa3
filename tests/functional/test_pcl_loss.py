import math

import pytest
import torch

from ratp.functional.losses import proxy_contrastive

# The example of RaTP's loss.
FEATURES = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.8, -0.6]])
LABELS = torch.tensor([0, 1, 0])
PROXIES = torch.eye(2)


def random_case(seed=0, samples=9, classes=4, dim=5):
    source = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, dim, generator=source, dtype=torch.float64)
    proxies = torch.randn(classes, dim, generator=source, dtype=torch.float64)
    return features, torch.randint(classes, (samples,), generator=source), proxies


def written_out(features, labels, proxies, scale=12.0):
    """The definition, pair by pair."""
    unit = [f / f.norm() for f in features]
    losses = []
    for i, f in enumerate(unit):
        own = math.exp(scale * float(f @ (proxies[labels[i]] / proxies[labels[i]].norm())))
        cosines = [float(f @ unit[j]) for j in range(len(unit)) if labels[j] != labels[i]]
        losses.append(-math.log(own / (own + sum(math.exp(scale * c) for c in cosines if c >= 1e-6))))
    return torch.tensor(losses, dtype=torch.float64)


def test_worked_example():
    losses = proxy_contrastive(FEATURES, LABELS, PROXIES)
    assert losses.tolist() == pytest.approx([0.008196, 0.086836, 0.0], abs=2e-6)
    assert losses.mean().item() == pytest.approx(0.031677, abs=2e-6)


@pytest.mark.parametrize("scale", [1.0, 12.0])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_its_definition(seed, scale):
    case = random_case(seed)
    torch.testing.assert_close(proxy_contrastive(*case, scale), written_out(*case, scale))


@pytest.mark.parametrize("in_order", [True, False])
def test_positives_in_the_order_of_classes_fit_sorted_labels_alone(in_order):
    """The published code has them so, beside negatives in the order of the batch."""
    features, labels, proxies = random_case()
    labels = labels.sort().values if in_order else labels
    unit, directions = (each / each.norm(dim=1, keepdim=True) for each in (features, proxies))
    own = (unit * directions[labels]).sum(dim=1)[labels.argsort(stable=True)]
    cosines = unit @ unit.T
    cosines[(labels[:, None] == labels) | (cosines < 1e-6)] = -torch.inf
    published = torch.logaddexp(12 * own, (12 * cosines).logsumexp(dim=1)) - 12 * own
    assert torch.allclose(proxy_contrastive(features, labels, proxies), published) is in_order


def test_a_single_class_has_no_loss():
    features, _, proxies = random_case()
    labels = torch.full((9,), 2)
    assert proxy_contrastive(features, labels, proxies).tolist() == pytest.approx([0.0] * 9, abs=1e-12)


def test_other_classes_proxies_do_not_matter():
    features, _, proxies = random_case()
    labels = torch.arange(9) % 2
    other = proxies.clone()
    other[2:] = features[:2]
    assert torch.equal(proxy_contrastive(features, labels, proxies), proxy_contrastive(features, labels, other))


def test_lengths_do_not_matter():
    features, labels, proxies = random_case()
    torch.testing.assert_close(
        proxy_contrastive(features * 3, labels, proxies * 0.1), proxy_contrastive(features, labels, proxies)
    )


def test_it_falls_when_a_pair_of_two_classes_is_turned_apart():
    def loss(angle):
        features = torch.tensor([[1.0, 0.0, 0.0], [math.cos(angle), math.sin(angle), 0.0]])
        proxies = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])  # as far from both, at any angle
        return proxy_contrastive(features, torch.tensor([0, 1]), proxies).sum().item()

    losses = [loss(angle) for angle in (0.1, 0.5, 1.0, 1.5)]
    assert losses == sorted(losses, reverse=True)
    assert loss(1.6) == pytest.approx(0)  # a negative cosine does not repel


def test_gradients_reach_samples_and_proxies():
    features, labels, proxies = (t.requires_grad_() if t.is_floating_point() else t for t in random_case())
    proxy_contrastive(features, labels, proxies).mean().backward()
    assert features.grad.abs().sum() > 0
    assert proxies.grad[labels.unique()].abs().sum(dim=1).min() > 0
    assert torch.autograd.gradcheck(lambda f, p: proxy_contrastive(f, labels, p), (features, proxies))


def test_rows_that_do_not_count_are_as_if_they_were_not_there():
    features, labels, proxies = random_case()
    valid = torch.arange(9) % 3 > 0
    losses = proxy_contrastive(features, labels, proxies, valid=valid)
    torch.testing.assert_close(losses[valid], proxy_contrastive(features[valid], labels[valid], proxies))
    assert not losses[~valid].any()


def test_half_precision_is_computed_in_single():
    features, labels, proxies = random_case()
    low = proxy_contrastive(features.bfloat16(), labels, proxies.bfloat16())
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, proxy_contrastive(features.bfloat16().float(), labels, proxies.bfloat16().float()))
