"""Pickles that would run code when read: under any file name, none of it runs."""

from __future__ import annotations

import io
import os
import pickle
import zipfile

import pytest
import torch

from helpers import ratp, slow
from ratp._core.files import read_tensors
from ratp.errors import RatpError


class Hostile:
    """Leaves a file behind when it is read."""

    def __init__(self, where):
        self.where = where

    def __reduce__(self):
        return os.system, (f"touch '{self.where}'",)


def save_pickle(data, **options) -> bytes:
    file = io.BytesIO()
    torch.save(data, file, **options)
    return file.getvalue()


def make_zip(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/"), data)
    return file.getvalue()


KINDS = {
    "a bare pickle": pickle.dumps,
    "the first kind of pickle": lambda data: pickle.dumps(data, 0),
    "torch's": save_pickle,
    "torch's of old": lambda data: save_pickle(data, _use_new_zipfile_serialization=False),
    "hidden among tensors": lambda data: save_pickle({"a": torch.zeros(2), "optimizer": {"state": data}}),
    "a zip of pickles": lambda data: make_zip(archive__data=pickle.dumps(data), archive__version=b"3\n"),
    "a zip that names itself torch's": lambda data: make_zip(**{"archive__data.pkl": pickle.dumps(data)}),
}
NAMES = ("in.safetensors", "in.pth", "in.pt", "in.bin", "in.ckpt", "in.pkl", "in", "in.SAFETENSORS")


@pytest.mark.parametrize("name", [slow(name, unless=name in NAMES[:3]) for name in NAMES])
@pytest.mark.parametrize("kind", KINDS)
def test_pickle_is_never_run(kind, name, here, assert_error, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # by which users tell torch to trust everything
    (here / name).write_bytes(KINDS[kind](Hostile(here / "was-run")))
    assert_error("import-weights", name, "out.safetensors")
    assert_error("run", "--weights", f"./{name}", "--device", "cpu")
    assert sorted(os.listdir()) == [name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["weights.safetensors", "samples.safetensors", "state.safetensors"])
def test_pickle_in_a_run_is_never_run(kind, name, here, run):
    (run / name).write_bytes(KINDS[kind](Hostile(here / "was-run")))
    with pytest.raises(RatpError, match=name):
        read_tensors(run / name)
    assert not (here / "was-run").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["in.npz", "in.mat", "in.h5", "in.zip", "in.gz", "in.pkl"])
def test_pickle_as_data_is_never_run(kind, name, here):
    (here / name).write_bytes(KINDS[kind](Hostile(here / "was-run")))
    result = ratp("data", "import", "mnist", name, "--data", "data")
    assert result.code != 0, result
    assert "Traceback" not in result.err
    assert sorted(os.listdir()) == [name]


def test_pickle_would_run_if_loaded(here):
    """Or the other tests would prove nothing."""
    pickle.loads(KINDS["a bare pickle"](Hostile(here / "was-run")))
    assert (here / "was-run").exists()
