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
def test_it_is_a_convolution_with_batch_norm_addition_and_relu(inputs, outputs, adds, dtype, device):
    from ratp.functional.kernels.pointwise import fits, infer

    source = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=source).to(device, dtype)

    x, add = draw(3, inputs, 9, 7), draw(3, outputs, 9, 7) if adds else None
    weight, (mean, gamma, beta) = draw(outputs, inputs, 1, 1) / 8, draw(3, outputs).float()
    variance = draw(outputs).float().square() + 0.5
    x[0, 0, 0, 0] = torch.nan
    assert fits(x, weight, (1, 1)) == (dtype == torch.bfloat16)
    assert not fits(x, weight[:, :3], (1, 1)) and not fits(x, weight, (2, 2))
    expected = F.batch_norm(F.conv2d(x.float(), weight.float()), mean, variance, gamma, beta, eps=0.1)
    expected = expected if add is None else expected + add.float()
    found = infer(x, weight, mean, variance, gamma, beta, 0.1, add)
    torch.testing.assert_close(found.float(), expected.relu(), rtol=2e-2, atol=2e-2, equal_nan=True)
