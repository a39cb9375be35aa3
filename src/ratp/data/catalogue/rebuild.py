"""Two digit sets that have no reliable home, rebuilt after their published recipes.

* ``mnist_m`` (Ganin and Lempitsky, 2015): every digit of MNIST on a random patch of a photograph, pixel by pixel
  and channel by channel the absolute difference |patch − digit|. In the images its authors released, the digit
  lies unscaled in the middle of 32×32 pixels, and every pixel with any ink counts as white.
* ``syn`` (same authors): printed numbers of one to three digits, the middle one being the label, in varying fonts,
  positions, orientations, colours and blur, 32×32. The amounts follow a set calibrated against genuine tiles.

A rebuilt set is not the original one: :func:`origin` tells them apart, and results must say so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ratp.data.decode.decode import decode, decode_picture
from ratp.data.decode.pixels import BadImage
from ratp.data.demo.drawing import SIZE, TALL, Bytes, Face, Floats, Row, View, faces, halved, load_face, mixed, to_bytes
from ratp.data.formats.arrays import array_pictures
from ratp.data.formats.canonical import ImportReport, Progress, free_path, origin, provenance, write_domain
from ratp.data.formats.layouts import Place, by_folder
from ratp.data.formats.pictures import Pictures, array_png
from ratp.data.read.listing import is_image_name
from ratp.errors import RatpError

if TYPE_CHECKING:
    from ratp.data.domain import LabelledDomain

__all__ = ["SIZE", "build_mnist_m", "build_syn", "origin", "provenance"]

Ints = NDArray[np.int64]

_MNIST_M, _SYN = "mnist_m 1", "syn 2"  # the recipes; one more for every change that changes an image
_AT_ONCE = 4096
_FONT_ENDINGS = frozenset({".ttf", ".otf", ".ttc"})
_FIGURES = "0123456789"
_NEIGHBOURS = (0.2, 0.62, 0.18)  # how many numbers have one, two and three figures
_ODD = ("DejaVuSansMono", "cmti")  # with a dotted zero; with curls


def build_mnist_m(
    mnist: LabelledDomain | Path,
    photographs: Sequence[Path] | None,
    out: Path,
    seed: int,
    count: int | None = None,
    progress: Progress | None = None,
    *,
    size: int | None = None,
    solid: bool = True,
    replace: bool = False,
) -> ImportReport:
    """Writes ``out/mnist_m.zip``, made from MNIST and photographs.

    Without photographs (files or folders; the original used BSDS500), the two sample photographs of scikit-learn serve.
    ``count`` uses a random choice of the digits. ``solid`` turns any ink white, as in the released images; otherwise,
    as in the formula, grey ink makes half a difference. ``size`` is the side of the images: by default the digits' own,
    as in Digits-Five; the original release has 32.
    """
    free_path(out, "mnist_m", replace=replace)
    rng = np.random.default_rng([_checked(seed), *b"mnist_m"])
    digits, labels = _digits(rng, mnist, count)
    size = size or max(digits.shape[1:3])
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


def _digits(rng: Generator, mnist: LabelledDomain | Path, count: int | None) -> tuple[Bytes, Ints]:
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
    """Photographs at least as large as a patch."""

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
    count: int = 34_000,
    progress: Progress | None = None,
    *,
    fonts: Path | None = None,
    replace: bool = False,
) -> ImportReport:
    """Writes ``out/syn.zip``, rendered digits, equally many per class.

    With one seed, the images of a smaller set are the first ones of a larger set. ``fonts`` is a folder of fonts to use
    besides the 16 common ones that matplotlib ships.
    """
    if count < 1:
        raise RatpError(f"expected a positive number of images, found {count}.")
    further, notes = ([], ()) if fonts is None else further_faces(fonts)
    typefaces = [*common_faces(), *further]
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


def syn_image(rng: Generator, typefaces: Sequence[Face], digit: int) -> Bytes:
    """A number of one to three figures in flat colours, the digit in its middle."""
    from PIL import ImageFilter

    row = _number(rng, typefaces[int(rng.integers(len(typefaces)))], digit)
    view = View(
        height=float(np.clip(rng.normal(23.6, 3.4), 14, 36)),
        turn=rng.normal(0, 0.125),
        slant=rng.normal(0, 0.09),
        stretch=rng.normal(0.98, 0.06),
        shift=(float(np.clip(rng.normal(0.3, 2.6), -5, 5)), rng.normal(-0.4, 2)),
    )
    # at times bolder; never quite sharp, at times very blurred
    bolder = row.image.filter(ImageFilter.MaxFilter(int(rng.choice([1, 3]))))
    blur = 1.1 + 3.3 * rng.uniform() ** 1.4
    mask = view.project(bolder, row.middle).filter(ImageFilter.GaussianBlur(blur))
    paper, ink = _colours(rng)
    return to_bytes(mixed(paper, ink, halved(mask)))


def _number(rng: Generator, face: Face, digit: int) -> Row:
    """The digit alone, with a neighbour on one side, mostly, or with two."""
    from PIL import Image

    glyph = face.glyphs[digit]
    count = int(rng.choice(3, p=_NEIGHBOURS))
    sides = [True, True] if count == 2 else [count == 1, False]
    reach = 3 * TALL  # room for a neighbour
    image = Image.new("L", (glyph.width + 2 * reach, 2 * TALL))
    for right, there in enumerate(rng.permutation(sides)):
        beside = face.glyphs[int(rng.integers(10))]
        gap = rng.uniform(0.03, 0.23) * TALL
        if there:
            left = reach + glyph.width + gap if right else reach - gap - beside.width
            image.paste(beside, (round(left), (image.height - beside.height) // 2))
    image.paste(glyph, (reach, (image.height - glyph.height) // 2))
    return Row(image, (image.width / 2, image.height / 2), glyph.width)


def _colours(rng: Generator) -> tuple[Floats, Floats]:
    """Paper and ink, one dark and one light.

    Ink goes beyond black or white half of the time: its strokes are then cut off to pure black or white when the image
    is rounded to bytes, and only their blurred rims show the tint.
    """
    beyond = rng.normal(0, 1)
    if rng.random() < 0.52:
        return _tinted(rng, abs(rng.normal(0, 45))), _tinted(rng, 255 + max(34 + 66 * beyond, -100))
    return _tinted(rng, 255 - abs(rng.normal(0, 45))), _tinted(rng, -max(14 + 60 * beyond, -100))


def _tinted(rng: Generator, value: float) -> Floats:
    """A colour of any hue with this value in its strongest channel: mostly muted, at times strong."""
    saturation = 0 if rng.random() < 0.05 else min(rng.exponential(0.16), 0.6)
    return value * (1 - saturation * rng.permutation([0, rng.uniform(), 1]))


def common_faces() -> list[Face]:
    """The fonts that matplotlib ships, without those whose figures look odd."""
    return [face for face in faces() if not face.name.startswith(_ODD)]


def further_faces(folder: Path) -> tuple[list[Face], tuple[str, ...]]:
    """The fonts in a folder that write all ten figures, and notes on those that do not."""
    found, notes = [], []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _FONT_ENDINGS:
            if writes_figures(path):
                found.append(load_face(path))
            else:
                notes.append(f"Font left out: {path} does not write the ten figures.")
    if not found:
        raise RatpError(f"no font that writes the ten figures in {folder}: expected .ttf, .otf or .ttc files.")
    return found, tuple(notes)


def writes_figures(path: Path) -> bool:
    """Whether the font has a glyph of its own for every figure."""
    from matplotlib.ft2font import FT2Font
    from PIL import ImageFont

    try:
        mapped = FT2Font(str(path))
        font = ImageFont.truetype(path, 32, layout_engine=ImageFont.Layout.BASIC)
        glyphs = {bytes(font.getmask(figure)) for figure in _FIGURES}
        return all(mapped.get_char_index(ord(figure)) for figure in _FIGURES) and len(glyphs - {b""}) == len(_FIGURES)
    except Exception:  # a font is a program written by others; one that fails is no font for us
        return False
