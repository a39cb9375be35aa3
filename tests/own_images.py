"""A user's own images: small real files in class folders, flat folders and zips, and runs on them."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from helpers import CLASSES, CORNERS, TINY_OPTIONS, Outcome, ratp

DTN = ["--set", "network.backbone=dtn"]
OPTIONS = [*DTN, *TINY_OPTIONS, "--device", "cpu"]
KINDS = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}


def make_picture(label: int, seed: int, side: int = 32) -> Image.Image:
    """Noise with a bright quarter that shows the class."""
    pixels = np.random.default_rng(seed).integers(0, 120, (side, side, 3))
    y, x = (corner * side // 32 for corner in CORNERS[label % 4])
    pixels[y : y + side // 2, x : x + side // 2] += 110
    return Image.fromarray(pixels.astype(np.uint8))


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def image_files(
    classes: Sequence[str] = CLASSES, count: int = 3, *, seed: int = 0, ending: str = "png", flat: bool = False
) -> dict[str, bytes]:
    """Image files by name: ``class/0.png``, or ``class-0.png`` if flat. Seeds give different ones."""
    known = {name: k for k, name in enumerate(CLASSES)}
    joint = "-" if flat else "/"
    return {
        f"{name}{joint}{k}.{ending}": encode(
            make_picture(known.get(name, c), 10_000 * seed + 100 * c + k), KINDS[ending]
        )
        for c, name in enumerate(classes)
        for k in range(count)
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_zip(path: Path, files: Mapping[str, bytes], inside: str = "", compression: int = zipfile.ZIP_STORED) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(inside + name, data)
    return path


def run_folders(source: object, *targets: object, out: object = "run", method: str = "source-only", more=()) -> Outcome:
    """``ratp run folders`` with a tiny network."""
    return ratp(
        *("run", "folders", "--source", source, "--targets", *targets),
        *("--out", out, "--method", method, *OPTIONS, *more),
    )


def assert_error(result: Outcome, *expected: str, out: str = "run") -> str:
    """Checks that a command failed with a message and left no run; returns the message."""
    assert (result.code, result.out) == (2, ""), result
    assert "error: " in result.err
    assert "Traceback" not in result.err
    for words in expected:
        assert words in result.err, result.err
    assert not Path(out).exists()
    return result.err


def assert_ok(result: Outcome) -> Outcome:
    assert result.code == 0, result
    assert "Traceback" not in result.err
    return result


def config_of(folder: object = "run") -> dict:
    return json.loads((Path(str(folder)) / "config.json").read_text())
