"""The style module of L2D."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ratp.errors import ConfigError
from ratp.functional.style import Blend, StyleModule

ONLY_STYLE = Blend(1.0, torch.zeros(3), torch.ones(3))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_images(*size):
    return torch.randn(4, 3, *(size or (32, 32)), generator=generator(5))


@pytest.fixture
def style():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return StyleModule((32, 32))


def test_sizes_follow_the_images(style):
    assert [tuple(scale.shape) for scale in style.scales] == [(3, s, s) for s in (24, 20, 16, 28)]
    assert [tuple(shift.shape) for shift in style.shifts] == [(3, s, s) for s in (24, 20, 16, 28)]
    large = StyleModule((224, 224))
    assert [scale.shape[-1] for scale in large.scales] == [216, 212, 208, 220]
    oblong = StyleModule((32, 40), (5,))
    assert tuple(oblong.scales[0].shape) == (3, 28, 36)
    assert oblong.restyle(make_images(32, 40), ONLY_STYLE, generator()).shape == (4, 3, 32, 40)


def test_it_starts_as_published(style):
    assert style.noise_level == 0
    scales, shifts = (torch.cat([p.detach().flatten() for p in group]) for group in (style.scales, style.shifts))
    assert scales.mean() == pytest.approx(1, abs=0.01) and scales.std() == pytest.approx(0.1, abs=0.01)
    assert shifts.mean() == pytest.approx(0, abs=0.01) and shifts.std() == pytest.approx(0.1, abs=0.01)


def test_only_scales_shifts_and_noise_are_trained(style):
    assert {name.split(".")[0] for name, _ in style.named_parameters()} == {"noise_level", "scales", "shifts"}
    assert "fixed" in style.state_dict() and "_bounds" not in style.state_dict()


def test_estimation_is_the_mean_of_its_branches_by_torchs_own_layers(style):
    x = make_images()
    count = len(style.scales)
    numbers = iter(style._layers.split(style.fixed))
    colour = next(numbers)
    branches = [torch.tanh(F.conv2d(x, colour.weight, colour.bias))]
    for i in range(count):
        encoder, decoder = next(numbers), next(numbers)
        hidden = F.instance_norm(F.conv2d(x, encoder.weight, encoder.bias)) * style.scales[i] + style.shifts[i]
        branches.append(torch.tanh(F.conv_transpose2d(hidden, decoder.weight, decoder.bias)))
    expected = sum(branches) / (count + 1)
    torch.testing.assert_close(style.estimate(x, ONLY_STYLE, generator()), expected.sigmoid(), rtol=1e-4, atol=1e-5)


def test_a_style_is_put_on_images_in_part():
    x, styles = make_images(8, 8), make_images(8, 8).flip(0)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    normalised = (styles.sigmoid() - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(Blend(0.6, mean, std)(x, styles), 0.6 * normalised + 0.4 * x)


def test_convolutions_are_within_torchs_bounds(style):
    for layer in style._layers.split(style.fixed):
        bound = (3 * layer.weight.shape[-1] ** 2) ** -0.5
        assert layer.weight.abs().max() <= bound and layer.bias.abs().max() <= bound
        assert layer.weight.abs().max() > 0.7 * bound


def test_every_call_has_other_convolutions_but_estimation_has_its_own(style):
    x, source = make_images(), generator()
    assert not torch.equal(style.restyle(x, ONLY_STYLE, source), style.restyle(x, ONLY_STYLE, source))
    assert torch.equal(
        style.estimate(x, ONLY_STYLE, source), style.estimate(x, ONLY_STYLE, source)
    )  # the noise's level is 0
    assert torch.equal(style.restyle(x, ONLY_STYLE, generator(3)), style.restyle(x, ONLY_STYLE, generator(3)))


def test_the_gradient_flows_in_estimation_only(style):
    assert not style.restyle(make_images(), ONLY_STYLE, generator()).requires_grad
    slopes = torch.autograd.grad(
        style.estimate(make_images(), ONLY_STYLE, generator()).square().sum(), list(style.parameters())
    )
    assert all(slope.abs().sum() > 0 for slope in slopes)


def test_noise_is_in_hundredths(style):
    x = make_images()
    calm = style.estimate(x, ONLY_STYLE, generator())
    with torch.no_grad():
        style.noise_level.fill_(2.0)
    torch.testing.assert_close(
        style.estimate(x, ONLY_STYLE, generator()),
        style_without_noise(style, x + 0.02 * torch.randn(x.shape, generator=generator())),
    )
    assert not torch.equal(style.estimate(x, ONLY_STYLE, generator()), calm)


def style_without_noise(style, x):
    level = style.noise_level.item()
    with torch.no_grad():
        style.noise_level.zero_()
    result = style.estimate(x, ONLY_STYLE, generator())
    with torch.no_grad():
        style.noise_level.fill_(level)
    return result


def test_mixing_weights_that_cancel_out_give_numbers(style, monkeypatch):
    real = torch.randn

    def cancelling(*shape, **options):
        if shape == (5,):
            return torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0])
        return real(*shape, **options)

    monkeypatch.setattr(torch, "randn", cancelling)
    assert style.restyle(make_images(), ONLY_STYLE, generator()).isfinite().all()


def test_images_too_small_for_a_kernel_are_refused():
    with pytest.raises(ConfigError, match=r"16×20 are too small for a style kernel of 17: .* below 16"):
        StyleModule((16, 20))
    StyleModule((18, 18))
