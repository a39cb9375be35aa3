"""Small image files, archives and domains for the tests of this folder."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def real_data() -> Path:
    """The folder with the real data sets: ``RATP_TEST_DATA``, or ``shared/data`` beside the checkout."""
    chosen = os.environ.get("RATP_TEST_DATA")
    folder = Path(chosen) if chosen else Path(__file__).parents[3] / "shared" / "data"
    if not chosen and not folder.is_dir():
        pytest.skip("no real data: set RATP_TEST_DATA to a folder with digits/ and pacs/")
    assert folder.is_dir(), f"RATP_TEST_DATA={chosen} is no folder"
    return folder


def pixels(height: int = 12, width: int = 20, seed: int = 0) -> np.ndarray:
    """Smooth colours, different in every quarter and for every seed."""
    y, x = np.mgrid[0:height, 0:width]
    rng = np.random.default_rng(seed)
    channels = [128 + 100 * np.sin(y / height * a + x / width * b + c) for a, b, c in rng.uniform(0.5, 3, (3, 3))]
    return np.stack(channels, axis=2).astype(np.uint8)


def make_picture(height: int = 12, width: int = 20, seed: int = 0) -> Image.Image:
    return Image.fromarray(pixels(height, width, seed))


def encode(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(seed: int = 0, height: int = 12, width: int = 20) -> bytes:
    return encode(make_picture(height, width, seed), "PNG")


def raw_png(width: int, height: int, depth: int, colour: int, rows: bytes | None, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG put together by hand; without rows it has a header only."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)), *extra]
    chunks += [] if rows is None else [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in chunks)


def closed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes folders of a name unreadable, even if root runs the tests."""
    scandir = os.scandir

    def refusing(path):
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def write_zip(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return path


def make_small_domain(classes: tuple[str, ...] = ("cat", "dog"), count: int = 3) -> dict[str, bytes]:
    """PNGs of different looks by name."""
    return {
        f"{name}/{k}.png": png(seed=100 * c + k, height=8 + k, width=10)
        for c, name in enumerate(classes)
        for k in range(count)
    }
