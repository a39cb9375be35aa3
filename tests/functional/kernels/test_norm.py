"""The kernels of batch normalisation against torch's functions, on the rows that count alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

SHAPES = pytest.mark.parametrize(
    "shape", [(6, 5), (6, 5, 4, 3), (3, 70, 3, 3), (37, 16, 12, 11)], ids=["vectors", "images", "channels", "parts"]
)
EPS, MOMENTUM = 1e-5, 0.3


def tensors(shape, device, dtype=torch.float32):
    source = torch.Generator().manual_seed(1)
    count, channels = shape[:2]
    values = {
        "x": 3 * torch.randn(shape, generator=source) + 2,
        "weight": torch.rand(channels, generator=source) + 0.5,
        "bias": torch.randn(channels, generator=source),
        "offset": torch.randn(channels, generator=source),
        "add": torch.randn(shape, generator=source),
        "dy": torch.randn(shape, generator=source),
        "keep": (torch.rand(count, channels, generator=source) > 0.3) / 0.7,
        "mean": torch.randn(channels, generator=source),
        "var": torch.rand(channels, generator=source) + 0.5,
    }
    return {k: v.to(device, dtype if k in ("x", "add", "dy") else torch.float32) for k, v in values.items()}


def spread(values, x):
    return values.reshape(*values.shape, *(1,) * (x.ndim - values.ndim))


def plain(t, rows, options):
    """Loss and everything else by torch, on some rows."""
    x, add = t["x"][rows], t["add"][rows]
    x = x + spread(t["offset"][None], x) if "offset" in options else x
    y = F.batch_norm(x, t["mean"], t["var"], t["weight"], t["bias"], True, MOMENTUM, EPS)
    y = y * spread(t["keep"][rows], x) if "keep" in options else y
    y = y + add if "add" in options else y
    return y.relu() if "relu" in options else y


def fused(t, mask, options):
    from ratp.functional.kernels.norm import Normalise

    tracked = torch.tensor(3, device=t["x"].device)
    y = Normalise.apply(
        t["x"],
        t["weight"],
        t["bias"],
        t["offset"] if "offset" in options else None,
        t["add"] if "add" in options else None,
        t["keep"] if "keep" in options else None,
        mask,
        None if mask is None else mask.sum(dtype=torch.float32),
        (t["mean"], t["var"], tracked),
        MOMENTUM,
        EPS,
        "relu" in options,
    )
    assert tracked == 3 + (mask is None or bool(mask.any()))
    return y


@SHAPES
@pytest.mark.parametrize("masked", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("options", ["", "relu", "keep relu", "add relu", "keep add", "offset keep relu"])
def test_it_is_what_torch_gives_on_the_rows_that_count(shape, masked, options, device):
    ours, theirs = tensors(shape, device), tensors(shape, device)
    rows = torch.arange(shape[0], device=device) % 3 != 1 if masked else torch.ones(shape[0], device=device) > 0
    names = ["x", "weight", "bias", *(name for name in ("add", "offset") if name in options)]
    for t in (ours, theirs):
        for name in names:
            t[name].requires_grad_()
    got, expected = fused(ours, rows if masked else None, options), plain(theirs, rows, options)
    torch.testing.assert_close(got[rows], expected, rtol=1e-5, atol=1e-5)
    for name in ("mean", "var"):
        torch.testing.assert_close(ours[name], theirs[name])
    dy = ours["dy"] * spread(rows, ours["x"])
    gradients = torch.autograd.grad(got, [ours[name] for name in names], dy)
    wanted = torch.autograd.grad(expected, [theirs[name] for name in names], dy[rows])
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not gradients[0][~rows].any()


@SHAPES
@pytest.mark.parametrize("options", ["", "relu", "keep add relu", "offset"])
def test_with_given_statistics(shape, options, device):
    from ratp.functional.kernels.norm import infer

    t = tensors(shape, device)
    got = infer(
        t["x"],
        t["mean"],
        t["var"],
        t["weight"],
        t["bias"],
        EPS,
        offset=t["offset"] if "offset" in options else None,
        keep=t["keep"] if "keep" in options else None,
        add=t["add"] if "add" in options else None,
        relu="relu" in options,
    )
    x = t["x"] + spread(t["offset"][None], t["x"]) if "offset" in options else t["x"]
    expected = F.batch_norm(x, t["mean"], t["var"], t["weight"], t["bias"], False, 0.0, EPS)
    expected = expected * spread(t["keep"], t["x"]) + t["add"] if "keep" in options else expected
    torch.testing.assert_close(got, expected.relu() if "relu" in options else expected, rtol=1e-5, atol=1e-5)


def test_where_no_row_counts_nothing_moves_and_all_is_finite(device):
    t, before = tensors((4, 3, 2, 2), device), tensors((4, 3, 2, 2), device)
    t["x"].requires_grad_()
    y = fused(t, torch.zeros(4, dtype=torch.bool, device=device), "relu")
    (dx,) = torch.autograd.grad(y, t["x"], torch.zeros_like(y))
    assert y.isfinite().all() and not dx.any()
    assert torch.equal(t["mean"], before["mean"]) and torch.equal(t["var"], before["var"])


def test_a_single_value_moves_the_mean_alone(device):
    t, before = tensors((2, 3), device), tensors((2, 3), device)
    fused(t, torch.tensor([True, False], device=device), "")
    torch.testing.assert_close(t["mean"], before["mean"].lerp(before["x"][0], MOMENTUM))
    assert torch.equal(t["var"], before["var"])


def test_bfloat16_is_summed_in_single_precision(device):
    t, exact = tensors((37, 16, 12, 11), device, torch.bfloat16), tensors((37, 16, 12, 11), device)
    exact["x"] = t["x"].float()
    got = fused(t, None, "relu")
    expected = plain(exact, slice(None), "relu")
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)
    for name in ("mean", "var"):
        torch.testing.assert_close(t[name], exact[name], rtol=1e-4, atol=1e-4)


def test_non_finite_values_are_not_hidden(device):
    from ratp.functional.kernels.norm import infer

    t = tensors((2, 3), device)
    t["x"][0, 1] = torch.nan
    y = infer(t["x"], t["mean"], t["var"], t["weight"], t["bias"], EPS, relu=True)
    assert y[0, 1].isnan() and y.isnan().sum() == 1


def test_a_mean_far_from_zero_costs_no_accuracy(device):
    t, exact = tensors((37, 16, 12, 11), device), tensors((37, 16, 12, 11), device)
    for each in (t, exact):
        each["x"] += 300
        each["mean"] += 299
    exact = {name: value.double() for name, value in exact.items()}
    torch.testing.assert_close(fused(t, None, "").double(), plain(exact, slice(None), ""), rtol=1e-4, atol=1e-4)
