import torch

from ratp.methods.shared.rotation import draw_turns, rotate, rotation_input

IMAGES = torch.arange(5 * 3 * 4 * 4.0).reshape(5, 3, 4, 4)


def test_four_quarters_are_nothing():
    turned = IMAGES
    for _ in range(4):
        turned = rotate(turned, torch.ones(5, dtype=torch.int64))
    assert torch.equal(turned, IMAGES)
    assert not torch.equal(rotate(IMAGES, torch.ones(5, dtype=torch.int64)), IMAGES)


def test_each_image_on_its_own():
    turns = torch.tensor([0, 1, 2, 3, 1])
    turned = rotate(IMAGES, turns)
    for image, before, number in zip(turned, IMAGES, turns.tolist(), strict=True):
        assert torch.equal(image, torch.rot90(before, number, (1, 2)))


def test_stored_images_too():
    images = IMAGES.to(torch.uint8)
    assert rotate(images, torch.tensor([0, 1, 2, 3, 1])).dtype == torch.uint8


def test_turns_are_drawn_evenly():
    counts = draw_turns(4000, torch.Generator().manual_seed(0)).bincount()
    assert len(counts) == 4
    assert counts.min() > 900


def test_no_gradient_reaches_the_upright_half():
    upright, turned = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    gradients = torch.autograd.grad(
        rotation_input(upright, turned).square().sum(), (upright, turned), allow_unused=True
    )
    assert gradients[0] is None
    assert gradients[1].abs().sum() > 0
