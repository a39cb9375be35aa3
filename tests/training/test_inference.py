"""Running a network over images gives the same for any chunk size and restores its mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ratp.training.recipe import CPU_ROOM, GPU_ROOM, Scaling, chunk_size, run_in_chunks

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SCALING = Scaling((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), CPU)


class Net(nn.Module):
    """Means of the channels, on a device that holds some images at once."""

    def __init__(self, holds=10_000):
        super().__init__()
        self.holds = holds
        self.chunks = []

    def forward(self, images):
        assert not self.training
        self.chunks.append(len(images))
        if len(images) > self.holds:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        means = images.mean(dim=(2, 3))
        return means, means.argmax(dim=1)


def some_images(count=1100, side=32):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    ("side", "device", "images"), [(32, CPU, 512), (224, CPU, 8), (32, GPU, 4096), (224, GPU, 128), (4000, CPU, 1)]
)
def test_a_chunk_holds_as_many_images_as_fit(side, device, images):
    assert chunk_size(torch.Size((3, side, side)), device) == images


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_chunk_is_bounded_in_bytes(device):
    room = GPU_ROOM if device is GPU else CPU_ROOM
    for side in range(1, 700, 7):
        taken = chunk_size(torch.Size((3, side, side)), device) * 3 * side * side * 4
        assert taken <= room < 4 * taken


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("holds", [10_000, 511, 300, 20, 1])
@pytest.mark.faults(16, "evaluation and labelling use smaller batches until they fit, with the same results")
def test_a_device_out_of_memory_changes_nothing(holds, training):
    images, net = some_images(), Net(holds).train(training)
    means, largest = run_in_chunks(net, net, images, SCALING)
    expected = SCALING(images).mean(dim=(2, 3))
    torch.testing.assert_close(means, expected, rtol=0, atol=1e-6)
    assert torch.equal(largest, means.argmax(dim=1))
    assert net.training is training
    assert max(chunk for chunk in net.chunks if chunk <= holds) > holds // 2 or holds > 512


@pytest.mark.parametrize("training", [True, False])
def test_a_network_too_large_for_one_image_is_an_error_and_left_as_it_was(training):
    net = Net(0).train(training)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        run_in_chunks(net, net, some_images(10), SCALING)
    assert net.training is training


def test_no_gradients_are_kept():
    layer = nn.Linear(3, 2)
    (result,) = run_in_chunks(layer, lambda images: (layer(images.mean(dim=(2, 3))),), some_images(600), SCALING)
    assert result.shape == (600, 2)
    assert not result.requires_grad
