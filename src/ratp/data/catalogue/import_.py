"""Imports domains from published files, folders and zips of images.

What a file is, its content says; its name only helps where content leaves a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace as replaced
from pathlib import Path

from ratp.data.catalogue import DIGITS, data_set
from ratp.data.decode.pixels import BadImage
from ratp.data.formats.arrays import Array, array_pictures, read_libsvm, read_npz
from ratp.data.formats.canonical import (
    ImportReport,
    OnBadImage,
    Progress,
    check_name,
    free_path,
    provenance,
    write_domain,
)
from ratp.data.formats.frames import DIGITS_FIVE, Frame, reframed
from ratp.data.formats.idx import idx_pairs
from ratp.data.formats.layouts import Place, by_folder, by_list, lists_in
from ratp.data.formats.matlab import read_hdf5, read_mat
from ratp.data.formats.pictures import Pictures, distinct, joined, selected, thinned
from ratp.data.formats.recognition import read_list, recognised
from ratp.errors import RatpError

__all__ = ["ImportReport", "import_domain"]

_DIGIT_DOMAINS = frozenset(data_set("digits").domains)
_ARRAYS: dict[str, Callable[[Path], list[tuple[Array, Array]]]] = {
    "mat": read_mat,
    "hdf5": read_hdf5,
    "npz": read_npz,
    "libsvm": read_libsvm,
}


def import_domain(
    name: str,
    inputs: Sequence[Path],
    out: Path,
    progress: Progress | None = None,
    *,
    classes: Collection[str] | None = None,
    at_most: int | None = None,
    frame: Frame | None = None,
    on_bad_image: OnBadImage = "stop",
    replace: bool = False,
    expected: int | None = None,
) -> ImportReport:
    """Writes ``out/NAME.zip`` from files and folders.

    Reads idx files (MNIST), MATLAB files (SVHN, SYN, MNIST-M, Digits-Five), libsvm text and HDF5 (USPS), npz files,
    folders and zips with one folder per class, alone or below folders of domains (PACS, DomainNet), and folders with a
    list of labels (MNIST-M). Numbers the images in the order of the inputs. Keeps only ``classes``, and ``at_most`` so
    many images: a random choice, always the same one. Images with their original frame get ``frame``. ``expected`` is
    the number of images in the inputs, if known. If anything is wrong, nothing is written.
    """
    check_name("domain", name)
    if not inputs:
        raise RatpError(f"nothing to import for {name!r}: give the files or the folder it is made from.")
    free_path(out, name, replace=replace)
    pictures = _pictures(name, [found for path in inputs for found in recognised(path)])
    if classes is not None:
        pictures = selected(pictures, classes)
    _check_digits(name, pictures)
    if expected is not None and len(pictures) != expected:
        raise RatpError(f"{name!r} should have {expected:,} images, found {len(pictures):,}: is part of it missing?")
    if at_most is not None:
        pictures = thinned(pictures, at_most)
    made = next((made for made in map(provenance, inputs) if made), {})
    if frame is not None and _is_original(pictures, frame):
        pictures = replaced(reframed(pictures, frame), notes=(*pictures.notes, f"{name}: {frame.describe()}."))
        made = {**made, "frame": DIGITS_FIVE}
    return write_domain(
        name, pictures, out, provenance=made, replace=replace, on_bad_image=on_bad_image, progress=progress
    )


def _is_original(pictures: Pictures, frame: Frame) -> bool:
    """Returns whether the first readable picture has its original frame."""
    for position in range(len(pictures)):
        try:
            return frame.is_original(pictures.read(position))
        except BadImage:
            continue
    return False


def _pictures(name: str, inputs: Sequence[tuple[str, Path]]) -> Pictures:
    def of_kind(kind: str) -> list[Path]:
        return [path for found, path in inputs if found == kind]

    arrays = [(path, images, labels) for path, images, labels in idx_pairs(of_kind("idx"))]
    arrays += [(path, *pair) for kind, path in inputs if kind in _ARRAYS for pair in _ARRAYS[kind](path)]
    parts = [array_pictures(images, labels, str(path)) for path, images, labels in arrays]
    lists = [read_list(path) for path in of_kind("list")]
    roots = of_kind("folder") + of_kind("zip") or list(dict.fromkeys(path.parent for path in of_kind("list")))
    places = [Place.at(root) for root in roots]
    lists = lists or [labels for place in places for labels in lists_in(place)]
    if lists:
        return joined([*parts, *(by_list(labels, places) for labels in lists)])
    archives = [by_folder(name, place) for place in places]
    return joined([*parts, *distinct(archives, [str(place.root) for place in places])])


def _check_digits(name: str, pictures: Pictures) -> None:
    others = sorted(set(pictures.classes) - set(DIGITS))
    if name in _DIGIT_DOMAINS and others:
        raise RatpError(
            f"{name!r} has the classes 0..9, found {', '.join(others[:10])}. "
            "Give the right files, or import them under another name."
        )
