import math
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode

from ratp.config import override
from ratp.errors import ConfigError, RatpError
from ratp.functional import transforms
from ratp.functional.colour import ColourPlan, apply_colours_, blend_, plan_colours, rotate_hue_
from ratp.functional.transforms import (
    CROP_FLIP,
    NONE,
    OBJECTS,
    OPERATIONS,
    Transform,
    TransformConfig,
    TransformDraw,
    plan_resize,
    resize,
)
from ratp_reference import transforms as reference

TOLERANCE = {"rtol": 0, "atol": 1e-4}
SAME = {"rtol": 0, "atol": 0}
PRESETS = pytest.mark.parametrize("config", [NONE, OBJECTS, CROP_FLIP], ids=["none", "objects", "crop_flip"])
# About a hundred comparisons: all pass with 99 % when the distributions are the same.
LIKELY = 1e-4


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(count=4, height=30, width=30, seed=1):
    return torch.rand(count, 3, height, width, generator=generator(seed))


def pictures(size=32):
    """Images that are hard in one way each, values in [0, 1]."""
    ramp = torch.linspace(0, 1, size)
    across, down = ramp.expand(size, size), ramp[:, None].expand(size, size)
    smooth = torch.stack([across, down, (1 - across) * down])
    waves = torch.stack([(0.5 + 0.5 * torch.sin(k * across * 6 + k * down * 4)) for k in (1, 2, 3)])
    corners = torch.tensor([[r, g, b] for r in (0.0, 1.0) for g in (0.0, 1.0) for b in (0.0, 1.0)])
    saturated = corners.T[:, torch.arange(size * size).reshape(size, size) % 8]
    two_equal = torch.stack([across, across, down])
    grey = across.expand(3, size, size)
    nearly_grey = (grey + 1e-6 * noise(1, size, size)[0]).clamp(0, 1)
    quantised = (noise(1, size, size)[0] * 4).round() / 4
    tiny = 1e-38 * noise(1, size, size)[0]
    plain = [torch.full((3, size, size), value) for value in (0.0, 1.0, 0.5)]
    red = torch.stack([torch.ones(size, size), torch.zeros(size, size), torch.zeros(size, size)])
    all_of_them = [
        smooth,
        waves,
        saturated,
        two_equal,
        two_equal.flip(0),
        grey,
        nearly_grey,
        quantised,
        tiny,
        *plain,
        red,
    ]
    return torch.stack([*all_of_them, *noise(3, size, size)])


def rows_of(draw):
    return {name: value for name, value in vars(draw).items() if value is not None}


class TestResize:
    @pytest.mark.parametrize(
        ("height", "width", "size"),
        [(227, 227, 224), (40, 40, 64), (96, 80, 32), (37, 61, 24), (50, 50, 50), (9, 13, 1), (5, 4, 17), (1, 1, 3)],
    )
    def test_boxes_are_cut_out_and_resized_as_by_torchvision(self, height, width, size):
        count = 4 if height > 200 else 12
        rng = np.random.default_rng(height)
        heights, widths = rng.integers(1, height + 1, count), rng.integers(1, width + 1, count)
        heights[:2], widths[:2] = (height, 1), (width, 1)
        tops, lefts = rng.integers(0, height - heights + 1), rng.integers(0, width - widths + 1)
        boxes = np.stack([tops, lefts, heights, widths], axis=1)
        images = noise(count, height, width)
        result = resize(images, plan_resize(torch.from_numpy(boxes), None, height, width, size))
        exact = torch.stack([reference.crop(i, b.tolist(), size) for i, b in zip(images.double(), boxes, strict=True)])
        torch.testing.assert_close(result.double(), exact, rtol=0, atol=2e-6)
        single = torch.stack([reference.crop(i, b.tolist(), size) for i, b in zip(images, boxes, strict=True)])
        torch.testing.assert_close(result, single, **TOLERANCE)

    def test_nothing_outside_of_the_box_is_seen(self):
        images = torch.full((1, 3, 40, 40), torch.nan)
        images[:, :, 10:30, 5:33] = 0.25
        boxes = torch.tensor([[10, 5, 20, 28]])
        result = resize(images, plan_resize(boxes, None, 40, 40, 16))
        torch.testing.assert_close(result, torch.full_like(result, 0.25))

    def test_images_without_a_crop_are_resized_as_a_whole(self):
        for height, width in ((48, 48), (20, 33), (33, 20)):
            images = noise(3, height, width)
            draw = Transform(NONE, 24).draw(3, height, width, generator())
            result = Transform(NONE, 24).apply(images, draw)
            torch.testing.assert_close(result, reference.transform(images, draw, (), 24), **TOLERANCE)

    @pytest.mark.parametrize(("crop", "size"), [(True, 24), (False, 24), (False, 30)])
    def test_images_are_mirrored(self, crop, size):
        images, transform = noise(), Transform(replace(CROP_FLIP, crop=crop), size)
        draw = replace(transform.draw(4, 30, 30, generator()), flip=torch.tensor([True, False, True, False]))
        straight = transform.apply(images, replace(draw, flip=torch.zeros(4, dtype=torch.bool)))
        result = transform.apply(images, draw)
        torch.testing.assert_close(result[::2], straight[::2].flip(3), rtol=0, atol=1e-6)
        assert torch.equal(result[1::2], straight[1::2])
        torch.testing.assert_close(result, reference.transform(images, draw, (), size), **TOLERANCE)


