"""Weak and strong views, and the blur they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.transforms import functional as vision

from ratp.errors import ConfigError
from ratp.functional.colour import blur, blur_inside
from ratp.functional.transforms import NONE, OBJECTS, Transform
from ratp.functional.views import View, ViewConfig, shifted

STRONG = ViewConfig(OBJECTS, jitter=0.8, shift=2, blur=0.5)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(count=6, height=24, width=24):
    return torch.rand(count, 3, height, width, generator=generator(1))


class TestBlur:
    @pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
    def test_inside_it_is_torchvisions(self, sigma):
        images, radius = noise(2), 6
        theirs = vision.gaussian_blur(images, [13, 13], [sigma, sigma])[:, :, 6:-6, 6:-6]
        torch.testing.assert_close(blur_inside(images, torch.full((2,), sigma), radius), theirs, rtol=0, atol=1e-6)

    def test_every_image_has_its_own_width(self):
        images, sigmas = noise(3), torch.tensor([0.3, 1.0, 2.0])
        together = blur(images, sigmas, 6)
        for row in range(3):
            torch.testing.assert_close(together[row : row + 1], blur(images[row : row + 1], sigmas[row : row + 1], 6))

    def test_no_width_changes_nothing(self):
        images = noise(2)
        assert torch.equal(blur(images, torch.zeros(2), 6), images)

    def test_one_colour_stays_up_to_the_edge(self):
        images = torch.full((1, 3, 3, 5), 0.25)  # smaller than the blur reaches
        torch.testing.assert_close(blur(images, torch.tensor([2.0]), 6), images)


class TestShift:
    def test_images_move_and_edges_go_on(self):
        image = torch.arange(9.0).reshape(1, 1, 3, 3)
        moved = shifted(image.expand(2, 1, 3, 3), torch.tensor([[1, 0], [0, -2]]))
        assert moved[0, 0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
        assert moved[1, 0].tolist() == [[2, 2, 2], [5, 5, 5], [8, 8, 8]]

    def test_all_places_within_the_range_are_drawn(self):
        image = torch.zeros(1, 3, 9, 9)
        image[:, :, 4, 4] = 1
        views = View(ViewConfig(shift=2), 9)(image.expand(600, -1, -1, -1), generator())
        places = {tuple(place) for place in views[:, 0].nonzero()[:, 1:].tolist()}
        assert places == {(y, x) for y in range(2, 7) for x in range(2, 7)}


class TestView:
    def test_by_default_images_stay(self):
        images = noise()
        assert torch.equal(View(ViewConfig(), 24)(images, generator()), images)

    def test_with_everything_on_all_images_it_is_the_transform(self):
        images = noise()
        assert torch.equal(View(ViewConfig(OBJECTS), 20)(images, generator(2)), Transform(OBJECTS, 20)(images, generator(2)))  # fmt: skip  # noqa: E501

    def test_colours_change_for_some_images_only(self):
        config = replace(NONE, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
        images = noise(500, 4, 4)
        views = View(ViewConfig(config, jitter=0.8), 4)(images, generator())
        changed = (views - images).abs().amax(dim=(1, 2, 3)) > 1e-4
        assert 0.74 < changed.float().mean() < 0.86

    def test_some_images_are_blurred(self):
        images = noise(500, 8, 8)
        views = View(ViewConfig(blur=0.5, blur_min=0.5), 8)(images, generator())
        assert 0.43 < (views != images).any(dim=3).any(dim=2).any(dim=1).float().mean() < 0.57

    def test_a_seed_repeats_and_two_calls_differ(self):
        view, images, source = View(STRONG, 24), noise(), generator(3)
        state = torch.get_rng_state()
        first, second = view(images, source), view(images, source)
        assert not torch.allclose(first, second)
        assert torch.equal(view(images, generator(3)), first)
        assert torch.equal(torch.get_rng_state(), state)
        assert first.min() >= 0 and first.max() <= 1

    def test_no_value_is_read_back(self):
        with FakeTensorMode():
            images = torch.empty(4, 3, 16, 16, dtype=torch.uint8)
            assert View(STRONG, 16)(images, torch.Generator()).shape == (4, 3, 16, 16)

    def test_mistakes_are_named_all_at_once(self):
        with pytest.raises(ConfigError) as caught:
            View(ViewConfig(jitter=1.5, blur=2.0), 8)
        assert len(caught.value.problems) == 2
        with pytest.raises(ConfigError, match=r"blur_min must be at most blur_max, got 3.0 and 2.0"):
            View(ViewConfig(blur_min=3.0), 8)
        with pytest.raises(ConfigError, match="flip"):
            View(ViewConfig(replace(NONE, flip=2.0)), 8)
