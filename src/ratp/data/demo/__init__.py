"""The embedded stream: 32x32 digits in four styles, generated in seconds from files of the dependencies.

* ``scan``: the 1,797 handwritten digits of scikit-learn, white ink on black.
* ``photo``: the difference between the same handwriting and a photograph, as in MNIST-M.
* ``font``: printed digits in random colours among their neighbours, similar to SYN digits.
* ``street``: house numbers on walls and plates, in bad light and with a bad camera.

No scan is used both in the training part of one domain and in the test part of another: the scans are
split once, and an image is held out if its scan is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from functools import cache as remember
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from ratp.data.cache.folder import cache_folder, cached_domain
from ratp.data.demo.drawing import SIZE, Bytes, Floats, faces, font_image, heavy
from ratp.data.demo.street import street_image
from ratp.data.domain import LabelledDomain
from ratp.errors import RatpError, unknown

if TYPE_CHECKING:
    from PIL import Image

DOMAINS = ("scan", "photo", "font", "street")
CLASSES: tuple[str, ...] = tuple("0123456789")

# The images depend on the code that draws them and on these libraries.
_DRAWING = ("__init__.py", "drawing.py", "street.py")
_LIBRARIES = ("matplotlib", "numpy", "pillow", "scikit-learn")
_TRAIN_PER_CLASS = 180
_TEST_PER_CLASS = 60
_HELD_OUT_SCANS = 0.25
_SCAN_SIDE = 26

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def demo_domain(code: str, cache: Path | None = None) -> LabelledDomain:
    """Returns a domain of the demo, from the cache if possible; otherwise builds and caches it."""
    _check(code, DOMAINS)
    folder = (cache_folder() if cache is None else cache) / "demo"
    return cached_domain(folder, f"{code}-{_recipe_key()}", _BUILDERS[code])


def scan_ids(code: str) -> Ints:
    """Returns, for every image of ``scan`` or ``photo`` in order, the index of its scan."""
    _check(code, _SCAN_PLANS)
    return _SCAN_PLANS[code]()


def _check(code: str, valid: Collection[str]) -> None:
    if code not in valid:
        raise RatpError(unknown("demo domain", code, valid))


@remember
def _recipe_key() -> str:
    digest = hashlib.sha256("\n".join(f"{library} {version(library)}" for library in _LIBRARIES).encode())
    for name in _DRAWING:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def _rng(purpose: str) -> Generator:
    """Returns the generator for one purpose, so that no domain depends on which others were built before it."""
    return np.random.default_rng([2023, *purpose.encode()])


def _domain(code: str, images: Bytes, labels: Ints, held_out: Bools) -> LabelledDomain:
    return LabelledDomain(
        code,
        torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))),
        torch.from_numpy(labels),
        CLASSES,
        torch.from_numpy(held_out),
    )


# --- handwriting


@remember
def _digits() -> tuple[Floats, Ints]:
    """Returns the scans, of shape (1797, 8, 8) in 0..1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images / 16, data.target.astype(np.int64)


@remember
def _held_out_scans() -> Bools:
    """Selects the scans for testing: a quarter of every class."""
    _, labels = _digits()
    rng = _rng("held-out scans")
    held_out = np.zeros(len(labels), dtype=np.bool_)
    for label in range(len(CLASSES)):
        members = rng.permutation(np.flatnonzero(labels == label))
        held_out[members[: round(len(members) * _HELD_OUT_SCANS)]] = True
    return held_out


def _inked(scan: Floats) -> Floats:
    """Returns the scan at the size of an image, of shape (32, 32) in 0..1: enlarged smoothly, with sharper edges."""
    from PIL import Image

    large = Image.fromarray(scan.astype(np.float32)).resize((_SCAN_SIDE, _SCAN_SIDE), Image.Resampling.BICUBIC)
    ink = np.clip((np.asarray(large, dtype=np.float64) - 0.25) / 0.55, 0, 1)
    return np.pad(ink, (SIZE - _SCAN_SIDE) // 2)


def _scan_plan() -> Ints:
    return _rng("scan").permutation(len(_digits()[1]))


def _build_scan() -> LabelledDomain:
    scans, labels = _digits()
    order = _scan_plan()
    ink = np.stack([_inked(scans[k]) for k in order])
    images = np.repeat(np.rint(255 * ink).astype(np.uint8)[:, :, :, None], 3, axis=3)
    return _domain("scan", images, labels[order], _held_out_scans()[order])


def _photo_plan() -> Ints:
    """Cycles through the scans of each class, training and test scans apart, until there are enough; shuffled."""
    _, labels = _digits()
    held_out = _held_out_scans()
    rng = _rng("photo plan")
    chosen = [
        np.resize(rng.permutation(np.flatnonzero((labels == label) & (held_out == test))), count)
        for label in range(len(CLASSES))
        for test, count in ((False, _TRAIN_PER_CLASS), (True, _TEST_PER_CLASS))
    ]
    return rng.permutation(np.concatenate(chosen))


def _build_photo() -> LabelledDomain:
    from PIL import Image
    from sklearn.datasets import load_sample_images

    scans, labels = _digits()
    order = _photo_plan()
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    rng = _rng("photo")
    images = np.stack(
        [np.abs(_crop(rng, photographs) - np.rint(255 * _inked(scans[k]))[:, :, None]).astype(np.uint8) for k in order]
    )
    return _domain("photo", images, labels[order], _held_out_scans()[order])


def _crop(rng: Generator, photographs: list[Image.Image]) -> Floats:
    """Cuts a random piece out of a photograph, repeatedly until its negative differs enough from it."""
    from PIL import Image

    while True:
        photograph = photographs[rng.integers(len(photographs))]
        side = int(rng.integers(SIZE, 160))
        left = int(rng.integers(photograph.width - side + 1))
        top = int(rng.integers(photograph.height - side + 1))
        box = (left, top, left + side, top + side)
        piece = np.asarray(photograph.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box), dtype=np.float64)
        if np.abs(255 - 2 * piece).mean() > 80:
            return piece[:, ::-1] if rng.random() < 0.5 else piece


# --- print


def _build_drawn(code: str, draw: Callable[[Generator, int], Bytes]) -> LabelledDomain:
    """Draws the same number of images for every class; the test part is chosen before anything is drawn."""
    rng = _rng(code)
    per_class = np.arange(_TRAIN_PER_CLASS + _TEST_PER_CLASS) >= _TRAIN_PER_CLASS
    labels = np.repeat(np.arange(len(CLASSES), dtype=np.int64), len(per_class))
    held_out = np.tile(per_class, len(CLASSES))
    order = rng.permutation(len(labels))
    images = np.stack([draw(rng, int(label)) for label in labels[order]])
    return _domain(code, images, labels[order], held_out[order])


def _build_font() -> LabelledDomain:
    typefaces = faces()
    return _build_drawn("font", lambda rng, digit: font_image(rng, typefaces, digit))


def _build_street() -> LabelledDomain:
    typefaces = heavy(faces())
    return _build_drawn("street", lambda rng, digit: street_image(rng, typefaces, digit))


_BUILDERS: dict[str, Callable[[], LabelledDomain]] = {
    "scan": _build_scan,
    "photo": _build_photo,
    "font": _build_font,
    "street": _build_street,
}
_SCAN_PLANS: dict[str, Callable[[], Ints]] = {"scan": _scan_plan, "photo": _photo_plan}