class TestColour:
    @pytest.mark.parametrize("operation", ["brightness", "contrast", "saturation"])
    @pytest.mark.parametrize("factor", [0.0, 0.3, 0.7, 1.0, 1.3, 4.0])
    def test_blends_agree_with_torchvision(self, operation, factor):
        images = pictures()
        factors, order = torch.full((len(images), 1), factor), torch.zeros(len(images), 1, dtype=torch.long)
        result = apply_colours_(images.clone(), plan_colours((operation,), order, factors, None))
        expected = torch.stack([reference.ADJUST[operation](image, factor) for image in images])
        torch.testing.assert_close(result, expected, **TOLERANCE)

    @pytest.mark.parametrize("turn", [-0.5, -0.3, -1 / 6, -1e-7, 0.0, 1e-7, 0.1, 1 / 3, 0.49, 0.5])
    def test_the_hue_is_rotated_as_by_torchvision(self, turn):
        images = pictures()
        result = rotate_hue_(images.clone(), torch.full((len(images),), turn))
        expected = torch.stack([reference.ADJUST["hue"](image, turn) for image in images])
        torch.testing.assert_close(result, expected, **TOLERANCE)

    def test_rotations_differ_within_a_batch(self):
        turns = torch.linspace(-0.5, 0.5, 8)
        images = noise(1).expand(8, -1, -1, -1)
        expected = torch.stack([reference.ADJUST["hue"](images[0], turn.item()) for turn in turns])
        torch.testing.assert_close(rotate_hue_(images.clone(), turns), expected, **TOLERANCE)

    def test_pixels_without_a_hue_stay_bit_for_bit(self):
        values = torch.cat([torch.tensor([0.0, 1.0, 1e-40, 1e-38, 1e-20]), torch.rand(91, generator=generator())])
        images = values.expand(1, 3, 1, -1).clone()
        assert torch.equal(rotate_hue_(images.clone(), torch.tensor([0.3])), images)

    def test_a_third_of_the_circle_exchanges_the_channels(self):
        images = noise()
        rotated = rotate_hue_(images.clone(), torch.full((4,), 1 / 3))
        torch.testing.assert_close(rotated, images.roll(1, dims=1), rtol=0, atol=1e-6)

    @settings(max_examples=60)
    @given(
        pixel=st.tuples(*[st.floats(0, 1, width=32)] * 3),
        turn=st.floats(-0.5, 0.5, width=32),
    )
    def test_rotation_keeps_the_largest_and_the_smallest_value(self, pixel, turn):
        image = torch.tensor(pixel).reshape(1, 3, 1, 1)
        rotated = rotate_hue_(image.clone(), torch.tensor([turn]))
        torch.testing.assert_close(rotated.amax(), image.amax(), rtol=0, atol=2e-7)
        torch.testing.assert_close(rotated.amin(), image.amin(), rtol=0, atol=2e-7)
        expected = reference.ADJUST["hue"](image[0], turn)
        torch.testing.assert_close(rotated[0], expected, **TOLERANCE)

    def test_the_blend_of_identity_changes_nothing(self):
        images = pictures()
        shares = torch.tensor([1.0, 0.0, 0.0]).expand(len(images), 3)
        assert torch.equal(blend_(images.clone(), shares), images)

    def test_all_orders_in_one_batch_agree_with_torchvision(self):
        order = torch.tensor(list(permutations(range(4))))
        factors = torch.tensor([0.7, 1.3, 0.75, 0.25]) + 0.02 * torch.rand(24, 4, generator=generator())
        grey = torch.zeros(24, dtype=torch.bool)
        draw = TransformDraw(None, None, order, factors, grey)
        for image in pictures():
            images = image.expand(24, -1, -1, -1)
            result = apply_colours_(images.clone(), plan_colours(OPERATIONS, order, factors, grey))
            torch.testing.assert_close(result, reference.transform(images, draw, OPERATIONS, 32), **TOLERANCE)

    def test_grey_comes_last_and_for_some(self):
        images, grey = noise(4), torch.tensor([True, False, False, True])
        transform = Transform(OBJECTS, 30)
        draw = replace(transform.draw(4, 30, 30, generator()), grey=grey)
        result = transform.apply(images, draw)
        assert torch.equal((result == result[:, :1]).all(dim=(1, 2, 3)), grey)
        torch.testing.assert_close(result, reference.transform(images, draw, OPERATIONS, 30), **TOLERANCE)

    def test_four_operations_take_six_blends_and_one_rotation(self):
        draw = Transform(OBJECTS, 8).draw(5, 8, 8, generator())
        plan = plan_colours(OPERATIONS, draw.order, draw.factors, None)
        assert isinstance(plan, ColourPlan)
        assert plan.before.shape == plan.after.shape == (5, 3, 3)
        unchanged = torch.tensor([1.0, 0.0, 0.0])
        meets = [(blends != unchanged).any(dim=2).sum(dim=1) for blends in (plan.before, plan.after)]
        assert (meets[0] + meets[1]).tolist() == [3] * 5
        assert plan_colours((), None, None, None) is None


