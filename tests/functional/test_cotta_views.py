"""CoTTA's views, against torchvision's operations applied one by one to padded images."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as vision

from ratp.functional.cotta_views import ANGLE, BRIGHTNESS, CONTRAST, GAMMA, HUE, SATURATION, CoTTAView, recolour

BY_HAND = {
    BRIGHTNESS: vision.adjust_brightness,
    CONTRAST: vision.adjust_contrast,
    SATURATION: vision.adjust_saturation,
    HUE: vision.adjust_hue,
    GAMMA: vision.adjust_gamma,
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(count=6, height=24, width=24):
    return torch.rand(count, 3, height, width, generator=generator(1))


def published(image, draw, row):
    """What the published code does to one image, with these random numbers."""
    for operation in draw.order[row].tolist():
        image = BY_HAND[operation](image, draw.factors[row, operation].item())
    height, width = image.shape[1:]
    image = vision.pad(image, [width // 2, height // 2], padding_mode="edge")
    shift = [int(t) for t in draw.shifts[row]]
    image = vision.affine(
        image,
        math.degrees(draw.angles[row].item()),
        shift,
        draw.scales[row].item(),
        [0.0],
        interpolation=InterpolationMode.BILINEAR,
    )
    image = vision.gaussian_blur(image, [5, 5], [draw.widths[row].item()] * 2)
    image = vision.center_crop(image, [height, width])
    if draw.flip[row]:
        image = vision.hflip(image)
    return (image + draw.noise[row]).clamp(0, 1)


@pytest.mark.parametrize(("height", "width"), [(24, 24), (16, 30)])
@pytest.mark.parametrize("flip", [0.0, 0.5])
def test_each_image_is_as_published(height, width, flip):
    view, images = CoTTAView(flip), noise(12, height, width)
    draw = view.draw(images.shape, generator(5))
    found = view.apply(images, draw)
    expected = torch.stack([published(image, draw, row) for row, image in enumerate(images)])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_every_order_of_colours():
    """A hundred images meet most of the 120 orders."""
    images = noise(100, 6, 6)
    draw = CoTTAView(0.0).draw(images.shape, generator(2))
    assert len({tuple(order) for order in draw.order.tolist()}) > 50
    expected = []
    for row, image in enumerate(images):
        for operation in draw.order[row].tolist():
            image = BY_HAND[operation](image, draw.factors[row, operation].item())
        expected.append(image)
    torch.testing.assert_close(recolour(images, draw.order, draw.factors), torch.stack(expected), rtol=0, atol=1e-4)


def test_ranges():
    draw = CoTTAView(0.5).draw(torch.Size((20_000, 3, 2, 2)), generator())
    ranges = [(0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06), (0.7, 1.3)]
    for column, (low, high) in zip(draw.factors.T, ranges, strict=True):
        assert low <= column.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < column.max() <= high
        assert column.mean().item() == pytest.approx((low + high) / 2, abs=0.02 * (high - low))
    assert draw.angles.abs().max() <= ANGLE
    assert draw.scales.min() >= 0.9 and draw.scales.max() <= 1.1
    assert draw.widths.min() >= 0.001 and draw.widths.max() <= 0.5
    assert draw.flip.float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert draw.noise.std().item() == pytest.approx(0.005, rel=0.02)


def test_shifts_are_whole_and_a_sixteenth_of_the_padded_side():
    draw = CoTTAView(0.0).draw(torch.Size((2000, 3, 32, 64)), generator())
    assert torch.equal(draw.shifts, draw.shifts.round())
    assert draw.shifts.abs().amax(dim=0).tolist() == [8, 4]


def test_digits_are_not_mirrored():
    assert not CoTTAView(0.0).draw(torch.Size((500, 3, 4, 4)), generator()).flip.any()


def test_values_stay_in_range_and_images_as_they_are():
    images = torch.cat([torch.zeros(3, 3, 8, 8), torch.ones(3, 3, 8, 8), noise(3, 8, 8)])
    before = images.clone()
    views = CoTTAView(0.5)(images, generator())
    assert torch.equal(images, before)
    assert views.shape == images.shape
    assert views.isfinite().all()
    assert views.min() >= 0 and views.max() <= 1


def test_a_seed_repeats_and_two_calls_differ():
    view, images, source = CoTTAView(0.5), noise(), generator(3)
    state = torch.get_rng_state()
    first, second = view(images, source), view(images, source)
    assert not torch.allclose(first, second)
    assert torch.equal(view(images, generator(3)), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_value_is_read_back():
    with FakeTensorMode():
        assert CoTTAView(0.5)(torch.empty(4, 3, 16, 16), torch.Generator()).shape == (4, 3, 16, 16)
