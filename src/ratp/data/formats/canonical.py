"""Writes domains in the form of a data folder: ``NAME.zip`` with ``NAME/class/00000.png`` in it.

Pictures that came as image files keep their bytes and endings, those that came as arrays are lossless PNG. All are
stored uncompressed, sorted by name and without times, so that the same pictures give the same bytes. The comment of
the zip says if a set was made rather than published.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ratp._core.files import replacing, writing
from ratp.data.decode.pixels import BadImage
from ratp.data.formats.pictures import Pictures
from ratp.errors import RatpError, first_lines

Progress = Callable[[int, int | None], None]
OnBadImage = Literal["stop", "skip"]

_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # the earliest a zip can express
_END, _END_BYTES = b"PK\5\6", 22  # the record that ends a zip, but for the comment
_LONGEST_END = _END_BYTES + 0xFFFF
_LONGEST_RECIPE = 40


@dataclass(frozen=True)
class ImportReport:
    """What was written: the zip, images by class, and files left out, each with the reason."""

    name: str
    path: Path
    images: Mapping[str, int]
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Number of images."""
        return sum(self.images.values())


def check_name(kind: str, name: str) -> str:
    """Returns the name if it is valid as one step of a path."""
    if not name or name.startswith(".") or any(sign in name for sign in "/\\:") or not name.isprintable():
        raise RatpError(
            f"{name!r} cannot be the name of a {kind}: it must not be empty, begin with a dot or hold / \\ :."
        )
    return name


def free_path(out: Path, name: str, *, replace: bool) -> Path:
    """Returns the path of a domain's zip."""
    path = out / f"{name}.zip"
    if path.exists() and not replace:
        raise RatpError(f"{path} exists already. Remove it first, or replace it with --replace.")
    return path


def write_domain(
    name: str,
    pictures: Pictures,
    out: Path,
    *,
    provenance: Mapping[str, Any] | None = None,
    replace: bool = False,
    on_bad_image: OnBadImage = "stop",
    expected: int | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Writes ``out/NAME.zip``, whole or not at all.

    Pictures are numbered in order; one that is left out leaves a gap. ``provenance`` says how pictures were made, if
    they were made rather than published; ``expected`` is their number, if known.
    """
    check_name("domain", name)
    for label in set(pictures.classes):
        check_name("class", label)
    if not len(pictures):
        raise RatpError(f"nothing to import for {name!r}: no image was found.")
    if expected is not None and len(pictures) != expected:
        raise RatpError(f"{name!r} should have {expected:,} images, found {len(pictures):,}: is part of it missing?")
    path = free_path(out, name, replace=replace)
    width = max(5, len(str(len(pictures) - 1)))
    members = sorted((f"{name}/{label}/{k:0{width}d}", k) for k, label in enumerate(pictures.classes))
    written: Counter[str] = Counter()
    bad = list(pictures.unreadable)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = json.dumps(dict(provenance), sort_keys=True).encode() if provenance else b""
        for done, (member, k) in enumerate(members, start=1):
            try:
                picture = pictures.read(k)
            except BadImage as problem:
                bad.append(str(problem))
            else:
                written[pictures.classes[k]] += 1
                if on_bad_image == "skip" or not bad:
                    archive.writestr(_member(member + picture.ending), picture.data)
            if progress:
                progress(done, len(members))
        _check_readable(name, bad, written, on_bad_image)
    images = {label: written[label] for label in sorted(written)}
    return ImportReport(name, path, images, pictures.notes, tuple(bad))


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _FIRST_DAY)
    info.create_system = 3  # the same bytes on every system
    info.external_attr = 0o644 << 16
    return info


def _check_readable(name: str, bad: Sequence[str], written: Counter[str], on_bad_image: OnBadImage) -> None:
    if bad and (on_bad_image == "stop" or not written):
        total = len(bad) + sum(written.values())
        raise RatpError(
            "\n".join(
                [
                    f"{len(bad):,} of {total:,} images of {name!r} cannot be read, and nothing was imported:",
                    *first_lines(bad),
                    "Repair or remove them, or leave them out with on_bad_image='skip' (--on-bad-image skip).",
                ]
            )
        )


def provenance(path: Path) -> dict[str, Any] | None:
    """Reads how a zip was made from its comment: ``{"rebuilt": True, "recipe": …, "seed": …, …}``, or None."""
    try:
        said = json.loads(_comment(path))
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and "rebuilt" in said else None


def _comment(path: Path) -> bytes:
    """Reads the comment at the end of a zip without reading its directory; empty if there is none."""
    with path.open("rb") as file:
        file.seek(-min(_LONGEST_END, file.seek(0, os.SEEK_END)), os.SEEK_END)
        end = file.read()
    start = end.rfind(_END)
    while start >= 0:
        comment = end[start + _END_BYTES :]
        if end[start + _END_BYTES - 2 : start + _END_BYTES] == len(comment).to_bytes(2, "little"):
            return comment
        start = end.rfind(_END, 0, start)
    return b""


def origin(path: Path) -> str | None:
    """Describes a domain that is not the published data, e.g. ``"rebuilt: mnist_m 1, seed 3"``; None if it is."""
    made = provenance(path)
    if made is None:
        return None
    recipe, seed = made.get("recipe"), made.get("seed")
    known = isinstance(recipe, str) and recipe.isprintable() and len(recipe) <= _LONGEST_RECIPE
    return f"rebuilt: {recipe}, seed {seed}" if known and isinstance(seed, int) else "rebuilt"


# Known copies that are not the published data, by the hash of their files.
KNOWN_COPIES: Mapping[str, str] = {
    "dd4705ae995524d653d8f39f039b72afa3b84ea132bbed4fd5811c5f196f1936": (
        "regenerated SYN: rendered after the published recipe with about 700 fonts, harder than the original"
    ),
}


def origin_of(path: Path, hash_of_files: str) -> str | None:
    """Describes a domain that is not the published data: a known copy, or rebuilt."""
    return KNOWN_COPIES.get(hash_of_files) or origin(path)
