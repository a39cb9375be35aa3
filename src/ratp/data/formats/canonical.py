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
from ratp.data.cache.manifest import Manifest
from ratp.data.decode.pixels import BadImage
from ratp.data.formats.frames import Frame
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
    progress: Progress | None = None,
) -> ImportReport:
    """Writes ``out/NAME.zip``, whole or not at all.

    Pictures are numbered in order; one that is left out leaves a gap. ``provenance`` says what was done to published
    pictures, or how they were made.
    """
    check_name("domain", name)
    for label in set(pictures.classes):
        check_name("class", label)
    if not len(pictures):
        raise RatpError(f"nothing to import for {name!r}: no image was found.")
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
    """Reads from a zip's comment how it was made: ``{"rebuilt": True, "recipe": …}``, ``{"frame": …}``, or None."""
    try:
        said = json.loads(_comment(path))
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and said.keys() & {"rebuilt", "frame"} else None


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
    """Describes a domain that was rebuilt, with recipe and seed; None if it is the published data."""
    made = provenance(path)
    if made is None or "rebuilt" not in made:
        return None
    recipe, seed = made.get("recipe"), made.get("seed")
    known = isinstance(recipe, str) and recipe.isprintable() and len(recipe) <= _LONGEST_RECIPE
    how = f": {recipe}, seed {seed}" if known and isinstance(seed, int) else ""
    return f"rebuilt, not the published data{how}"


# Known copies that are not the published data, by the hash of their manifest or of their images alone.
_REGENERATED = "regenerated SYN, not the published data: rendered after the published recipe"
KNOWN_COPIES: Mapping[str, str] = {
    "dd4705ae995524d653d8f39f039b72afa3b84ea132bbed4fd5811c5f196f1936": f"{_REGENERATED}, harder than the original",
    "6d9831c9b083776c842c0ed9f769d6ba13d2fd585ef40cc87bd22f45a1c29662": (
        f"{_REGENERATED}, calibrated with the original's published figures"
    ),
}


def origin_of(path: Path, manifest: Manifest, frame: Frame | None = None) -> str | None:
    """Describes how a domain differs from the published data: a known copy, rebuilt, or framed in one way or another.

    ``frame`` is how Digits-Five frames the domain, if not as it was first released.
    """
    known = KNOWN_COPIES.get(manifest.hash) or KNOWN_COPIES.get(manifest.content)
    about = [known or origin(path), frame.describe_images(provenance(path), manifest) if frame else None]
    return "; ".join(text for text in about if text) or None
