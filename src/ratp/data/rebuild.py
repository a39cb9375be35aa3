"""Two digit sets that have no reliable home, rebuilt after their published recipes.

* ``mnist_m`` (Ganin and Lempitsky, 2015): every digit of MNIST on a random patch of a photograph, pixel by pixel
  and channel by channel the absolute difference |patch − digit|. In the images its authors released, the digit
  lies unscaled in the middle of 32×32 pixels, and every pixel with any ink counts as white.
* ``syn`` (same authors): printed numbers of one to three digits, the middle one being the label, in varying fonts,
  positions, orientations, colours and blur, 32×32.

A rebuilt set is not the original one: :func:`origin` tells them apart, and results must say so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ratp.data.decode import decode, decode_picture
from ratp.data.drawing import SIZE, Bytes, Floats, faces
from ratp.data.formats.arrays import array_pictures
from ratp.data.formats.canonical import ImportReport, Progress, free_path, origin, provenance, write_domain
from ratp.data.formats.encoding import array_png
from ratp.data.formats.layouts import Place, by_folder
from ratp.data.formats.pictures import Pictures
from ratp.data.listing import BadImage, is_image_name
from ratp.data.syn import further_faces, syn_image
from ratp.errors import RatpError

__all__ = ["Digits", "build_mnist_m", "build_syn", "origin", "provenance"]

Ints = NDArray[np.int64]

_MNIST_M, _SYN = "mnist_m 1", "syn 1"  # the recipes; one more for every change that changes an image
_AT_ONCE = 4096


class Digits(Protocol):
    """Digits in memory; a labelled domain is an example.

    Attributes:
        images: Bytes of shape (N, 3, height, width).
        labels: The digits, of shape (N,).
    """

    @property
    def images(self) -> Any:
        """Bytes of shape (N, 3, height, width)."""

    @property
    def labels(self) -> Any:
        """The digits, of shape (N,)."""


def build_mnist_m(
    mnist: Digits | Path,
    photographs: Sequence[Path] | None,
    out: Path,
    seed: int,
    count: int | None = None,
    progress: Progress | None = None,
    *,
    size: int = SIZE,
    solid: bool = True,
    replace: bool = False,
) -> ImportReport:
    """Writes ``out/mnist_m.zip``, made from MNIST and photographs.

    Args:
        mnist: The digits, or the zip they are in.
        photographs: Image files, or folders of them (BSDS500 in the original); None for the two sample
            photographs of scikit-learn.
        out: The folder to write to.
        seed: Determines the choice of digits and patches.
        count: How many digits to use, a random choice of them; all if None.
        progress: Called with the number of images so far, and of all.
        size: Side of an image; the digit lies in its middle.
        solid: Whether any ink counts as white, as in the images that were released; if not, as the formula has
            it, grey ink makes half a difference.
        replace: Whether a zip of that name may be replaced.

    Raises:
        RatpError: If there are not so many digits, no photographs, or the file cannot be written.
    """
    free_path(out, "mnist_m", replace=replace)
    rng = np.random.default_rng([_checked(seed), *b"mnist_m"])
    digits, labels = _digits(rng, mnist, count)
    if max(digits.shape[1:3]) > size:
        raise RatpError(f"digits of {digits.shape[1]}×{digits.shape[2]} pixels do not fit into {size}×{size}.")
    photos = _Photographs.found(photographs, size)
    ink = _centred(np.where(digits > 0, np.uint8(255), np.uint8(0)) if solid else digits, size)
    images = photos.blended(rng, ink)
    made = {
        "rebuilt": True,
        "recipe": _MNIST_M,
        "seed": seed,
        "count": len(images),
        "size": size,
        "solid": solid,
        "photographs": photos.origin,
        "images": hashlib.sha256(images.tobytes()).hexdigest()[:16],
    }
    pictures = array_pictures(images, labels, "mnist_m")
    pictures = Pictures(
        pictures.classes, pictures.read, ("mnist_m is rebuilt, not the original release.", *photos.notes)
    )
    return write_domain("mnist_m", pictures, out, provenance=made, replace=replace, progress=progress)


def _checked(seed: int) -> int:
    if seed < 0:
        raise RatpError(f"a seed must not be negative, found {seed}.")
    return seed


def _digits(rng: Generator, mnist: Digits | Path, count: int | None) -> tuple[Bytes, Ints]:
    """As many digits as asked for: images (N, height, width, 1 or 3), and labels."""
    if isinstance(mnist, Path):
        pictures = by_folder("mnist", Place.at(mnist))
        if not set(pictures.classes) <= set("0123456789"):
            raise RatpError(f"{mnist} holds no digits: its classes are {', '.join(sorted(set(pictures.classes)))}.")
        chosen = _choice(rng, len(pictures), count)
        grey = [np.asarray(decode_picture(pictures.read(k).data, None).image.convert("L")) for k in chosen]
        if len({image.shape for image in grey}) > 1:
            raise RatpError(f"{mnist} holds images of different sizes; MNIST has only one.")
        return np.stack(grey)[:, :, :, None], np.array([int(pictures.classes[k]) for k in chosen])
    images, labels = np.asarray(mnist.images), np.asarray(mnist.labels, dtype=np.int64)
    chosen = _choice(rng, len(images), count)
    return images[chosen].transpose(0, 2, 3, 1), labels[chosen]


def _choice(rng: Generator, available: int, count: int | None) -> Ints:
    if count is not None and not 1 <= count <= available:
        raise RatpError(f"expected a number of images from 1 to the {available:,} digits there are, found {count:,}.")
    return np.sort(rng.permutation(available)[:count])


def _centred(images: Bytes, size: int) -> Bytes:
    missing = [size - side for side in images.shape[1:3]]
    around = [(side // 2, side - side // 2) for side in missing]
    return np.pad(images, ((0, 0), *around, (0, 0)))


class _Photographs:
    """Photographs at least as large as a patch.

    Attributes:
        origin: A line on where they come from.
        notes: What is worth knowing about them.
    """

    def __init__(self, images: Sequence[Bytes | Path], origin: str, notes: tuple[str, ...]) -> None:
        self._images, self.origin, self.notes = images, origin, notes

    @staticmethod
    def found(given: Sequence[Path] | None, size: int) -> _Photographs:
        if given is None:
            from sklearn.datasets import load_sample_images

            note = "The patches are of scikit-learn's two sample photographs: less varied than the original's 500."
            return _Photographs(load_sample_images().images, "scikit-learn", (note,))
        usable, problems = [], []
        for path in _image_files(given):
            try:
                shape = _photograph(path).shape
            except BadImage as problem:
                problems.append(str(problem))
                continue
            if min(shape[:2]) < size:
                problems.append(f"{path}: {shape[1]}×{shape[0]} pixels are too few")
            else:
                usable.append(path)
        if not usable:
            where = ", ".join(map(str, given)) or "no folder"
            raise RatpError(
                "\n  ".join([f"no photograph of at least {size}×{size} pixels in {where}.", *problems[:20]])
            )
        notes = tuple(f"Photograph left out: {problem}." for problem in problems)
        return _Photographs(usable, f"{len(usable)} of the user's", notes)

    def blended(self, rng: Generator, ink: Bytes) -> Bytes:
        """For every digit the absolute difference to a random patch, one photograph after the other."""
        size = ink.shape[1]
        source = rng.integers(len(self._images), size=len(ink))
        place = rng.random((len(ink), 2))
        images = np.empty((len(ink), size, size, 3), np.uint8)
        for number, given in enumerate(self._images):
            members = np.flatnonzero(source == number)
            photograph = _photograph(given) if isinstance(given, Path) and len(members) else given
            for start in range(0, len(members), _AT_ONCE):
                some = members[start : start + _AT_ONCE]
                patches = _patches(np.asarray(photograph), place[some], size)
                # I(i, j, k) = |patch(i, j, k) - digit(i, j, k)|, without leaving bytes
                images[some] = np.maximum(patches, ink[some]) - np.minimum(patches, ink[some])
        return images


def _patches(photograph: Bytes, place: Floats, size: int) -> Bytes:
    corner = (place * (np.array(photograph.shape[:2]) - size + 1)).astype(np.int64)
    rows, columns = corner.T[:, :, None] + np.arange(size)
    return np.asarray(photograph[rows[:, :, None], columns[:, None, :]])


def _photograph(path: Path) -> Bytes:
    try:
        return decode(path.read_bytes(), None).image
    except OSError as error:
        raise BadImage(f"{path}: {error.strerror or error}") from error
    except BadImage as problem:
        raise BadImage(f"{path}: {problem}") from problem


def _image_files(given: Sequence[Path]) -> list[Path]:
    files = [file for path in given for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in files if file in given or is_image_name(file.name)]


def build_syn(
    out: Path,
    seed: int,
    count: int = 20_000,
    progress: Progress | None = None,
    *,
    fonts: Path | None = None,
    replace: bool = False,
) -> ImportReport:
    """Writes ``out/syn.zip``, rendered digits, as many of every class.

    Args:
        out: The folder to write to.
        seed: Determines every image; those of a smaller set are the first of a larger one.
        count: Number of images.
        progress: Called with the number of images so far, and of all.
        fonts: A folder with further fonts than the 21 that matplotlib brings.
        replace: Whether a zip of that name may be replaced.

    Raises:
        RatpError: If the folder has no fonts that write digits, or the file cannot be written.
    """
    if count < 1:
        raise RatpError(f"expected a positive number of images, found {count}.")
    further, notes = ([], ()) if fonts is None else further_faces(fonts)
    typefaces = [*faces(), *further]
    names = "\n".join(face.name for face in typefaces)
    made = {
        "rebuilt": True,
        "recipe": _SYN,
        "seed": _checked(seed),
        "count": count,
        "fonts": len(typefaces),
        "font_names": hashlib.sha256(names.encode()).hexdigest()[:16],
    }
    pictures = Pictures(
        [str(k % 10) for k in range(count)],
        lambda k: array_png(syn_image(np.random.default_rng([seed, k, *b"syn"]), typefaces, k % 10)),
        (f"syn is rebuilt with {len(typefaces)} fonts, not the original release.", *notes),
    )
    return write_domain("syn", pictures, out, provenance=made, replace=replace, progress=progress)
