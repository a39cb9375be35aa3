"""1×1 convolutions against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

IN_BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter cannot multiply bfloat16"),
)


@pytest.mark.parametrize("dtype", [torch.float32, IN_BFLOAT16])
@pytest.mark.parametrize(("inputs", "outputs", "adds"), [(64, 128, True), (128, 64, False)])
def test_it_is_a_convolution_with_bias_addition_and_relu(inputs, outputs, adds, dtype, device):
    from ratp.functional.kernels.pointwise import fits, pointwise

    source = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=source).to(device, dtype)

    x, add = draw(3, inputs, 9, 7), draw(3, outputs, 9, 7) if adds else None
    weight, bias = draw(outputs, inputs, 1, 1) / 8, draw(outputs)
    x[0, 0, 0, 0] = torch.nan
    assert fits(x, weight) == (dtype == torch.bfloat16) and not fits(x, weight[:, :3])
    expected = F.conv2d(x.float(), weight.float(), bias.float())
    expected = expected if add is None else expected + add.float()
    found = pointwise(x, weight, bias, add)
    torch.testing.assert_close(found.float(), expected.relu(), rtol=2e-2, atol=2e-2, equal_nan=True)
