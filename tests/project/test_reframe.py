"""Digits with another frame: which pixels stay, and that results can tell."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from data.made_images import encode
from helpers import load_tool
from ratp.data.formats.canonical import origin
from ratp.errors import RatpError

tool = load_tool("reframe")

SIZES = {"mnist": (28, 28), "mnist_m": (32, 32, 3), "svhn": (32, 32, 3), "syn": (32, 32, 3), "usps": (16, 16)}


@pytest.fixture
def data(tmp_path):
    """A data folder with one picture a domain."""
    rng = np.random.default_rng(0)
    for name, shape in SIZES.items():
        path = tmp_path / "data" / "digits" / f"{name}.zip"
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(
                f"{name}/7/00000.png", encode(Image.fromarray(rng.integers(1, 256, shape, dtype=np.uint8)), "PNG")
            )
    return tmp_path / "data"


def picture(path):
    with zipfile.ZipFile(path) as archive:
        (name,) = archive.namelist()
        return np.asarray(Image.open(io.BytesIO(archive.read(name)))), name


def test_reframed_domains(tmp_path, data):
    tool.reframe(data, tmp_path / "out")
    output, given = tmp_path / "out" / "digits", data / "digits"
    middle, name = picture(output / "mnist_m.zip")
    assert name == "mnist_m/7/00000.png"
    assert (middle == picture(given / "mnist_m.zip")[0][2:30, 2:30]).all()
    framed, _ = picture(output / "usps.zip")
    assert framed.shape == (32, 32)
    assert not framed[:2].any()
    assert not framed[:, 30:].any()
    assert framed[2:30, 2:30].mean() > 60
    assert [origin(output / f"{name}.zip") for name in ("mnist_m", "usps", "svhn")] == [
        "rebuilt: mnist_m without margin 1, seed 0",
        "rebuilt: usps with margin 1, seed 0",
        None,
    ]
    for name in ("mnist", "svhn", "syn"):
        assert (output / f"{name}.zip").resolve() == (given / f"{name}.zip").resolve()


def test_missing_domain_is_named_and_nothing_written(tmp_path, data):
    (data / "digits" / "usps.zip").unlink()
    with pytest.raises(RatpError, match="domain usps of digits is not in"):
        tool.reframe(data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
