from copy import deepcopy

import pytest
import torch

from ratp.methods.efdm import ExactMixing, exact_mixing

CONTENT = torch.tensor([3.0, 1.0, 2.0, 5.0]).reshape(1, 1, 2, 2)
STYLE = torch.tensor([10.0, 40.0, 20.0, 30.0]).reshape(1, 1, 2, 2)


def maps(seed=0, images=3, channels=4, side=5):
    return torch.randn(images, channels, side, side, generator=torch.Generator().manual_seed(seed))


def values(x):
    return x.flatten(2).sort(dim=2).values


def layer(probability=1.0, alpha=0.1, styles="batch", seed=0):
    mixing = ExactMixing(probability, alpha)
    mixing.generator, mixing.styles = torch.Generator().manual_seed(seed), styles
    return mixing


@pytest.mark.parametrize(
    ("weight", "expected"), [(0.0, (30, 10, 20, 40)), (0.25, (23.25, 7.75, 15.5, 31.25)), (1.0, (3, 1, 2, 5))]
)
def test_worked_example(weight, expected):
    assert exact_mixing(CONTENT, STYLE, torch.tensor([weight])).flatten().tolist() == list(expected)


def test_matched_maps_have_exactly_the_styles_values():
    content, style = maps(0), maps(1)
    matched = exact_mixing(content, style, torch.zeros(3))
    torch.testing.assert_close(values(matched), values(style), rtol=0, atol=1e-6)


def test_ranks_are_kept():
    content, style = maps(0).double(), maps(1).double()
    for weight in (0.0, 0.3, 0.9):
        mixed = exact_mixing(content, style, torch.full((3,), weight, dtype=torch.float64))
        assert torch.equal(mixed.flatten(2).argsort(dim=2), content.flatten(2).argsort(dim=2))


def test_each_image_has_its_own_weight():
    content, style = maps(0), maps(1)
    mixed = exact_mixing(content, style, torch.tensor([1.0, 0.0, 0.5]))
    assert torch.equal(mixed[0], content[0])
    torch.testing.assert_close(values(mixed)[1], values(style)[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(values(mixed)[2], (values(content)[2] + values(style)[2]) / 2, rtol=0, atol=1e-6)


def test_the_gradient_passes_to_the_content_and_to_the_style():
    content, style = maps(0).requires_grad_(), maps(1).requires_grad_()
    upstream = maps(2)
    exact_mixing(content, style, torch.tensor([0.25, 0.5, 1.0])).backward(upstream)
    assert torch.equal(content.grad, upstream)
    torch.testing.assert_close(values(style.grad)[0], 0.75 * values(upstream)[0])
    assert not style.grad[2].any()
    # and each style value gets what went to the place it was put
    order, style_order = content[1].flatten(1).argsort(dim=1), style[1].flatten(1).argsort(dim=1)
    torch.testing.assert_close(
        style.grad[1].flatten(1).gather(1, style_order), 0.5 * upstream[1].flatten(1).gather(1, order)
    )


def test_equal_values_are_ranked_in_order():
    content = maps(0).relu()  # half of them zeros
    style = maps(1)
    matched = exact_mixing(content, style, torch.zeros(3))
    torch.testing.assert_close(values(matched), values(style), rtol=0, atol=1e-6)
    zeros = content[0, 0].flatten() == 0
    given = matched[0, 0].flatten()[zeros]
    assert torch.equal(given, given.sort().values)


class TestLayer:
    def test_it_does_nothing_to_predictions(self):
        x = maps()
        assert layer().eval()(x) is x

    def test_no_probability_does_nothing(self):
        x = maps()
        assert torch.equal(layer(probability=0.0)(x), x)

    def test_it_mixes_its_share_of_the_batches(self):
        x, mixing = maps(), layer(probability=0.5)
        same = [torch.equal(mixing(x), x) for _ in range(400)]
        assert 0.4 < sum(same) / 400 < 0.62  # a batch left alone, or one whose weights are all 1

    def test_the_second_half_lends_its_style(self):
        x = torch.cat([maps(0), maps(1)])
        mixing = layer(styles="second half", alpha=1.0)
        mixed = mixing(x)
        assert torch.equal(mixed[3:], x[3:])
        (content, style), out = (values(part) for part in x.chunk(2)), values(mixed[:3])
        weights = ((out - style) / (content - style)).mean(dim=(1, 2), keepdim=True)
        assert ((weights > 0) & (weights < 1)).all()
        assert len(weights.flatten().unique()) == 3
        torch.testing.assert_close(out, weights * content + (1 - weights) * style, rtol=0, atol=1e-4)

    def test_otherwise_others_of_the_batch_do(self):
        x = maps(0, images=6)
        mixed = layer(alpha=1e-3)(x)  # each weight all or nothing
        own = values(x)
        given = [[torch.allclose(values(mixed)[i], own[j], atol=1e-4) for j in range(6)] for i in range(6)]
        assert all(sum(row) == 1 for row in given)
        assert not all(given[i][i] for i in range(6))

    def test_its_generator_alone_decides(self):
        x = maps()
        assert torch.equal(layer()(x), layer()(x))
        assert not torch.equal(layer(alpha=1.0)(x), layer(alpha=1.0, seed=1)(x))

    def test_a_copy_has_no_generator(self):
        copy = deepcopy(layer(probability=0.3, styles="second half").eval())
        assert copy.generator is None
        assert (copy.probability, copy.alpha, copy.styles, copy.training) == (0.3, 0.1, "second half", False)
