"""Batch normalisation over some rows: what torch gives on these rows alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ratp.errors import RatpError
from ratp.functional.norm import BatchNorm1d, BatchNorm2d, by_batch, only_rows, recounting, supports_row_masks

ROWS, CHANNELS = 9, 5
SHAPES = pytest.mark.parametrize(
    ("kind", "space"), [("1d", ()), ("1d", (7,)), ("2d", (4, 3))], ids=["vectors", "sequences", "images"]
)
TYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["single", "double"]
)
DEVICES = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
MASK = torch.tensor([True, False, True, True, False, True, False, True, True])
OURS, TORCHS = {"1d": BatchNorm1d, "2d": BatchNorm2d}, {"1d": nn.BatchNorm1d, "2d": nn.BatchNorm2d}


def pair(kind, dtype=torch.float64, **options):
    """Our layer and torch's, alike, with parameters and statistics of some training."""
    ours, torchs = (kinds[kind](CHANNELS, **options).to(dtype) for kinds in (OURS, TORCHS))
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in torchs.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=source) + (0.5 if "var" in name else 0))
    ours.load_state_dict(torchs.state_dict())
    return ours, torchs


def batch(space, dtype=torch.float64, rows=ROWS):
    source = torch.Generator().manual_seed(2)
    return (3 * torch.randn(rows, CHANNELS, *space, generator=source, dtype=torch.float64) + 1).to(dtype)


def close(one, other, tolerance):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def same_layers(one, other, tolerance):
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, tensor in one.state_dict().items():
        close(tensor, other.state_dict()[name], tolerance)


@SHAPES
@pytest.mark.parametrize("training", [True, False])
class TestWithoutMask:
    def test_it_is_torchs_layer(self, kind, space, training):
        ours, torchs = (layer.train(training) for layer in pair(kind))
        x = batch(space)
        assert torch.equal(ours(x), torchs(x))
        same_layers(ours, torchs, 0)

    def test_no_mask_is_no_mask(self, kind, space, training):
        ours, torchs = (layer.train(training) for layer in pair(kind))
        x = batch(space)
        with only_rows(ours, None):
            assert torch.equal(ours(x), torchs(x))
        same_layers(ours, torchs, 0)


@SHAPES
@TYPES
@DEVICES
class TestAgainstTorch:
    @pytest.mark.parametrize("options", [{}, {"momentum": None}, {"momentum": 0.7}, {"track_running_stats": False}])
    def test_outputs_statistics_and_gradients_are_those_of_the_rows_alone(
        self, kind, space, dtype, tolerance, device, options
    ):
        ours, torchs = (layer.to(device) for layer in pair(kind, dtype, **options))
        mask = MASK.to(device)
        for step in range(3):
            x = (batch(space, dtype) * (step + 1)).to(device).requires_grad_()
            few = x.detach()[mask].requires_grad_()
            weights = batch(space, dtype).cos().to(device)
            with only_rows(ours, mask):
                y = ours(x)
            expected = torchs(few)
            close(y[mask], expected, tolerance)
            ours.zero_grad()
            torchs.zero_grad()
            (y * weights)[mask].sum().backward()
            (expected * weights[mask]).sum().backward()
            close(x.grad[mask], few.grad, tolerance)
            assert not x.grad[~mask].any()
            for mine, theirs in zip(ours.parameters(), torchs.parameters(), strict=True):
                close(mine.grad, theirs.grad, 10 * tolerance)
        same_layers(ours, torchs, tolerance)

    def test_all_rows_are_the_whole_batch(self, kind, space, dtype, tolerance, device):
        ours, torchs = (layer.to(device) for layer in pair(kind, dtype))
        x = batch(space, dtype).to(device)
        with only_rows(ours, torch.ones(ROWS, dtype=torch.bool, device=device)):
            close(ours(x), torchs(x), tolerance)
        same_layers(ours, torchs, tolerance)

    def test_without_parameters(self, kind, space, dtype, tolerance, device):
        ours, torchs = (layer.to(device) for layer in pair(kind, dtype, affine=False))
        x, mask = batch(space, dtype).to(device).requires_grad_(), MASK.to(device)
        few = x.detach()[mask].requires_grad_()
        with only_rows(ours, mask):
            ours(x)[mask].square().sum().backward()
        torchs(few).square().sum().backward()
        close(x.grad[mask], few.grad, tolerance)


