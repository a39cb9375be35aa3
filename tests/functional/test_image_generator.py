"""Generators of PDEN, and the pool of those that have learnt."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ratp.errors import RatpError
from ratp.methods.pden import NOISE_DIM, GeneratorPool, ImageGenerator, diversity, widened


def generators(count, noisy=True):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return [ImageGenerator(noisy=noisy) for _ in range(count)]


@pytest.fixture
def inputs():
    source = torch.Generator().manual_seed(0)
    return torch.rand(4, 3, 16, 20, generator=source), torch.randn(4, NOISE_DIM, generator=source)


def test_images_lie_between_0_and_1_and_keep_their_size(inputs):
    images, noise = inputs
    (one,) = generators(1)
    output = one(images, noise)
    assert output.shape == images.shape
    assert (output > 0).all() and (output < 1).all()


def test_it_is_what_torchs_layers_make(inputs):
    images, noise = inputs
    (one,) = generators(1)
    c1, c2, c3, c4 = one.layers
    hidden = F.relu(F.conv2d(F.relu(F.conv2d(images, c1.weight, c1.bias, padding=1)), c2.weight, c2.bias, padding=1))
    gamma, beta = one.noise(noise)[:, :, None, None].chunk(2, dim=1)
    hidden = (1 + gamma) * F.instance_norm(hidden) + beta
    hidden = F.relu(F.conv2d(hidden, c3.weight, c3.bias, padding=1))
    expected = torch.sigmoid(F.conv2d(hidden, c4.weight, c4.bias, padding=1))
    torch.testing.assert_close(one(images, noise), expected, rtol=1e-4, atol=1e-5)
    assert [layer.out_channels for layer in one.layers] == [16, 32, 64, 3]


def test_noise_changes_images_and_its_absence_is_possible(inputs):
    images, noise = inputs
    (one,) = generators(1)
    assert not torch.allclose(one(images, noise), one(images, -noise))
    assert torch.equal(one(images), one(images))
    (back,) = generators(1, noisy=False)
    assert not any("noise" in name for name, _ in back.named_parameters())
    assert back(images).shape == images.shape


def test_the_last_layer_with_more_channels_gives_the_same_images_and_gradients(inputs):
    """What GPUs compute."""
    images = inputs[0].repeat(1, 22, 1, 1)[:, :64].contiguous(memory_format=torch.channels_last).requires_grad_()
    (one,) = generators(1)
    last = one.layers[-1]
    plain, wide = last(images), widened(last, images)
    torch.testing.assert_close(wide, plain)
    assert torch.sigmoid(wide).is_contiguous(memory_format=torch.channels_last)
    wanted = images, last.weight, last.bias
    gradients = [torch.autograd.grad(output.cos().sum(), wanted) for output in (wide, plain)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_several_draws_need_one_look(inputs):
    images, noise = inputs
    (one,) = generators(1)
    seen = one.look(images)
    for n in (noise, -noise):
        assert torch.equal(one.draw(seen, n), one(images, n))


def test_a_flat_image_gives_numbers(inputs):
    _, noise = inputs
    (one,) = generators(1)
    output = one(torch.zeros(4, 3, 8, 8), noise)
    slopes = torch.autograd.grad(output.sum(), list(one.parameters()))
    assert output.isfinite().all() and all(slope.isfinite().all() for slope in slopes)


def test_a_pool_answers_as_the_generator_asked_for(inputs):
    images, noise = inputs
    trained = generators(3)
    pool = GeneratorPool(trained)
    assert pool.size == 3
    for index, one in enumerate(trained):
        answer = pool(images, noise, torch.tensor([index]))
        assert torch.equal(answer, one(images, noise)) and not answer.requires_grad


def test_a_pool_is_a_copy(inputs):
    images, noise = inputs
    (one,) = generators(1)
    pool = GeneratorPool([one])
    before = pool(images, noise, torch.tensor([0]))
    with torch.no_grad():
        one.layers[0].weight.zero_()
    assert torch.equal(pool(images, noise, torch.tensor([0])), before)


def test_an_empty_pool_is_refused():
    with pytest.raises(RatpError, match="at least one generator"):
        GeneratorPool([])


def test_no_image_counts_for_more_than_the_limit():
    some, others = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)
    others[0], others[1] = 0.9, 0.2
    assert diversity(some, others, 0.5).item() == pytest.approx((0.5 + 0.2) / 2)
    assert diversity(some, others, 0.1).item() == pytest.approx(0.1)
    assert diversity(some, torch.ones(2, 3, 4, 4), 0.5) <= 0.5
