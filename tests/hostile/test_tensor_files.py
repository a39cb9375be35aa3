"""Files that are called safetensors: headers that lie, numbers that are none, tensors of something else."""

from __future__ import annotations

import json
import pickle
import struct
import warnings
from pathlib import Path

import pytest
import torch

from helpers import ratp, slow
from ratp._core.files import FEATURES, read_tensors, write_tensors
from ratp.errors import RatpError
from ratp.reports.page import PictureWarning

ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def pack(header, data=b"\0" * 8, length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**changes) -> bytes:
    return pack({"a": {**ONE["a"], **changes}})


def about(text: str) -> bytes:
    return pack({"__metadata__": {"about": text}, **ONE})


REFUSED = {
    "a header of 2^63 bytes": pack(ONE, length=2**63),
    "a header of 2^64 - 1 bytes": pack(ONE, length=2**64 - 1),
    "a header longer than the file": pack(ONE, length=10**7),
    "a header cut short": pack(ONE)[:30],
    "offsets out of range": one(data_offsets=[0, 800]),
    "offsets turned around": one(data_offsets=[8, 0]),
    "offsets below zero": one(data_offsets=[-8, 0]),
    "two tensors at one place": pack({**ONE, "b": ONE["a"]}),
    "tensors that overlap": pack({**ONE, "b": {**ONE["a"], "data_offsets": [4, 12]}}, b"\0" * 12),
    "a shape below zero": one(shape=[-2]),
    "a shape beyond all memory": one(shape=[2**62, 4]),
    "a shape that does not fit": one(shape=[3]),
    "a shape of fractions": one(shape=[2.0]),
    "objects": one(dtype="OBJECT"),
    "a name twice": pack(b'{"a":%s,"a":%s}' % ((json.dumps(ONE["a"]).encode(),) * 2), b"\0" * 16),
    "data nobody speaks of": pack(ONE, b"\0" * 800),
    "a header nested without end": pack(b'{"__metadata__":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    "metadata nested without end": about("[" * 100_000),
    "metadata that are no JSON": about("<html>"),
    "another's hash": about('{"sha256": 1}'),
    "a pickle": pickle.dumps({"a": [1.0]}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_lying_header_is_refused(what, here, assert_error):
    (here / "in.safetensors").write_bytes(REFUSED[what])
    assert_error("run", "--weights", "in.safetensors", "--device", "cpu", expected=["in.safetensors"])
    assert_error("import-weights", "in.safetensors", "out.safetensors", expected=["in.safetensors"])
    with pytest.raises(RatpError, match=r"in\.safetensors"):
        read_tensors(Path("in.safetensors"))


@pytest.mark.parametrize(
    "data",
    [
        one(dtype="U8", shape=[8]),
        pack({"a": {"dtype": "F32", "shape": [2**62, 0], "data_offsets": [0, 0]}}, b""),
        slow(
            pack(
                {f"../../{k}\x1b[31m": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for k in range(9000)}, b""
            )
        ),
        pack({"a": {"dtype": "U8", "shape": [1] * 3000, "data_offsets": [0, 1]}}, b"\0"),
        about('{"schema": 1' + ', "a": {"b": 1}' * 1000 + "}"),
        about('{"schema": ' + "9" * 1000 + "}"),
    ],
    ids=["bytes", "nothing of 2^62", "nine thousand", "three thousand axes", "much to say", "a version without end"],
)
def test_foreign_file_is_refused_by_its_contents(data, here, assert_error):
    (here / "in.safetensors").write_bytes(data)
    assert_error("run", "--weights", "in.safetensors", "--device", "cpu", expected=["in.safetensors"])
    assert_error("import-weights", "in.safetensors", "out.safetensors", expected=["in.safetensors"])


@pytest.mark.filterwarnings("ignore::ratp.networks.weights.PartWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_state(value, run):
    """It was not this run that wrote it, for that one refuses to; its hash is right all the same."""
    tensors, metadata = read_tensors(run / "weights.safetensors")
    spoilt = {name: torch.full_like(tensor, value) for name, tensor in tensors.items() if tensor.is_floating_point()}
    write_tensors(Path("in.safetensors"), {**tensors, **spoilt}, metadata)
    options = ["--set", "network.width=0.03", "--set", "network.hidden=8", "--set", "network.dim=4"]
    result = ratp("run", "--weights", "in.safetensors", "--device", "cpu", "--method", "source-only", *options)
    assert (result.code, result.out) == (2, "")
    assert "NaN or infinities" in result.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "tensors",
    [
        {"original": torch.zeros(4, 3, 8, 8, dtype=torch.uint8), "\x1b[31m<b>": torch.zeros(3)},
        {"original": torch.zeros(0, 3, 8, 8, dtype=torch.uint8)},
        {"original": torch.full((2, 3, 8, 8), float("nan"))},
        {"original": torch.zeros(2, 3, 0, 8)},
        {"original": torch.zeros(1, dtype=torch.complex64)},
        {"original": torch.tensor(1.0)},
        {},
    ],
)
def test_invalid_samples(tensors, run):
    write_tensors(run / "samples.safetensors", tensors)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = ratp("report", "run", "--quiet")
    assert result.code == 0, result  # a report goes without
    assert [w.category for w in warned if "samples.safetensors" in str(w.message)] == [PictureWarning] * len(warned)
    assert "\x1b" not in result.err


GOOD = {"embedding": torch.randn(8, 4), "labels": torch.zeros(8, dtype=torch.long), "domains": torch.zeros(8).long()}
SAID = {"domains": ["ink", "mud", "fog"], "classes": ["north", "south"], "stage": 0}


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({"embedding": torch.full((8, 4), float("nan"))}, {}),
        slow({"embedding": torch.full((8, 4), float("inf"))}, {}),
        ({"embedding": torch.zeros(8)}, {}),
        slow({"embedding": torch.zeros(8, 0)}, {}),
        ({"labels": torch.full((8,), -(2**60))}, {}),
        ({"labels": torch.zeros(3).long()}, {}),
        slow({"labels": torch.full((8,), float("nan"))}, {}),
        ({}, {"stage": 2.5}),
        slow({}, {"stage": "0"}),
        ({}, {"domains": {"ink": 1}}),
        slow({}, {"domains": [1, None, []]}),
        ({}, {"classes": "north"}),
        slow({}, {"classes": [{}, [[]]]}),
        ({}, {"schema": 9}),
    ],
)
def test_invalid_embeddings(tensors, metadata, run):
    for stage in range(3):
        write_tensors(
            run / f"features-{stage}.safetensors", GOOD | tensors, FEATURES.marked(SAID | metadata) | metadata
        )
    with pytest.warns(PictureWarning, match=r"a picture is left out: .*features-0\.safetensors"):
        result = ratp("report", "run", "--quiet")
    assert result.code == 0, result
