"""The form in which a domain lies in a data folder: ``NAME.zip`` with ``NAME/class/00000.png`` in it.

Pictures that came as image files keep their bytes and endings, those that came as arrays are lossless PNG. All are
stored as they are, sorted by name and without times, so that the same pictures give the same bytes. A set that
was not published but made says so in the comment of its zip.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ratp.data.formats.pictures import Pictures
from ratp.data.listing import BadImage
from ratp.errors import RatpError

Progress = Callable[[int, int | None], None]
OnBadImage = Literal["stop", "skip"]

_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # the earliest a zip can express
_LISTED = 20
_END, _END_BYTES = b"PK\5\6", 22  # the record that ends a zip, but for the comment
_LONGEST_END = _END_BYTES + 0xFFFF
_LONGEST_RECIPE = 40


@dataclass(frozen=True)
class ImportReport:
    """What was written.

    Attributes:
        name: Of the domain.
        path: The zip.
        images: Number of images by class.
        notes: What is worth knowing about them.
        skipped: The pictures that could not be read and were left out, each with the reason.
    """

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
    """The name, if it can be one step of a path.

    Raises:
        RatpError: If it cannot.
    """
    if not name or name.startswith(".") or any(sign in name for sign in "/\\:") or not name.isprintable():
        raise RatpError(
            f"{name!r} cannot be the name of a {kind}: it must not be empty, begin with a dot or hold / \\ :."
        )
    return name


def free_path(out: Path, name: str, *, replace: bool) -> Path:
    """Where a domain goes.

    Raises:
        RatpError: If something is there that must not be replaced.
    """
    path = out / f"{name}.zip"
    if path.exists() and not replace:
        raise RatpError(f"{path} exists already. Remove it first, or have it replaced with --replace.")
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

    Pictures are numbered in the order they come; a picture left out leaves a gap.

    Args:
        name: Of the domain.
        pictures: What goes in.
        out: The folder; made if need be.
        provenance: Where the pictures come from, if they were made rather than published.
        replace: Whether a file of that name may be replaced.
        on_bad_image: Whether a picture that cannot be read stops everything, or is left out and reported.
        expected: How many pictures there must be, if that is known.
        progress: Called with the number of pictures so far, and of all.

    Raises:
        RatpError: If there is nothing to write, pictures cannot be read, their number is wrong, the file exists or
            cannot be written.
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
    with _written_beside(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
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
        shown = [f"  {problem}" for problem in bad[:_LISTED]]
        more = [f"  and {len(bad) - _LISTED:,} more"] if len(bad) > _LISTED else []
        total = len(bad) + sum(written.values())
        raise RatpError(
            "\n".join(
                [
                    f"{len(bad):,} of {total:,} images of {name!r} cannot be read, and nothing was imported:",
                    *shown,
                    *more,
                    "Repair or remove them, or leave them out with on_bad_image='skip' (--on-bad-image skip).",
                ]
            )
        )


@contextmanager
def _written_beside(path: Path) -> Iterator[Any]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise RatpError(
            f"cannot write {path}: {error.strerror or error}. Choose a folder you may write to, with room left."
        ) from error


def provenance(path: Path) -> dict[str, Any] | None:
    """What the comment of a domain's zip says of its making. Nothing else of the file is read.

    Returns:
        For a rebuilt set ``{"rebuilt": True, "recipe": …, "seed": …, …}``; None for any other file.
    """
    try:
        said = json.loads(_comment(path))
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and "rebuilt" in said else None


def _comment(path: Path) -> bytes:
    """The comment of a zip, which ends the file; empty if it has none or is no zip."""
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
    """In a few words, what a domain is if it is not the published data.

    Returns:
        E.g. ``"rebuilt: mnist_m 1, seed 3"``; None for folders and zips that do not say that they were made.
    """
    made = provenance(path)
    if made is None:
        return None
    recipe, seed = made.get("recipe"), made.get("seed")
    known = isinstance(recipe, str) and recipe.isprintable() and len(recipe) <= _LONGEST_RECIPE
    return f"rebuilt: {recipe}, seed {seed}" if known and isinstance(seed, int) else "rebuilt"
