import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ratp.functional.randmix import Linear, RandMix, RandMixConfig, packed_convolution
from ratp_reference import randmix as reference

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
HALF = torch.full((3,), 0.5)
PAPER = {
    "colour_branch": False,
    "tanh": False,
    "adain": "affine",
    "redraw_adain": True,
    "init": "normal",
    "input_noise": 0.0,
    "renormalise": False,
}
VARIANTS = pytest.mark.parametrize("variant", [{}, PAPER], ids=["official", "paper"])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make(mean=MEAN, std=STD, seed=0, kernel_sizes=(5, 9), **switches):
    return RandMix(RandMixConfig(kernel_sizes=kernel_sizes, **switches), mean, std, generator(seed))


def batch(count=3, size=20, seed=1):
    return torch.randn(count, 3, size, size, generator=generator(seed))


def as_double(value):
    """The random numbers of a draw in double precision."""
    if isinstance(value, torch.Tensor):
        return value if value.dtype == torch.bool else value.double()
    if isinstance(value, tuple):
        return tuple(as_double(item) for item in value)
    return None if value is None else SimpleNamespace(**{name: as_double(item) for name, item in vars(value).items()})


class TestAgainstReference:
    @pytest.mark.parametrize(
        "switches",
        [
            {},
            PAPER,
            {"tanh": False},
            {"adain": "affine"},
            {"colour_branch": False},
            {"redraw_adain": True},
            {"noise_per": "batch"},
            {"weights_per": "sample"},
            {"init": "normal"},
            {"input_noise": 0.5},
            {"input_noise": 0.0},
            {"renormalise": False},
            {"safe_division": False},
        ],
        ids=lambda s: "official" if not s else "paper" if s is PAPER else "-".join(f"{k}={v}" for k, v in s.items()),
    )
    def test_output_agrees_for_every_switch(self, switches):
        randmix, images = make(**switches), batch()
        draw = randmix.draw(images.shape, generator(5))
        assert draw.weights.sum(dim=1).abs().min() > 0.1
        expected = reference.randmix(images.double(), as_double(draw), randmix.config, MEAN.double(), STD.double())
        torch.testing.assert_close(randmix.apply(images, draw).double(), expected, rtol=1e-3, atol=1e-4)

    @VARIANTS
    def test_output_agrees_for_images_higher_than_wide(self, variant):
        randmix, images = make(kernel_sizes=(1, 6), **variant), batch(2)[:, :, :, :13]
        draw = randmix.draw(images.shape, generator(6))
        expected = reference.randmix(images.double(), as_double(draw), randmix.config, MEAN.double(), STD.double())
        torch.testing.assert_close(randmix.apply(images, draw).double(), expected, rtol=1e-3, atol=1e-4)

    def test_the_image_alone_comes_out_squashed_and_normalised(self):
        randmix, images = make(kernel_sizes=(5, 9, 13, 17)), batch()
        draw = randmix.draw(images.shape, generator())
        draw = replace(draw, weights=torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]))
        expected = (1 / (1 + (-images).exp()) - MEAN.reshape(1, 3, 1, 1)) / STD.reshape(1, 3, 1, 1)
        torch.testing.assert_close(randmix.apply(images, draw), expected)

    def test_with_images_in_plus_minus_one_the_last_steps_are_a_hyperbolic_tangent(self):
        randmix, images = make(HALF, HALF), batch()
        draw = randmix.draw(images.shape, generator())
        mixed = make(HALF, HALF, renormalise=False).apply(images, draw).logit()
        torch.testing.assert_close(randmix.apply(images, draw), (mixed / 2).tanh(), rtol=1e-3, atol=1e-4)

    def test_input_noise_does_not_touch_the_image_term(self):
        randmix, images = make(input_noise=100.0), batch()
        draw = randmix.draw(images.shape, generator())
        draw = replace(draw, weights=torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
        torch.testing.assert_close(randmix.apply(images, draw), make(input_noise=0.0).apply(images, draw))


class TestWhatIsDrawn:
    def test_two_calls_differ_and_a_seed_repeats(self):
        randmix, images, source = make(), batch(), generator(3)
        first, second = randmix(images, source), randmix(images, source)
        assert not torch.allclose(first, second)
        torch.testing.assert_close(randmix(images, generator(3)), first, rtol=0, atol=0)

    def test_the_global_generator_is_neither_read_nor_moved(self):
        images, state = batch(), torch.get_rng_state()
        first = make()(images, generator(3))
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(7)
        assert torch.equal(make()(images, generator(3)), first)

    def test_adain_layers_are_fixed_or_redrawn(self):
        fixed, redrawn, shape = make(), make(redraw_adain=True), batch().shape
        source = generator(4)
        for draws_differ, randmix in ((False, fixed), (True, redrawn)):
            one, two = (randmix.draw(shape, source) for _ in range(2))
            for a, b in zip(one.branches, two.branches, strict=True):
                assert torch.equal(a.adain.weight, b.adain.weight) != draws_differ
                assert torch.equal(a.adain.bias, b.adain.bias) != draws_differ
                assert not torch.equal(a.noise, b.noise)
                assert not torch.equal(a.encoder.weight, b.encoder.weight)
                assert not torch.equal(a.decoder.weight, b.decoder.weight)

    def test_each_branch_has_its_own_layers(self):
        branches = make(kernel_sizes=(5, 5)).draw(batch().shape, generator()).branches
        assert not torch.equal(branches[0].adain.weight, branches[1].adain.weight)
        assert not torch.equal(branches[0].encoder.weight, branches[1].encoder.weight)
        assert not torch.equal(branches[0].encoder.weight, branches[0].decoder.weight)

    def test_another_seed_gives_other_fixed_layers(self):
        one, other = (make(seed=seed).draw(batch().shape, generator()).branches[0].adain for seed in (0, 1))
        assert not torch.equal(one.weight, other.weight)

    def test_saved_layers_come_back(self):
        one, other, images = make(seed=0), make(seed=1), batch()
        assert not torch.equal(one(images, generator()), other(images, generator()))
        other.load_state_dict(one.state_dict())
        assert torch.equal(one(images, generator()), other(images, generator()))

    @pytest.mark.parametrize(("noise_per", "rows"), [("sample", 3), ("batch", 1)])
    def test_noise_is_drawn_for_each_image_or_each_batch(self, noise_per, rows):
        draw = make(noise_per=noise_per).draw(batch().shape, generator())
        assert [tuple(branch.noise.shape) for branch in draw.branches] == [(rows, 10)] * 2

    @pytest.mark.parametrize(("weights_per", "rows"), [("sample", 3), ("batch", 1)])
    @pytest.mark.parametrize(("colour_branch", "terms"), [(True, 6), (False, 5)])
    def test_weights_are_drawn_for_each_image_or_each_batch(self, weights_per, rows, colour_branch, terms):
        randmix = make(weights_per=weights_per, colour_branch=colour_branch, kernel_sizes=(1, 1, 1, 1))
        assert tuple(randmix.draw(batch().shape, generator()).weights.shape) == (rows, terms)

    @pytest.mark.parametrize(("size", "bound"), [(5, 0.115), (9, 0.064), (13, 0.044), (17, 0.034)])
    def test_uniform_convolutions_fill_the_published_bounds(self, size, bound):
        exact = 1 / math.sqrt(3 * size**2)
        assert exact == pytest.approx(bound, abs=5e-4)
        source, randmix = generator(), make(kernel_sizes=(size,))
        draws = [randmix.draw(torch.Size((0, 3, 17, 17)), source).branches[0] for _ in range(100)]
        for tensors in (
            [d.encoder.weight for d in draws],
            [d.decoder.weight for d in draws],
            [d.encoder.bias for d in draws],
            [d.decoder.bias for d in draws],
        ):
            values = torch.stack(tensors).flatten()
            assert 0.95 * exact < values.max() <= exact
            assert -exact <= values.min() < -0.95 * exact
            assert values.std() == pytest.approx(exact / math.sqrt(3), rel=0.1)

    def test_the_colour_branch_is_a_convolution_of_one_pixel(self):
        source, randmix = generator(), make()
        draws = [randmix.draw(torch.Size((0, 3, 9, 9)), source).colour for _ in range(300)]
        values = torch.stack([d.weight for d in draws]).flatten()
        assert draws[0].weight.shape == (3, 3, 1, 1)
        assert values.abs().max() <= 1 / math.sqrt(3)
        assert values.abs().max() > 0.97 / math.sqrt(3)

    def test_normal_convolutions_have_the_bound_as_deviation(self):
        source, randmix = generator(), make(init="normal", kernel_sizes=(5,))
        values = torch.stack(
            [randmix.draw(torch.Size((0, 3, 9, 9)), source).branches[0].encoder.weight for _ in range(50)]
        )
        assert values.std() == pytest.approx(1 / math.sqrt(75), rel=0.05)
        assert values.abs().max() > 3 / math.sqrt(75)

    def test_adain_layers_fill_the_published_bounds(self):
        randmix = make(kernel_sizes=(1,) * 40)
        layers = [branch.adain for branch in randmix.draw(torch.Size((0, 3, 1, 1)), generator()).branches]
        for values in (torch.stack([a.weight for a in layers]), torch.stack([a.bias for a in layers])):
            assert values.abs().max() <= 0.31623
            assert values.abs().max() > 0.30

    def test_a_fifth_of_the_colour_pixels_is_dropped(self):
        keep = make().draw(torch.Size((40, 3, 16, 16)), generator()).colour_keep
        assert keep.float().mean().item() == pytest.approx(0.8, abs=0.01)

    def test_input_noise_has_the_asked_deviation(self):
        noise = make(input_noise=0.001).draw(torch.Size((20, 3, 16, 16)), generator()).input_noise
        assert noise.std().item() == pytest.approx(0.001, rel=0.03)

    @pytest.mark.parametrize(
        ("colour_branch", "negative", "large"), [(True, 0.366, 0.079), (False, 0.352, None)], ids=["official", "paper"]
    )
    def test_the_image_is_inverted_by_a_third_of_the_weights(self, colour_branch, negative, large):
        randmix = make(kernel_sizes=(1, 1, 1, 1), colour_branch=colour_branch, weights_per="sample")
        weights = randmix.draw(torch.Size((60_000, 3, 1, 1)), generator(8)).weights
        own_share = weights[:, -1] / weights.sum(dim=1)
        assert (own_share < 0).float().mean().item() == pytest.approx(negative, abs=0.006)
        if large is not None:
            assert (own_share.abs() > 3).float().mean().item() == pytest.approx(large, abs=0.004)
            assert (weights.sum(dim=1).abs() < 0.25).float().mean().item() == pytest.approx(0.081, abs=0.004)


class TestOutput:
    @VARIANTS
    @settings(max_examples=25)
    @given(seed=st.integers(0, 10_000))
    def test_values_lie_in_the_range_of_normalised_images(self, variant, seed):
        randmix = make(**{**variant, "renormalise": True})
        images = batch(2, 10, seed)
        out = randmix(images, generator(seed))
        assert out.shape == images.shape
        lowest, highest = (-MEAN / STD).reshape(1, 3, 1, 1), ((1 - MEAN) / STD).reshape(1, 3, 1, 1)
        assert (out >= lowest - 1e-5).all()
        assert (out <= highest + 1e-5).all()

    @VARIANTS
    def test_an_empty_batch_stays_empty(self, variant):
        for weights_per in ("batch", "sample"):
            randmix = make(weights_per=weights_per, **variant)
            assert randmix(batch(0), generator()).shape == (0, 3, 20, 20)

    def test_no_gradient_flows_through(self):
        images = batch().requires_grad_()
        out = make()(images, generator())
        assert not out.requires_grad

    def test_the_images_given_are_left_alone(self):
        images = batch()
        before = images.clone()
        make()(images, generator())
        assert torch.equal(images, before)

    def test_images_of_a_batch_do_not_influence_each_other(self):
        randmix, images = make(), batch(3)
        draw = randmix.draw(images.shape, generator())
        changed = images.clone()
        changed[1] = 7
        together, apart = randmix.apply(images, draw), randmix.apply(changed, draw)
        torch.testing.assert_close(together[[0, 2]], apart[[0, 2]])
        assert not torch.allclose(together[1], apart[1])


class TestVanishingWeightSum:
    WEIGHTS = torch.tensor([[1.0, -1.0, 2.0, -2.0]])

    def output(self, weights, **switches):
        randmix, images = make(**switches), batch()
        return randmix.apply(images, replace(randmix.draw(images.shape, generator()), weights=weights))

    def test_it_is_kept_away_from_zero(self):
        assert self.output(self.WEIGHTS, safe_division=True).isfinite().all()

    def test_the_published_form_divides_by_zero(self):
        assert not self.output(self.WEIGHTS, safe_division=False).isfinite().all()

    @pytest.mark.parametrize("excess", [1e-6, -1e-6, 5e-4, -5e-4])
    def test_a_small_sum_keeps_its_sign(self, excess):
        """The branches lie within ±1 and weigh −1 together, so an image of fives decides the sign of the sum."""
        randmix, images = make(renormalise=False), torch.full((2, 3, 20, 20), 5.0)
        weights = torch.tensor([[excess - 1.0, 0.0, 0.0, 1.0]])
        assert (weights.sum() > 0) == (excess > 0)
        out = randmix.apply(images, replace(randmix.draw(images.shape, generator()), weights=weights))
        assert (out == (1 if excess > 0 else 0)).all()

    @pytest.mark.parametrize("total", [2e-3, -2e-3, 0.5, -3.0])
    def test_a_sum_that_is_not_small_is_not_touched(self, total):
        weights = torch.tensor([[0.5, -0.25, 0.125, total - 0.375]])
        safe, published = (self.output(weights, safe_division=safe) for safe in (True, False))
        torch.testing.assert_close(safe, published, rtol=0, atol=0)


class TestSomeRows:
    ROWS = torch.tensor([True, False, False, True, True])

    @pytest.mark.parametrize(
        "switches",
        [{}, PAPER, {"noise_per": "batch"}, {"weights_per": "sample"}],
        ids=["official", "paper", "one", "own"],
    )
    def test_they_come_out_as_with_the_whole_batch(self, switches):
        randmix, images = make(**switches), batch(5)
        some = randmix(images, generator(4), self.ROWS)
        torch.testing.assert_close(some, randmix(images, generator(4))[self.ROWS])

    @pytest.mark.parametrize("rows", [ROWS, torch.zeros(5, dtype=torch.bool)], ids=["some", "none"])
    def test_the_generator_moves_as_for_the_whole_batch(self, rows):
        some, all_rows = generator(4), generator(4)
        assert len(make()(batch(5), some, rows)) == rows.sum()
        make()(batch(5), all_rows)
        assert torch.equal(some.get_state(), all_rows.get_state())

    @pytest.mark.parametrize("row", [True, False])
    def test_of_a_batch_of_one(self, row):
        randmix, images = make(weights_per="sample"), batch(1)
        out = randmix(images, generator(4), torch.tensor([row]))
        assert out.shape == (int(row), 3, 20, 20)

    def test_a_draw_is_cut_like_a_batch(self):
        randmix, images = make(weights_per="sample"), batch(5)
        draw = randmix.draw(images.shape, generator())
        torch.testing.assert_close(randmix.apply(images[1:3], draw[1:3]), randmix.apply(images, draw)[1:3])


class TestPackedConvolution:
    """Pixels as channels: another way to the same numbers."""

    @pytest.mark.parametrize("size", [1, 5, 9, 17])
    @pytest.mark.parametrize(("height", "width"), [(20, 33), (17, 24), (40, 17)])
    @pytest.mark.parametrize("block", [1, 4, 8])
    def test_it_is_the_convolution(self, size, height, width, block):
        source = torch.Generator().manual_seed(size)
        inputs = torch.randn(2, 3, height, width, generator=source, dtype=torch.float64)
        layer = Linear(torch.randn(3, 3, size, size, generator=source).double(), torch.randn(3).double())
        for padding in (0, size - 1):
            expected = F.conv2d(inputs, layer.weight, layer.bias, padding=padding)
            torch.testing.assert_close(packed_convolution(inputs, layer, padding, block), expected)