class TestWholeTransform:
    @PRESETS
    @pytest.mark.parametrize(("height", "width", "size"), [(34, 34, 32), (32, 32, 32), (50, 40, 24), (20, 26, 40)])
    def test_a_draw_gives_what_torchvision_gives(self, config, height, width, size):
        transform = Transform(config, size)
        pool = torch.cat([pictures(max(height, width))[:, :, :height, :width], noise(8, height, width)])
        draw = transform.draw(len(pool), height, width, generator(size))
        expected = reference.transform(pool, draw, transform.operations, size)
        torch.testing.assert_close(transform.apply(pool, draw), expected, **TOLERANCE)

    def test_at_full_size_too(self):
        images = noise(6, 227, 227)
        transform = Transform(OBJECTS, 224)
        draw = transform.draw(6, 227, 227, generator())
        expected = reference.transform(images.double(), draw, OPERATIONS, 224)
        torch.testing.assert_close(transform.apply(images, draw).double(), expected, rtol=0, atol=5e-6)

    @pytest.mark.parametrize("used", [c for n in range(5) for c in combinations(OPERATIONS, n)], ids="-".join)
    @pytest.mark.parametrize("greyscale", [0, 0.5])
    def test_any_choice_of_operations(self, used, greyscale):
        config = replace(NONE, greyscale=greyscale, **dict.fromkeys(used, 0.4))
        transform, images = Transform(config, 32), pictures()
        assert transform.operations == used
        draw = transform.draw(len(images), 32, 32, generator())
        expected = reference.transform(images, draw, used, 32)
        torch.testing.assert_close(transform.apply(images, draw), expected, **TOLERANCE)

    def test_nothing_switched_on_only_divides(self):
        images = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(1, 3, 16, 16)
        assert torch.equal(Transform(NONE, 16)(images, generator()), images / 255)
        floats = noise(2, 16, 16)
        assert torch.equal(Transform(NONE, 16)(floats, generator()), floats)

    @PRESETS
    def test_whole_numbers_and_floats_mean_the_same(self, config):
        images = (noise(5) * 255).round().to(torch.uint8)
        transform = Transform(config, 28)
        draw = transform.draw(5, 30, 30, generator())
        result = transform.apply(images, draw)
        torch.testing.assert_close(result, transform.apply(images / 255, draw), rtol=0, atol=2e-6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_float_types_are_computed_in_single_precision(self, dtype):
        images = noise().to(dtype)
        transform = Transform(OBJECTS, 28)
        result = transform(images, generator())
        assert result.dtype == torch.float32
        assert torch.equal(result, transform(images.float(), generator()))


def torchvision_boxes(config, count, height, width):
    crop, image = reference.random_crop(config, 8), torch.empty(3, height, width)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(11)
        params = [crop.make_params([image]) for _ in range(count)]
    return np.array([[p["top"], p["left"], p["height"], p["width"]] for p in params])


def drawn_boxes(config, count, height, width):
    return Transform(config, 8).draw(count, height, width, generator(5)).boxes.numpy()


class TestDistribution:
    COUNT = 4000

    @pytest.mark.parametrize(
        ("height", "width", "scale"),
        [(227, 227, 0.7), (227, 227, 0.08), (100, 150, 0.7), (150, 100, 0.7), (31, 32, 0.9)],
    )
    def test_boxes(self, height, width, scale):
        config = replace(OBJECTS, crop_scale_min=scale)
        ours, theirs = (make(config, self.COUNT, height, width) for make in (drawn_boxes, torchvision_boxes))
        views = {
            "top": lambda b: b[:, 0],
            "left": lambda b: b[:, 1],
            "height": lambda b: b[:, 2],
            "width": lambda b: b[:, 3],
            "area": lambda b: b[:, 2] * b[:, 3],
            "aspect": lambda b: b[:, 3] / b[:, 2],
            "relative top": lambda b: b[:, 0] / (height + 1 - b[:, 2]),
            "relative left": lambda b: b[:, 1] / (width + 1 - b[:, 3]),
            "height less width": lambda b: b[:, 2] - b[:, 3] * height / width,
        }
        for name, view in views.items():
            assert stats.ks_2samp(view(ours), view(theirs)).pvalue > LIKELY, name

    def test_every_box_of_a_small_image(self):
        config = replace(OBJECTS, crop_scale_min=0.08)
        ours, theirs = (make(config, self.COUNT, 3, 4) for make in (drawn_boxes, torchvision_boxes))
        kinds, codes = np.unique(np.concatenate([ours, theirs]), axis=0, return_inverse=True)
        counts = [np.bincount(part, minlength=len(kinds)) for part in np.split(codes.ravel(), 2)]
        common = np.sum(counts, axis=0) >= 10
        assert common.sum() > 10
        assert stats.chi2_contingency(np.stack(counts)[:, common]).pvalue > LIKELY

    @pytest.mark.parametrize(
        ("height", "width", "box"),
        [(60, 200, [0, 60, 60, 80]), (200, 60, [60, 0, 80, 60]), (7, 100, [0, 45, 7, 9]), (100, 7, [45, 0, 9, 7])],
    )
    def test_where_no_box_fits_the_central_one_is_taken(self, height, width, box):
        assert (drawn_boxes(OBJECTS, 50, height, width) == box).all()
        assert (torchvision_boxes(OBJECTS, 5, height, width) == box).all()

    def test_where_few_boxes_fit_the_central_one_is_as_frequent(self):
        config = replace(OBJECTS, crop_scale_min=0.9)
        ours, theirs = (make(config, self.COUNT, 100, 145) for make in (drawn_boxes, torchvision_boxes))
        central = [(b == [0, 6, 100, 133]).all(axis=1) for b in (ours, theirs)]
        assert 0.05 < central[0].mean() < 0.95
        assert stats.chi2_contingency([np.bincount(c, minlength=2) for c in central]).pvalue > LIKELY

    def test_one_of_the_extremes_alone(self):
        whole = replace(CROP_FLIP, crop_scale_min=1.0, crop_ratio_min=1.0, crop_ratio_max=1.0)
        assert (drawn_boxes(whole, 100, 33, 33) == [0, 0, 33, 33]).all()

    @pytest.mark.parametrize("spread", [0.3, 0.5, 2.0])
    def test_factors(self, spread):
        config = replace(OBJECTS, **dict.fromkeys(OPERATIONS[:3], spread), hue=min(spread, 0.5))
        factors = Transform(config, 8).draw(self.COUNT, 8, 8, generator()).factors.numpy()
        jitter = reference.colour_jitter(config)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(12)
            params = [jitter.make_params([]) for _ in range(self.COUNT)]
        for column, name in enumerate(OPERATIONS):
            theirs = [p[f"{name}_factor"] for p in params]
            assert stats.ks_2samp(factors[:, column], theirs).pvalue > LIKELY, name
            low, high = (-config.hue, config.hue) if name == "hue" else (max(0, 1 - spread), 1 + spread)
            uniform = stats.uniform(low, high - low)
            assert stats.kstest(factors[:, column], uniform.cdf).pvalue > LIKELY, name
        assert np.abs(np.corrcoef(factors.T) - np.eye(4)).max() < 5 / math.sqrt(self.COUNT)

    def test_orders(self):
        orders = Transform(OBJECTS, 8).draw(self.COUNT, 8, 8, generator()).order
        counts = [int((orders == torch.tensor(order)).all(dim=1).sum()) for order in permutations(range(4))]
        assert sum(counts) == self.COUNT
        assert stats.chisquare(counts).pvalue > LIKELY

    @pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
    def test_flip_and_grey(self, probability):
        config = replace(NONE, flip=probability, greyscale=probability)
        draw = Transform(config, 8).draw(self.COUNT, 8, 8, generator())
        for draws in (draw.flip, draw.grey):
            assert stats.binomtest(int(draws.sum()), self.COUNT, probability).pvalue > LIKELY
        if probability < 1:
            assert stats.chi2_contingency(np.histogram2d(draw.flip, draw.grey, bins=2)[0]).pvalue > LIKELY

    def test_parts_are_independent(self):
        draw = Transform(OBJECTS, 8).draw(self.COUNT, 100, 100, generator())
        parts = torch.cat([draw.boxes, draw.flip[:, None], draw.order[:, :1], draw.factors, draw.grey[:, None]], dim=1)
        correlation = np.abs(np.corrcoef(parts.numpy().T))
        places, edges = [0, 1], [2, 3]
        correlation[np.ix_(places + edges, places + edges)] = 0
        assert (correlation - np.eye(len(correlation))).max() < 5 / math.sqrt(self.COUNT)


@pytest.fixture(scope="module")
def many_copies():
    """One image transformed many times, by us and by torchvision."""
    count, image, config = 3000, pictures(20)[1] * 0.8 + 0.2 * noise(1, 20, 20)[0], replace(OBJECTS, greyscale=0.2)
    ours = Transform(config, 16)(image.expand(count, -1, -1, -1), generator(2))
    pipeline = reference.pipeline(config, 16)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        theirs = torch.stack([pipeline(image) for _ in range(count)])
    return ours.double(), theirs.double()


class TestManyCopies:
    def test_channels_have_the_same_means_and_deviations(self, many_copies):
        for statistic in (torch.mean, torch.std):
            ours, theirs = (statistic(copies, dim=(2, 3)) for copies in many_copies)
            for channel in range(3):
                assert stats.ks_2samp(ours[:, channel].numpy(), theirs[:, channel].numpy()).pvalue > LIKELY

    @pytest.mark.parametrize("power", [1, 2, 3])
    def test_pixels_have_the_same_moments_within_sampling_error(self, many_copies, power):
        ours, theirs = (copies**power for copies in many_copies)
        error = ((ours.var(dim=0) + theirs.var(dim=0)) / len(ours)).sqrt()
        z = (ours.mean(dim=0) - theirs.mean(dim=0)) / error
        assert z.abs().max() < 4.5
        assert 0.2 < z.square().mean().sqrt() < 2

    def test_neighbours_are_equally_alike(self, many_copies):
        ours, theirs = ((copies[..., 1:] - copies[..., :-1]).abs().mean(dim=(1, 2, 3)) for copies in many_copies)
        assert stats.ks_2samp(ours.numpy(), theirs.numpy()).pvalue > LIKELY


class TestBehaviour:
    def test_a_seed_repeats_bit_for_bit_and_two_calls_differ(self):
        transform, images, source = Transform(OBJECTS, 24), noise(), generator(3)
        first, second = transform(images, source), transform(images, source)
        assert not torch.allclose(first, second)
        assert torch.equal(transform(images, generator(3)), first)

    def test_the_global_generator_is_neither_read_nor_moved(self):
        transform, images, state = Transform(OBJECTS, 24), noise(), torch.get_rng_state()
        first = transform(images, generator(3))
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(7)
        assert torch.equal(transform(images, generator(3)), first)

    @PRESETS
    @pytest.mark.parametrize("size", [30, 21])
    def test_rows_do_not_depend_on_the_rest_of_the_batch(self, config, size):
        images, transform = noise(9), Transform(config, size)
        draw = transform.draw(9, 30, 30, generator())
        whole = transform.apply(images, draw)
        for rows in (slice(0, 1), slice(2, 7), slice(8, 9)):
            torch.testing.assert_close(transform.apply(images[rows], draw[rows]), whole[rows], rtol=0, atol=1e-6)

    @PRESETS
    def test_blocks_change_nothing(self, config, monkeypatch):
        images, transform = noise(7), Transform(config, 25)
        draw = transform.draw(7, 30, 30, generator())
        whole = transform.apply(images, draw)
        for values in (1, 2 * 3 * 900, 3 * 3 * 900 + 5):
            monkeypatch.setattr(transforms, "BLOCK_VALUES", values)
            torch.testing.assert_close(transform.apply(images, draw), whole, rtol=0, atol=1e-6)

    @PRESETS
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    @pytest.mark.parametrize("size", [20, 30])
    def test_an_empty_batch_gives_an_empty_one(self, config, dtype, size):
        result = Transform(config, size)(torch.empty(0, 3, 30, 30, dtype=dtype), generator())
        assert result.shape == (0, 3, size, size)
        assert result.dtype == torch.float32

    @pytest.mark.parametrize("config", [NONE, OBJECTS, CROP_FLIP, replace(NONE, hue=0.3)])
    @pytest.mark.parametrize("size", [20, 30])
    def test_images_stay_as_they_are_and_no_gradient_flows(self, config, size):
        images = noise().requires_grad_()
        before, transform = images.detach().clone(), Transform(config, size)
        draw = transform.draw(4, 30, 30, generator())
        for result in (transform(images, generator()), transform.apply(images, draw)):
            assert not result.requires_grad
            assert result.data_ptr() != images.data_ptr()
        assert torch.equal(images, before)

    @PRESETS
    def test_views_of_other_images_are_taken(self, config):
        images, transform = noise(8), Transform(config, 26)
        expected = transform(images[::2].contiguous(), generator())
        assert torch.equal(transform(images[::2], generator()), expected)
        channels_last = images[::2].contiguous(memory_format=torch.channels_last)
        assert torch.equal(transform(channels_last, generator()), expected)

    @settings(max_examples=30)
    @given(
        shape=st.tuples(st.integers(1, 12), st.integers(1, 12)), size=st.integers(1, 12), seed=st.integers(0, 10_000)
    )
    def test_values_stay_in_range_for_all_shapes(self, shape, size, seed):
        images = noise(3, *shape, seed=seed).round()
        result = Transform(replace(OBJECTS, crop_scale_min=0.05, brightness=2.0, hue=0.5), size)(
            images, generator(seed)
        )
        assert result.shape == (3, 3, size, size)
        assert result.min() >= 0
        assert result.max() <= 1

    def test_rounding_does_not_leave_the_range(self):
        images = torch.ones(40, 3, 60, 60)
        draw = Transform(CROP_FLIP, 7).draw(40, 60, 60, generator())
        assert resize(images, plan_resize(draw.boxes, None, 60, 60, 7)).max() > 1
        result = Transform(CROP_FLIP, 7).apply(images, draw)
        assert result.max() == 1
        torch.testing.assert_close(result, torch.ones_like(result))

    @PRESETS
    def test_boxes_lie_within_the_images(self, config):
        draw = Transform(replace(config, crop=True, crop_scale_min=0.01), 8).draw(20_000, 9, 14, generator())
        top, left, height, width = draw.boxes.T
        assert (top >= 0).all() and (left >= 0).all() and (height >= 1).all() and (width >= 1).all()
        assert (top + height <= 9).all() and (left + width <= 14).all()

    @PRESETS
    @pytest.mark.parametrize("size", [24, 30])
    def test_no_value_is_read_back(self, config, size):
        """Tensors without values are enough, so nothing in a call waits for the device."""
        with FakeTensorMode():
            images = torch.empty(4, 3, 30, 30, dtype=torch.uint8)
            result = Transform(config, size)(images, torch.Generator())
        assert result.shape == (4, 3, size, size)

    def test_only_what_is_switched_on_is_drawn(self):
        assert rows_of(Transform(NONE, 8).draw(3, 9, 9, generator())) == {}
        assert set(rows_of(Transform(CROP_FLIP, 8).draw(3, 9, 9, generator()))) == {"boxes", "flip"}
        draw = Transform(replace(NONE, contrast=0.1, hue=0.1), 8).draw(3, 9, 9, generator())
        assert {name: tuple(value.shape) for name, value in rows_of(draw).items()} == {
            "order": (3, 2),
            "factors": (3, 2),
        }


class TestMistakes:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"crop_scale_min": 0.0}, "crop_scale_min must be above 0"),
            (
                {"crop_scale_min": 0.9, "crop_scale_max": 0.8},
                "at most crop_scale_max, got 0.9 and 0.8",
            ),
            ({"crop_scale_max": 1.5}, "crop_scale_max must be at most 1, got 1.5"),
            ({"crop_ratio_min": 2.0}, "crop_ratio_min must be at most crop_ratio_max, got 2.0"),
            ({"flip": 1.1}, "flip must be at most 1, got 1.1"),
            ({"greyscale": -0.1}, "greyscale must be at least 0, got -0.1"),
            ({"hue": 0.6}, "hue must be at most 0.5, got 0.6"),
            ({"contrast": -1.0}, "contrast must be at least 0"),
            ({"brightness": math.nan}, "brightness must be a number, got nan"),
        ],
    )
    def test_bad_switches_are_named(self, changes, words):
        with pytest.raises(ConfigError, match=words):
            Transform(replace(OBJECTS, **changes), 8)

    def test_all_mistakes_come_at_once(self):
        with pytest.raises(ConfigError) as caught:
            Transform(TransformConfig(flip=2, hue=1, saturation=-1), 8)
        assert len(caught.value.problems) == 3
        with pytest.raises(ConfigError, match="size must be at least 1, got 0"):
            Transform(OBJECTS, 0)

    @pytest.mark.parametrize("shape", [(3, 8, 8), (2, 1, 8, 8), (2, 8, 8, 3), (2, 3, 0, 8), (2, 3, 8, 0)])
    def test_bad_shapes_are_named(self, shape):
        transform = Transform(OBJECTS, 8)
        for call in (
            lambda x: transform(x, generator()),
            lambda x: transform.apply(x, transform.draw(2, 8, 8, generator())),
        ):
            with pytest.raises(RatpError, match=r"\(n, 3, height, width\), got"):
                call(torch.zeros(shape))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
    def test_bad_types_are_named(self, dtype):
        with pytest.raises(RatpError, match="uint8, or float"):
            Transform(OBJECTS, 8)(torch.zeros(2, 3, 8, 8, dtype=dtype), generator())

    @pytest.mark.parametrize(("count", "height", "width"), [(-1, 8, 8), (2, 0, 8), (2, 8, 0)])
    def test_bad_sizes_are_named(self, count, height, width):
        with pytest.raises(RatpError, match="1×1 or more"):
            Transform(OBJECTS, 8).draw(count, height, width, generator())

    def test_a_draw_of_another_count_is_refused(self):
        transform = Transform(OBJECTS, 8)
        with pytest.raises(RatpError, match="for 4 images, got them for \\[3\\]"):
            transform.apply(noise(4), transform.draw(3, 30, 30, generator()))

    def test_a_generator_of_another_device_is_refused(self):
        with pytest.raises(RatpError, match="must share a device, got meta and cpu"):
            Transform(OBJECTS, 8)(torch.empty(2, 3, 8, 8, device="meta"), generator())

    def test_switches_are_set_by_name(self):
        config = override(OBJECTS, {"flip": "0", "hue": "0.2", "crop": "off"})
        assert (config.flip, config.hue, config.crop) == (0, 0.2, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGPU:
    @PRESETS
    def test_a_draw_gives_what_the_cpu_gives(self, config):
        transform, images = Transform(config, 28), noise(8)
        draw = transform.draw(8, 30, 30, generator())
        there = TransformDraw(*(None if value is None else value.cuda() for value in vars(draw).values()))
        torch.testing.assert_close(
            transform.apply(images.cuda(), there).cpu(), transform.apply(images, draw), **TOLERANCE
        )

    def test_a_captured_call_draws_anew_and_repeats_what_a_plain_call_gives(self):
        transform, images, source = Transform(OBJECTS, 28), noise(8).cuda(), torch.Generator("cuda")
        plain = [transform(images, source.manual_seed(7)), transform(images, source)]
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(source)
        with torch.cuda.graph(graph):
            captured = transform(images, source)
        source.manual_seed(7)
        for expected in plain:
            graph.replay()
            torch.testing.assert_close(captured, expected, **SAME)