@SHAPES
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_are_exact_even_if_rows_that_do_not_count_enter_the_loss(kind, space, affine):
    layer, _ = pair(kind, affine=affine)
    layer.momentum = 0.0
    x = batch(space)[:, :, ..., :2].clone().requires_grad_() if space else batch(space).requires_grad_()

    def run(inputs, *parameters):
        with only_rows(layer, MASK):
            return torch.func.functional_call(layer, dict(zip(("weight", "bias"), parameters, strict=False)), inputs)

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()))


@SHAPES
@DEVICES
class TestFewRows:
    def run(self, layer, x, mask):
        x = x.requires_grad_()
        with only_rows(layer, mask):
            y = layer(x)
        (y * mask.reshape(-1, *(1,) * (y.ndim - 1))).sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        return x.grad

    def test_none_changes_nothing(self, kind, space, device):
        layer = pair(kind, torch.float32)[0].to(device)
        before = copy.deepcopy(layer.state_dict())
        gradient = self.run(
            layer, batch(space, torch.float32).to(device), torch.zeros(ROWS, dtype=torch.bool, device=device)
        )
        assert not gradient.any()
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())

    def test_none_through_many_layers_stays_finite(self, kind, space, device):
        layers = nn.Sequential(*(pair(kind, torch.float32)[0] for _ in range(60))).to(device)
        self.run(layers, batch(space, torch.float32).to(device), torch.zeros(ROWS, dtype=torch.bool, device=device))

    def test_one(self, kind, space, device):
        """A single value has no unbiased variance: torch refuses it, here the running variance stays."""
        layer, torchs = (one.to(device) for one in pair(kind, torch.float32))
        mask = torch.arange(ROWS, device=device) == 3
        x = batch(space, torch.float32).to(device)
        variance = layer.running_var.clone()
        self.run(layer, x, mask)
        if space:
            torchs(x[3:4])
            same_layers(layer, torchs, 1e-5)
        else:
            assert torch.equal(layer.running_var, variance)
            close(layer.running_mean, torchs.running_mean * 0.9 + 0.1 * x[3], 1e-5)
        assert layer.num_batches_tracked.item() == 1


class TestMask:
    def network(self):
        return nn.Sequential(nn.Conv2d(3, 4, 1), BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), BatchNorm1d(16))

    def test_it_reaches_all_layers_inside_and_goes_again(self):
        network, x = self.network(), torch.randn(6, 3, 2, 2)
        mask = torch.tensor([True, True, False, False, True, True])
        twin = copy.deepcopy(network)
        with only_rows(network, mask):
            first = network(x)
        torch.testing.assert_close(first[mask], twin(x[mask]))
        assert torch.equal(copy.deepcopy(network)(x), network(x))
        first[mask].sum().backward()  # the mask of the forward pass, not of now

    @pytest.mark.parametrize("first", [True, False], ids=["first masked", "then masked"])
    def test_a_layer_may_be_passed_twice_before_the_gradient(self, first):
        network, x = self.network(), torch.randn(6, 3, 2, 2)
        twin, mask = copy.deepcopy(network), torch.tensor([True, True, False, False, True, True])
        masks = (mask, None) if first else (None, mask)
        outputs, expected = [], []
        for rows in masks:
            with only_rows(network, rows):
                outputs.append(network(x) if rows is None else network(x)[mask])
            expected.append(twin(x) if rows is None else twin(x[mask]))
        for parts in (outputs, expected):
            sum(part.square().sum() for part in parts).backward()
        for mine, theirs in zip(network.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dict(network.state_dict()), dict(twin.state_dict()))

    def test_it_goes_when_the_block_fails(self):
        network = self.network()
        with pytest.raises(ValueError, match="stop"), only_rows(network, torch.ones(2, dtype=torch.bool)):
            raise ValueError("stop")
        assert network(torch.randn(3, 3, 2, 2)).shape == (3, 16)

    def test_it_does_nothing_in_evaluation(self):
        network, x = self.network().eval(), torch.randn(6, 3, 2, 2)
        expected = network(x)
        with only_rows(network, torch.zeros(6, dtype=torch.bool)):
            assert torch.equal(network(x), expected)

    def test_one_of_another_length_is_refused(self):
        network = self.network()
        refused = pytest.raises(RatpError, match=r"mask of \(5,\) rows does not fit a batch of \(6, 4, 2, 2\)")
        with refused, only_rows(network, torch.ones(5, dtype=torch.bool)):
            network(torch.randn(6, 3, 2, 2))

    def test_it_is_not_saved(self):
        network = self.network()
        names = set(network.state_dict())
        with only_rows(network, torch.ones(5, dtype=torch.bool)):
            assert set(network.state_dict()) == names

    def test_low_precision_keeps_its_type_and_exact_statistics(self):
        layer = BatchNorm2d(4)
        x = torch.randn(6, 4, 3, 3).bfloat16()
        mask = torch.tensor([True, True, False, False, True, True])
        with only_rows(layer, mask):
            y = layer(x)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(layer.running_mean, 0.1 * x[mask].float().mean(dim=(0, 2, 3)))

    @pytest.mark.parametrize(
        ("layer", "supported"),
        [
            (nn.Linear(2, 2), True),
            (BatchNorm2d(3), True),
            (nn.LayerNorm(3), True),
            (nn.GroupNorm(1, 3), True),
            (nn.InstanceNorm2d(3), True),
            (nn.InstanceNorm2d(3, track_running_stats=True), False),
            (nn.BatchNorm2d(3), False),
            (nn.BatchNorm1d(3, track_running_stats=False), False),
            (nn.SyncBatchNorm(3), False),
        ],
    )
    def test_foreign_batch_norms_cannot_be_masked(self, layer, supported):
        assert supports_row_masks(nn.Sequential(nn.Conv2d(3, 3, 1), BatchNorm2d(3), layer)) == supported


