"""The kernels of batch normalisation against torch's functions, on the rows that count alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import slow

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


def normalise(t, mask, count, tracked, options):
    from ratp.functional.kernels.norm import Normalise

    tickets = t.setdefault("tickets", torch.zeros(t["x"].shape[1], dtype=torch.int32, device=t["x"].device))
    return Normalise.apply(
        t["x"],
        t["weight"],
        t["bias"],
        t["offset"] if "offset" in options else None,
        t["add"] if "add" in options else None,
        t["keep"] if "keep" in options else None,
        mask,
        count,
        (t["mean"], t["var"], tracked),
        tickets,
        MOMENTUM,
        EPS,
        "relu" in options,
    )


def fused(t, mask, options):
    tracked = torch.tensor(3, device=t["x"].device)
    y = normalise(t, mask, None if mask is None else mask.sum(dtype=torch.float32), tracked, options)
    assert tracked == 3 + (mask is None or bool(mask.any()))
    return y


@SHAPES
@pytest.mark.parametrize("masked", [False, True], ids=["all", "some"])
@pytest.mark.parametrize(
    "options", [slow(""), "relu", slow("keep relu"), "add relu", slow("keep add"), "offset keep relu"]
)
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


def test_an_empty_batch(device):
    from ratp.functional.kernels.norm import infer

    t = tensors((0, 3, 2, 2), device)
    assert infer(t["x"], t["mean"], t["var"], t["weight"], t["bias"], EPS, relu=True).shape == (0, 3, 2, 2)


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


@pytest.mark.parametrize("options", ["relu", "add relu"])
def test_bfloat16_is_summed_in_single_precision(options, device):
    t, exact = (tensors((37, 16, 12, 11), device, torch.bfloat16) for _ in range(2))
    exact = {name: value.float() for name, value in exact.items()}
    names = ["x", "weight", "bias", *(["add"] if "add" in options else [])]
    for each in (t, exact):
        for name in names:
            each[name].requires_grad_()
    got, expected = fused(t, None, options), plain(exact, slice(None), options)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)
    for name in ("mean", "var"):
        torch.testing.assert_close(t[name], exact[name], rtol=1e-4, atol=1e-4)
    gradients = torch.autograd.grad(got, [t[name] for name in names], t["dy"])
    wanted = torch.autograd.grad(expected, [exact[name] for name in names], exact["dy"])
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=2e-2)


def test_one_layer_normalises_batches_of_several_sizes(device):
    whole = tensors((96, 8, 13, 11), device)
    for size in (96, 5, 64, 96):
        t = {name: value[:size] if name in ("x", "dy") else value for name, value in whole.items()}
        expected = plain(t | {"mean": t["mean"].clone(), "var": t["var"].clone()}, slice(size), "")
        x = t["x"] = t["x"].clone().requires_grad_()
        y = fused(t, None, "")
        whole["tickets"] = t["tickets"]
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        first, second = (torch.autograd.grad(y, x, t["dy"], retain_graph=True) for _ in range(2))
        assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(6, 5), (3, 70, 3, 3), (64, 8, 13, 11)], ids=["vectors", "channels", "parts"])
def test_no_gradient_passes_where_the_result_is_not_positive(shape, dtype, device):
    t = tensors(shape, device, dtype)
    t["weight"][:2] *= 1e-7  # results that float16 rounds to zero
    t["bias"][:2] = 0
    t["add"][:, :2] = 0
    t["x"][0, 2] = torch.nan
    t["add"].requires_grad_()
    y = fused(t, None, "add relu")
    (d_add,) = torch.autograd.grad(y, t["add"], t["dy"])
    assert torch.equal(d_add, torch.where(y > 0, t["dy"], 0))
    assert y[:, 2].isnan().all() and 0 < (y > 0).float().mean() < 1


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 5), (64, 70, 13, 11), (64, 512, 7, 7)], ids=["vectors", "channels", "wide"])
def test_a_captured_step_gives_what_an_eager_one_gives(shape, dtype):
    device = torch.device("cuda")
    eager, captured = tensors(shape, device, dtype), tensors(shape, device, dtype)
    rows = torch.arange(shape[0], device=device) % 3 != 1
    count = rows.sum(dtype=torch.float32)

    def step(t):
        t["x"].requires_grad_()
        y = normalise(t, rows, count, torch.zeros((), dtype=torch.int64, device=device), "keep add relu")
        return y, *torch.autograd.grad(y, [t["x"]], t["dy"])

    expected = [step(eager) for _ in range(4)][-1]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(captured)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(captured)
    for _ in range(3):
        graph.replay()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    for name in ("mean", "var"):
        assert torch.equal(captured[name], eager[name])