@SHAPES
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_several_batches_at_once_each_have_their_own_statistics(kind, space, affine, training):
    layer, _ = pair(kind, affine=affine)
    layer.train(training)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    batches = [scale * batch(space) + scale for scale in (1.0, 3.0, 0.1)]
    with by_batch(layer):
        expected = torch.cat([layer(x) for x in batches])
    with by_batch(layer, 3):
        together = layer(torch.cat(batches))
    close(together, expected, 1e-9)
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())


def test_several_batches_at_once_in_few_bits_and_another_layout():
    layer = BatchNorm2d(4)
    x = torch.randn(12, 4, 6, 6).to(memory_format=torch.channels_last)
    with by_batch(layer):
        expected = torch.cat([layer(part) for part in x.split(4)])
    with by_batch(layer, 3):
        y, few_bits = layer(x), layer(x.bfloat16())
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(few_bits, expected.bfloat16(), rtol=0.02, atol=0.02)
    assert y.is_contiguous(memory_format=torch.channels_last)


class TestRecounting:
    """Running statistics computed anew, as the plain mean over the batches of a block."""

    @pytest.mark.parametrize("batches", [1, 2, 5])
    def test_they_are_the_mean_over_the_batches(self, batches):
        network = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNorm2d(4), nn.Dropout(0.5)).double()
        inputs = [torch.randn(6, 3, 5, 5, dtype=torch.float64) for _ in range(batches)]
        with recounting(network):
            for x in inputs:
                network(x)
        hidden = [network[0](x).detach().transpose(0, 1).flatten(1) for x in inputs]
        layer = network[1]
        torch.testing.assert_close(layer.running_mean, sum(h.mean(dim=1) for h in hidden) / batches)
        torch.testing.assert_close(layer.running_var, sum(h.var(dim=1) for h in hidden) / batches)

    @pytest.mark.parametrize("training", [True, False])
    def test_modes_and_momentum_are_restored_and_dropout_is_off(self, training):
        network = nn.Sequential(BatchNorm1d(4, momentum=0.3), nn.Dropout(0.5)).train(training)
        x = torch.randn(9, 4)
        with recounting(network):
            first, second = network(x), network(x)
        assert torch.equal(first, second)
        assert [part.training for part in network.modules()] == [training] * 3
        assert network[0].momentum == 0.3

    def test_what_was_there_before_does_not_matter(self):
        layer, x = BatchNorm1d(4), torch.randn(9, 4)
        ends = []
        for start in (0.0, 7.0):
            layer.running_mean.fill_(start)
            with recounting(layer):
                layer(x)
            ends.append((layer.running_mean.clone(), layer.running_var.clone(), layer.num_batches_tracked.clone()))
        torch.testing.assert_close(*ends, rtol=0, atol=0)
